"""Gradients that should be the same ones, compared byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...runtime import dist
from .verdicts import Verdict

Gradients = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """The first gradient that is not equal bit for bit.

    Attributes:
        largest: of the differences of its numbers; None where one has no gradient, or it has another shape.
        relative: the same, relative to the largest number expected.
    """

    name: str
    num_differing: int
    num_numbers: int
    largest: float | None
    relative: float | None


@dataclass(frozen=True)
class Comparison:
    """What one rank found."""

    num_gradients: int
    num_differing: int
    first: Difference | None
    num_zero: int


def compare(found: Gradients, reference: Gradients | None, device: torch.device) -> Comparison:
    """Compare this rank's gradients with rank 0's reference, a tensor at a time.

    Args:
        reference: on rank 0; None elsewhere.

    Ranks: collective over all ranks.
    """
    known = [(name, None if g is None else (g.shape, g.dtype)) for name, g in (reference or {}).items()]
    known = dist.broadcast_object(known)
    differences: list[Difference] = []
    num_zero = 0
    for name, form in known:
        expected = None
        if form is not None:
            own = None if reference is None else reference[name]
            expected = torch.empty(form[0], dtype=form[1], device=device) if own is None else own.to(device)
            dist.broadcast_([expected])
            expected = expected.cpu()
            num_zero += not expected.any()
        difference = _find_difference(name, found.get(name), expected)
        if difference is not None:
            differences.append(difference)
    names = {name for name, _ in known}
    differences += [Difference(name, 0, 0, None, None) for name in found if name not in names]
    return Comparison(len(known), len(differences), differences[0] if differences else None, num_zero)


def _find_difference(name: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> Difference | None:
    if found is None and expected is None:
        return None
    if found is None or expected is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return Difference(name, 0, 0, None, None)
    # By bytes: NaN is equal to NaN here, and 0 is not -0.
    differing = (_as_bytes(found) != _as_bytes(expected)).any(dim=1)  # [numbers]
    if not differing.any():
        return None
    largest = float((found.double() - expected.double()).abs().max())
    scale = float(expected.double().abs().max())
    return Difference(name, int(differing.sum()), found.numel(), largest, largest / scale if scale else None)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())


def judge_reference(reference: Gradients | None, repeated: Gradients | None, mode: str) -> Verdict:
    """Judge two runs of the unsharded model, which rank 0 has: whether they can tell anything at all."""
    text = f"plain transformers and PEFT on rank 0, twice with the same bits{mode}"
    if reference is None or repeated is None:
        return Verdict("reference", text)
    unsteady = [name for name in reference if _find_difference(name, repeated[name], reference[name]) is not None]
    broken = [name for name, gradient in reference.items() if gradient is None or not gradient.isfinite().all()]
    if unsteady:
        text = (
            f"two runs of the unsharded model differ in {len(unsteady)} gradients, first '{unsteady[0]}'{mode}: "
            "kernels here do not repeat themselves, so nothing can be told by bits; try --attn_implementation eager"
        )
        return Verdict("reference", text, is_right=False)
    if broken:
        text = f"the unsharded model has no finite gradient of {len(broken)} parameters, first '{broken[0]}'"
        return Verdict("reference", text, is_right=False)
    return Verdict("reference", text)


def judge(comparison: Comparison, num_layers: int) -> Verdict:
    """Say in a line what was found."""
    facts: dict[str, Any] = {"num_gradients": comparison.num_gradients, "num_differing": comparison.num_differing}
    first = comparison.first
    if first is None:
        zero = f" ({comparison.num_zero} of them are zero)" if comparison.num_zero else ""
        text = f"equal: {comparison.num_gradients} gradients of {num_layers} layers, bit for bit{zero}"
        return Verdict("gradients", text, facts=facts)
    facts |= {"first": first.name, "largest_difference": first.largest, "num_numbers_differing": first.num_differing}
    if first.largest is None:
        how = "it is missing on one side, or has another shape"
    else:
        share = "" if first.relative is None else f" ({first.relative:.2g} of its largest)"
        how = f"by up to {first.largest:.3g}{share}, in {first.num_differing} of its {first.num_numbers} numbers"
    text = f"{comparison.num_differing} of {comparison.num_gradients} differ; the first is '{first.name}': {how}"
    return Verdict("gradients", text, False, facts)
