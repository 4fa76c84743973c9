"""Gradients that should be the same ones, compared byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...runtime import dist
from ..checks import Check

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """How two gradients differ; `largest` is None where one is missing, or has another shape or dtype."""

    largest: float | None = None
    num_values: int = 0
    text: str = "it is missing on one side, or has another shape"


def compare(found: Gradients, reference: Gradients | None, num_layers: int, device: torch.device) -> Check:
    """Compare this rank's gradients with rank 0's reference, one tensor at a time.

    Args:
        reference: on rank 0; None elsewhere.

    Ranks: collective over all ranks.
    """
    forms = {name: None if g is None else (g.shape, g.dtype) for name, g in (reference or {}).items()}
    forms = dist.broadcast_object(forms)
    differences = {}
    num_zero = 0
    for name, form in forms.items():
        expected = None
        if form is not None:
            own = None if reference is None else reference[name]
            expected = torch.empty(form[0], dtype=form[1], device=device) if own is None else own.to(device)
            dist.broadcast_([expected])
            expected = expected.cpu()
            num_zero += not expected.any()
        if (difference := find_difference(found.get(name), expected)) is not None:
            differences[name] = difference
    differences |= {name: Difference() for name in found if name not in forms}
    figures: dict[str, Any] = {"num_gradients": len(forms), "num_differing": len(differences)}
    if not differences:
        zero = f" ({num_zero} of them are zero)" if num_zero else ""
        text = f"equal: {len(forms)} gradients of {num_layers} layers, bit for bit{zero}"
        return Check.passed("gradients", text, **figures)
    name, first = next(iter(differences.items()))
    return Check.failed(
        "gradients",
        f"{len(differences)} of {len(forms)} differ; the first is '{name}': {first.text}",
        **figures,
        first=name,
        largest_difference=first.largest,
        num_numbers_differing=first.num_values,
    )


def find_difference(found: torch.Tensor | None, expected: torch.Tensor | None) -> Difference | None:
    """Return how two gradients differ, None if they are equal byte for byte: NaN is NaN's equal, and -0 not 0's."""
    if found is None or expected is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return None if found is expected else Difference()
    # [values, bytes of each]
    rows = [t.contiguous().view(-1).view(torch.uint8).view(t.numel(), t.element_size()) for t in (found, expected)]
    num_differing = int(rows[0].ne(rows[1]).any(dim=1).sum())
    if not num_differing:
        return None
    largest = float((found.double() - expected.double()).abs().max())
    scale = float(expected.double().abs().max())
    share = f" ({largest / scale:.2g} of its largest)" if scale else ""
    text = f"by up to {largest:.3g}{share}, in {num_differing} of its {found.numel()} values"
    return Difference(largest, num_differing, text)


def check_reference(reference: Gradients | None, repeated: Gradients | None, mode: str) -> Check:
    """Compare two runs of the unsharded model, which rank 0 has: where they differ, bits prove nothing."""
    if reference is None or repeated is None:
        reference = repeated = {}
    unsteady = [name for name in reference if find_difference(repeated[name], reference[name]) is not None]
    broken = [name for name, gradient in reference.items() if gradient is None or not gradient.isfinite().all()]
    if unsteady:
        found = f"two runs of the unsharded model differ in {len(unsteady)} gradients, first '{unsteady[0]}'{mode}"
        fix = "these kernels are not deterministic, so bits prove nothing: try --attn_implementation eager"
        return Check.failed("reference", found, fix)
    if broken:
        found = f"the unsharded model has no finite gradient of {len(broken)} parameters, first '{broken[0]}'"
        return Check.failed("reference", found)
    return Check.passed("reference", f"plain transformers and PEFT on rank 0, twice with the same bits{mode}")
