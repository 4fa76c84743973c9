"""What `numerics: fused` gains, by the bytes and kernels that are gone where elementwise operations are fused."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config.placement import ResolvedPlacement
from ..config.quantization_options import Quantization
from ..model.fusing import Numerics, choose_numerics
from ..runtime.agreement import raise_on_all_ranks
from ..weights.stored_formats import settle_quantization
from .activations import Activations
from .costs import Workload, compute_row
from .hardware import Cluster
from .size import ModelSize, find_model_type, find_stored
from .tracker import Work


def fuse(work: Work) -> Work:
    """Return the work that is left where each run of elementwise operations is one kernel."""
    return replace(
        work,
        moved_bytes=work.moved_bytes - work.fusible_bytes,
        num_kernels=work.num_kernels - work.fusible_kernels,
        fusible_bytes=0.0,
        fusible_kernels=0.0,
    )


def fuse_layers(activations: Activations) -> Activations:
    """Return the activations where the decoder layers are fused: their work, and the same bytes in memory."""
    return replace(
        activations,
        forward=tuple(map(fuse, activations.forward)),
        backward=tuple(map(fuse, activations.backward)),
    )


def fuse_workload(workload: Workload) -> Workload:
    """Return what a step is where the decoder layers are fused."""
    saved = workload.saved_activations
    return replace(
        workload,
        activations=fuse_layers(workload.activations),
        saved_activations=None if saved is None else fuse_layers(saved),
    )


def choose_for(
    model_name_or_path: str,
    revision: str | None,
    quantization: Quantization | None,
    device: torch.device,
    before: str | None = None,
) -> Numerics:
    """Return what `fused` becomes for a checkpoint, from its config alone.

    Args:
        quantization: what is asked for; files that are quantized already count too.
        before: as for `choose_numerics`.

    Raises:
        CheckpointError: the config cannot be found.
        ConfigError: as for `choose_numerics`.

    Ranks: collective over all ranks.
    """

    def read() -> tuple[str | None, Quantization | None]:
        stored = find_stored(model_name_or_path, revision)
        settled = quantization if stored is None else settle_quantization(stored, quantization, model_name_or_path)
        return find_model_type(model_name_or_path, revision), settled

    found = raise_on_all_ranks(read)
    assert found is not None
    return choose_numerics(device, *found, before)


def describe_gain(
    size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement, is_fused: bool
) -> str:
    """Return a sentence on how many more tokens a second there are with `numerics: fused`.

    Args:
        workload: of exact numerics.
        is_fused: whether the run that is planned is fused, so that its figures contain the gain.
    """
    exact = compute_row(size, workload, cluster, placement)
    fused = compute_row(size, fuse_workload(workload), cluster, placement)
    gain = f"{exact.step_s / fused.step_s - 1:.0%}"
    if size.quantization is not None:  # not compiled, and Liger's kernels fuse less
        return f"numerics: fused would gain less than {gain} (predicted), with Liger's kernels, on GPUs alone"
    if is_fused:
        return (
            f"the decoder layers are fused: by torch.compile they are predicted to gain {gain} over numerics: exact, "
            "which is in the figures; Liger's kernels, which are taken where it cannot run, gain less"
        )
    return f"numerics: fused would gain about {gain} by torch.compile (predicted)"
