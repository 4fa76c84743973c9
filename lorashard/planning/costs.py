"""Bytes and seconds of one placement: arithmetic over a model's sizes, a microbatch's activations and a cluster."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ..config.placement import ResolvedPlacement
from ..engine.slots import plan_slots
from ..model.homes import choose_resident
from ..model.units import EMBEDDING, LAYER, TOWER, WHOLE, size_class
from .activations import Activations, recompute_some
from .hardware import Cluster, Hardware
from .simulate import Stop, Traffic, Transfer, simulate
from .size import ModelSize, UnitSize
from .tracker import Work

# Bytes of optimizer state for each trained parameter, where they are not two numbers of float32.
_STATE_BYTES = {
    "sgd": 0,
    "adafactor": 0,
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 0,
    "paged_adamw_32bit": 0,
    "paged_adamw": 0,
    "paged_lion_8bit": 0,
    "paged_lion_32bit": 0,
    "paged_lion": 0,
    "paged_ademamix_8bit": 0,
    "paged_ademamix_32bit": 0,
    "lion_8bit": 1,
    "lion_32bit": 4,
    "lion": 4,
    "adagrad": 4,
    "rmsprop": 4,
    "rmsprop_bnb": 4,
    "rmsprop_bnb_8bit": 1,
    "rmsprop_bnb_32bit": 4,
    "ademamix": 12,
    "ademamix_8bit": 3,
}
_TWO_FLOATS_BYTES = 8

# A hop of a ring: NCCL's own figures for NVLink and for InfiniBand, with the start of the collective.
_PEER_HOP_S = 3e-6
_NETWORK_HOP_S = 8e-6
# DDP's first bucket to be reduced last, which nothing hides.
_LAST_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Workload:
    """What a step trains on.

    Attributes:
        activations: of one microbatch, with the activation checkpointing that was asked for.
        microbatch_tokens: of one rank.
        saved_activations: without activation checkpointing, where some layers may do without; else None.
        optimizer: transformers' name of it.
        dataset_tokens: of all epochs, if known.
    """

    activations: Activations
    microbatch_tokens: int
    saved_activations: Activations | None = None
    accumulation_steps: int = 1
    optimizer: str = "adamw_torch_fused"
    dataset_tokens: int | None = None

    def activations_of(self, placement: ResolvedPlacement) -> Activations:
        """Return the activations of one microbatch where `placement` says how many layers are recomputed."""
        wanted = placement.activation_checkpointing_layers
        if wanted == "all" or self.saved_activations is None:
            return self.activations
        return recompute_some(self.activations, self.saved_activations, wanted)


@dataclass(frozen=True)
class Row:
    """What one placement costs; bytes are a rank's, if not said otherwise.

    Attributes:
        rest_bytes: of the base at rest on the device.
        slot_bytes: of the slots.
        adapter_bytes: of the adapter, its gradients, DDP's buckets and the optimizer's state.
        activation_bytes: the most while decoder layers run.
        logits_bytes: what the head and the loss take on top of what layers saved; never at the same time.
        peak_bytes: the most of everything.
        host_bytes: of the base in this rank's own host memory.
        file_bytes: of files that all ranks of a node read through the page cache, which may be evicted.
        gathered_bytes: made whole by gathers, in a step.
        copied_bytes: copied from host memory or files, in a step.
        step_s: predicted, of which `wait_s` waits for the base.
        lacks: what is missing, or None if it fits.
        workspace_bytes: what quantized weights are unpacked to, one at a time.
    """

    placement: ResolvedPlacement
    rest_bytes: int
    slot_bytes: int
    adapter_bytes: int
    activation_bytes: int
    logits_bytes: int
    peak_bytes: int
    host_bytes: int
    file_bytes: int
    gathered_bytes: int
    copied_bytes: int
    step_s: float
    wait_s: float
    tokens_per_s: float
    dataset_s: float | None
    lacks: str | None
    workspace_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.lacks is None


@dataclass(frozen=True)
class _Memory:
    rest_bytes: int
    slot_bytes: int
    host_bytes: int
    file_bytes: int
    num_slots: dict[str, int]
    is_whole: dict[int, bool]
    num_shards: int


def compute_row(size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement) -> Row:
    """Return what `placement` costs."""
    memory = _place(size, cluster, placement)
    activations = workload.activations_of(placement)
    traffic = _run(size, activations, cluster, placement, memory)
    adapter_bytes = count_adapter_bytes(size, workload.optimizer, cluster.num_ranks)
    peak_bytes = _add_up(memory, adapter_bytes, activations)
    steps = workload.accumulation_steps
    step_s = traffic.seconds * steps + _finish_step_s(size, workload, activations, cluster)
    tokens_per_s = workload.microbatch_tokens * steps * cluster.num_ranks / step_s
    row = Row(
        placement=placement,
        rest_bytes=memory.rest_bytes,
        slot_bytes=memory.slot_bytes,
        adapter_bytes=adapter_bytes,
        activation_bytes=activations.saved_bytes + activations.layer_bytes,
        logits_bytes=activations.logits_bytes,
        peak_bytes=peak_bytes,
        host_bytes=memory.host_bytes,
        file_bytes=memory.file_bytes,
        gathered_bytes=traffic.gathered_bytes * steps,
        copied_bytes=traffic.copied_bytes * steps,
        step_s=step_s,
        wait_s=traffic.wait_s * steps,
        tokens_per_s=tokens_per_s,
        dataset_s=workload.dataset_tokens / tokens_per_s if workload.dataset_tokens else None,
        lacks=None,
        workspace_bytes=activations.workspace_bytes,
    )
    return replace(row, lacks=find_lack(row, cluster))


def find_lack(row: Row, cluster: Cluster) -> str | None:
    """Return what `row` needs more of than there is, or None."""
    is_cpu = cluster.hardware.device_type == "cpu"
    needed = row.peak_bytes + (row.host_bytes if is_cpu else 0)
    if needed > cluster.free_bytes:
        return f"{_gib(needed)} of {_gib(cluster.free_bytes)} GiB"
    node_bytes = row.host_bytes * cluster.ranks_per_node
    if not is_cpu and cluster.free_host_bytes is not None and node_bytes > cluster.free_host_bytes:
        return f"{_gib(node_bytes)} of {_gib(cluster.free_host_bytes)} GiB of host memory on a node"
    return None


def fit_resident_layers(
    size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement
) -> ResolvedPlacement | None:
    """Return `placement` with as many resident layers as fit, or None if not one does."""
    counts = range(1, len(size.layers) + 1)
    candidates = [replace(placement, resident_layers=count) for count in counts]
    # Each takes more than the one before: the number that fit is where the first does not.
    num_fitting = bisect(candidates, False, key=lambda candidate: not _fits(size, workload, cluster, candidate))
    return candidates[num_fitting - 1] if num_fitting else None


def fit_saving_layers(
    size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement
) -> ResolvedPlacement | None:
    """Return `placement` with as many layers as fit that save their activations, or None if not one does."""
    for count in range(len(size.layers)):
        candidate = replace(placement, activation_checkpointing_layers=count)
        if _fits(size, workload, cluster, candidate):
            return candidate
    return None


def _fits(size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement) -> bool:
    memory = _place(size, cluster, placement)
    others = count_adapter_bytes(size, workload.optimizer, cluster.num_ranks)
    return _add_up(memory, others, workload.activations_of(placement)) <= cluster.free_bytes


def _add_up(memory: _Memory, adapter_bytes: int, activations: Activations) -> int:
    base_bytes = memory.rest_bytes + memory.slot_bytes + activations.workspace_bytes
    return base_bytes + adapter_bytes + activations.peak_bytes


def count_adapter_bytes(size: ModelSize, optimizer: str, num_ranks: int) -> int:
    """Return the bytes of the adapter, its gradients, DDP's buckets on several ranks, and the optimizer's state."""
    copies = 3 if num_ranks > 1 else 2
    return size.adapter_bytes * copies + size.adapter_parameters * _STATE_BYTES.get(optimizer, _TWO_FLOATS_BYTES)


def compute_seconds(work: Work, hardware: Hardware) -> float:
    """Return how long a device takes: for its matmuls and everything else, or for starting them if that is longer."""
    device_s = max(0.0, work.flops) / hardware.flops_per_s + max(0.0, work.moved_bytes) / hardware.memory_bytes_per_s
    return max(device_s, work.num_kernels * hardware.kernel_s)


def gather_seconds(num_bytes: int, num_shards: int, cluster: Cluster) -> float:
    """Return how long an all-gather takes that makes `num_bytes` whole on `num_shards` ranks.

    A ring, as NCCL's: inside a node each rank receives what it lacks; between nodes each node does, over all its links.
    """
    local = min(num_shards, cluster.ranks_per_node)
    num_nodes = -(-num_shards // cluster.ranks_per_node)
    inside_s = num_bytes * (num_shards - 1) / num_shards / cluster.hardware.peer_bytes_per_s if local > 1 else 0.0
    across_s = num_bytes * (num_nodes - 1) / num_nodes / cluster.hardware.network_bytes_per_s
    return max(inside_s, across_s) + (local - 1) * _PEER_HOP_S + (num_nodes - 1) * _NETWORK_HOP_S


def _place(size: ModelSize, cluster: Cluster, placement: ResolvedPlacement) -> _Memory:
    """Say where each unit rests, as the homes do."""
    is_cpu = cluster.hardware.device_type == "cpu"
    is_mapped = placement.placement == "file" and is_cpu
    resident = choose_resident(size, placement.resident_layers) if not is_mapped else []  # type: ignore[arg-type]
    num_shards = placement.group_size
    rest_bytes = host_bytes = file_bytes = 0
    moving: list[Any] = []
    is_whole: dict[int, bool] = {}
    for index, unit in enumerate(size.units):
        is_resident = any(unit is other for other in resident)
        at_home = placement.placement if not is_resident else "replicate"
        if at_home == "host":
            host_bytes += unit.shard_bytes(num_shards)
        elif at_home == "file":
            file_bytes += unit.layout.used_bytes
        else:
            rest_bytes += unit.shard_bytes(1 if is_resident else num_shards)
        is_whole[index] = is_resident or is_mapped or (at_home in ("replicate", "shard") and num_shards == 1)
        if not is_whole[index]:
            layout = replace(unit.layout, num_shards=num_shards)
            moving.append(SimpleNamespace(size_class=size_class(unit.kind), layout=layout))
    slots = plan_slots(moving, num_layer_slots=2 + placement.prefetch)
    return _Memory(
        rest_bytes=rest_bytes,
        slot_bytes=sum(number * num_bytes for number, num_bytes in slots.values()),
        host_bytes=host_bytes,
        file_bytes=file_bytes,
        num_slots={name: number for name, (number, _) in slots.items()},
        is_whole=is_whole,
        num_shards=num_shards,
    )


def _run(
    size: ModelSize, activations: Activations, cluster: Cluster, placement: ResolvedPlacement, memory: _Memory
) -> Traffic:
    hardware = cluster.hardware
    layers = iter(zip(activations.forward, activations.backward, strict=True))
    rest_s = compute_seconds(activations.rest, hardware)
    stops = []
    for unit, kind in size.visits:
        index = next(i for i, other in enumerate(size.units) if other is unit)
        if kind == LAYER:
            forward, backward = next(layers)
            stops.append(Stop(index, compute_seconds(forward, hardware), compute_seconds(backward, hardware)))
        elif kind in (TOWER, WHOLE):  # a row is planned as text alone
            continue
        elif kind == EMBEDDING:
            stops.append(Stop(index, 0.0, None))
        else:
            stops.append(Stop(index, rest_s / 3, rest_s * 2 / 3))
    transfers = [
        None if memory.is_whole[index] else _plan_transfer(unit, memory.num_shards, cluster, placement)
        for index, unit in enumerate(size.units)
    ]
    return simulate(stops, transfers, memory.num_slots, placement.prefetch, hardware.is_overlapping)


def _plan_transfer(unit: UnitSize, num_shards: int, cluster: Cluster, placement: ResolvedPlacement) -> Transfer:
    hardware = cluster.hardware
    slots = size_class(unit.kind)
    if placement.placement == "file":
        num_bytes = unit.layout.used_bytes
        return Transfer(slots, num_bytes / hardware.file_bytes_per_s, 0, num_bytes)
    gathered_bytes = unit.total_bytes(num_shards) if num_shards > 1 else 0
    seconds = gather_seconds(gathered_bytes, num_shards, cluster) if num_shards > 1 else 0.0
    copied_bytes = unit.shard_bytes(num_shards) if placement.placement == "host" else 0
    return Transfer(slots, seconds + copied_bytes / hardware.host_bytes_per_s, gathered_bytes, copied_bytes)


def _finish_step_s(size: ModelSize, workload: Workload, activations: Activations, cluster: Cluster) -> float:
    """Return the adapter's all-reduce, as far as the last backward does not hide it, and the optimizer's step."""
    hardware = cluster.hardware
    # Parameters, gradients and states are read, parameters and states written.
    state_bytes = size.adapter_parameters * _STATE_BYTES.get(workload.optimizer, _TWO_FLOATS_BYTES)
    update_s = (3 * size.adapter_bytes + 2 * state_bytes) / hardware.memory_bytes_per_s
    if cluster.num_ranks == 1:
        return update_s
    # A reduce-scatter and an all-gather.
    reduce_s = 2 * gather_seconds(size.adapter_bytes, cluster.num_ranks, cluster)
    last_s = 2 * gather_seconds(min(size.adapter_bytes, _LAST_BUCKET_BYTES), cluster.num_ranks, cluster)
    hidden_s = sum(compute_seconds(work, hardware) for work in activations.backward)
    return update_s + (max(last_s, reduce_s - hidden_s) if hardware.is_overlapping else reduce_s)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
