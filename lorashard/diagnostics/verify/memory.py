"""How many layers of a model fit in memory, unsharded and sharded, by the planner's formula."""

from __future__ import annotations

import gc
from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from ...config.placement import ResolvedPlacement
from ...errors import ConfigError
from ...planning.auto import BaseModel
from ...planning.memory import count_adapter_bytes, place_base
from ...planning.probe import measure_free_bytes
from ...planning.size import measure_model
from ...planning.trace import Microbatch, trace
from ...runtime import dist
from ...runtime.agreement import raise_on_all_ranks
from ...runtime.disk import show_bytes

_HEADROOM_BYTES = 2**30


@dataclass(frozen=True)
class Fit:
    """How many decoder layers are compared.

    Attributes:
        needed_bytes: what comparing all layers would take at its peak.
        note: what the estimate leaves out.
    """

    num_layers: int
    num_all_layers: int
    needed_bytes: int
    free_bytes: int
    note: str | None = None

    def describe(self) -> str:
        """Return in words how much of the model is compared."""
        text = f"all {self.num_layers} layers"
        if self.num_layers < self.num_all_layers:
            needed, free = show_bytes(self.needed_bytes), show_bytes(self.free_bytes)
            layers = f"{self.num_layers} of {self.num_all_layers} layers"
            text = f"its first {layers}: all would take {needed}, {free} are free"
        return f"{text} ({self.note})" if self.note else text


def fit_layers(base: BaseModel, microbatch: Microbatch, placement: ResolvedPlacement, device: torch.device) -> Fit:
    """Return how many layers fit, unsharded on rank 0 and then sharded on all ranks; the same on all ranks.

    Raises:
        UserError: not even one layer fits, or the model cannot be found.

    Ranks: collective over all ranks; rank 0 computes.
    """
    free_bytes = min(dist.gather_objects(measure_free_bytes(device, 1)))
    ranks_per_node = dist.find_node_size() or dist.get_world_size()
    ranks_on_device = ranks_per_node if device.type == "cpu" else 1
    fit = raise_on_all_ranks(
        lambda: _fit(base, microbatch, placement, device.type, free_bytes, ranks_on_device), on_rank=0
    )
    fit = dist.broadcast_object(fit)
    assert fit is not None
    return fit


def _fit(
    base: BaseModel,
    microbatch: Microbatch,
    placement: ResolvedPlacement,
    device_type: str,
    free_bytes: int,
    ranks_on_device: int,
) -> Fit:
    size = measure_model(base.build(placement.unit_paths))
    num_layers = len(size.layers)
    activation_bytes, note = 0, None
    try:
        activation_bytes = trace(base.build(placement.unit_paths), microbatch).peak_bytes
    except ConfigError as error:
        note = f"activations are not counted: {error}"
    unsharded = replace(placement, placement="replicate", group_size=1, resident_layers="all")
    resident = placement.resident_layers

    def measure(count: int) -> int:
        """Return the peak of `count` layers: of the unsharded model, or of the ranks that share a device."""
        part = size.first_layers(count)
        sharded = replace(placement, resident_layers=resident if resident == "all" else min(resident, count))
        beside_bytes = activation_bytes + count_adapter_bytes(part, "sgd", 1)  # no step is taken, and none reduced
        alone, each = (place_base(part, chosen, device_type).device_bytes for chosen in (unsharded, sharded))
        return max(alone + beside_bytes, ranks_on_device * (each + beside_bytes))

    num_fitting = bisect_right(range(1, num_layers + 1), free_bytes - _HEADROOM_BYTES, key=measure)
    if not num_fitting:
        raise ConfigError(
            "nothing can be compared with an unsharded model here",
            where=base.model_name_or_path,
            expected=f"{show_bytes(measure(1) + _HEADROOM_BYTES)} for the embedding, one layer and the head",
            found=f"{show_bytes(free_bytes)} free",
            fix="give fewer --num_rows, or free memory",
        )
    return Fit(num_fitting, num_layers, measure(num_layers), free_bytes, note)


def free(device: torch.device) -> None:
    """Free the memory of a model that has no owner left; its hooks and modules reference one another."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
