"""What one rank keeps in memory under a placement: the base, its slots, and the adapter with its optimizer state."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..config.placement import ResolvedPlacement
from ..engine.slots import plan_slots
from ..model.homes import choose_resident
from .size import ModelSize, UnitSize

# Optimizers by the bytes of state for each trained parameter; of all others it is two float32 values.
_STATE_BYTES = {
    0: "sgd adafactor paged_adamw paged_adamw_8bit paged_adamw_32bit paged_lion paged_lion_8bit paged_lion_32bit "
    "paged_ademamix_8bit paged_ademamix_32bit",
    1: "lion_8bit rmsprop_bnb_8bit",
    2: "adamw_bnb_8bit adamw_8bit",
    3: "ademamix_8bit",
    4: "lion lion_32bit adagrad rmsprop rmsprop_bnb rmsprop_bnb_32bit",
    12: "ademamix",
}
_TWO_FLOATS_BYTES = 8


@dataclass(frozen=True)
class BaseMemory:
    """Where a base is, in bytes of one rank.

    Attributes:
        rest_bytes: at rest on the device.
        slot_bytes: of the slots.
        host_bytes: in this rank's own host memory.
        file_bytes: in files that all ranks of a node read through the page cache, which may be evicted.
        device_bytes: what the device holds in all; on a CPU host memory is the device's.
        num_slots: of each size class.
        sharded: the units that need a slot, by name, as they are sharded; the others stay unsharded.
    """

    rest_bytes: int
    slot_bytes: int
    host_bytes: int
    file_bytes: int
    device_bytes: int
    num_slots: dict[str, int]
    sharded: dict[str, UnitSize]


def place_base(size: ModelSize, placement: ResolvedPlacement, device_type: str) -> BaseMemory:
    """Return where the base is under `placement`: the one formula of training, inference and verification."""
    is_cpu = device_type == "cpu"
    is_mapped = placement.placement == "file" and is_cpu
    resident = choose_resident(size, placement.resident_layers) if not is_mapped else []  # type: ignore[arg-type]
    resident_names = {unit.name for unit in resident}
    rest_bytes = host_bytes = file_bytes = 0
    sharded: dict[str, UnitSize] = {}
    for unit in size.units:
        home = "replicate" if unit.name in resident_names else placement.placement
        unit = unit.shard_over(placement.group_size if home in ("shard", "host") else 1)
        if home == "host":
            host_bytes += unit.layout.shard_bytes
        elif home == "file":
            file_bytes += unit.layout.used_bytes
        else:
            rest_bytes += unit.layout.shard_bytes
        if home == "host" or (home == "file" and not is_mapped) or unit.layout.num_shards > 1:
            sharded[unit.name] = unit
    slots = plan_slots(sharded.values(), num_layer_slots=2 + placement.prefetch)
    slot_bytes = sum(number * num_bytes for number, num_bytes in slots.values())
    return BaseMemory(
        rest_bytes=rest_bytes,
        slot_bytes=slot_bytes,
        host_bytes=host_bytes,
        file_bytes=file_bytes,
        device_bytes=rest_bytes + slot_bytes + (host_bytes if is_cpu else 0),
        num_slots={name: number for name, (number, _) in slots.items()},
        sharded=sharded,
    )


def add_resident_layers(
    size: ModelSize, placement: ResolvedPlacement, fits: Callable[[ResolvedPlacement], bool]
) -> ResolvedPlacement | None:
    """Return `placement` with as many resident layers as fit, or None if not one does."""
    candidates = [replace(placement, resident_layers=count) for count in range(1, len(size.layers) + 1)]
    # Each takes more than the one before: the number that fit is where the first does not.
    num_fitting = bisect(candidates, False, key=lambda candidate: not fits(candidate))
    return candidates[num_fitting - 1] if num_fitting else None


def save_activations(
    size: ModelSize, placement: ResolvedPlacement, fits: Callable[[ResolvedPlacement], bool]
) -> ResolvedPlacement | None:
    """Return `placement` with as many layers as fit that save their activations, or None if not one does."""
    candidates = (replace(placement, activation_checkpointing_layers=count) for count in range(len(size.layers)))
    return next(filter(fits, candidates), None)


def count_adapter_bytes(size: ModelSize, optimizer: str, num_ranks: int) -> int:
    """Return the bytes of the adapter, its gradients, DDP's buckets on several ranks, and the optimizer's state."""
    return count_trained_bytes(size, count_state_bytes(size, optimizer), num_ranks)


def count_trained_bytes(size: ModelSize, state_bytes: int, num_ranks: int) -> int:
    """Return the same where the bytes of the optimizer's state are known, or of the optimizers of several jobs."""
    copies = 3 if num_ranks > 1 else 2
    return size.adapter_bytes * copies + state_bytes


def count_state_bytes(size: ModelSize, optimizer: str) -> int:
    """Return the bytes of the state of an optimizer, given by transformers' name of it."""
    each = next((count for count, names in _STATE_BYTES.items() if optimizer in names.split()), _TWO_FLOATS_BYTES)
    return size.adapter_parameters * each
