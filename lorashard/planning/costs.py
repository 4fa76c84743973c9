"""Bytes and seconds of one placement: arithmetic over a model's sizes, a microbatch's activations and a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.placement import ResolvedPlacement
from ..model.units import EMBEDDING, LAYER, TOWER, WHOLE
from .activations import Activations, recompute_some
from .hardware import Cluster, Hardware
from .memory import BaseMemory, count_state_bytes, count_trained_bytes, place_base
from .simulate import TimedEntry, Traffic, Transfer, simulate
from .size import ModelSize, UnitSize
from .tracker import Work

# A hop of a ring: NCCL's own figures for NVLink and for InfiniBand, with the start of the collective.
_PEER_HOP_S = 3e-6
_NETWORK_HOP_S = 8e-6
# DDP's first bucket to be reduced last, which nothing hides.
_LAST_BUCKET_BYTES = 25 * 2**20
# What a plan may fill of a machine's available memory, which other processes take from too.
_CPU_SHARE = 0.9


@dataclass(frozen=True)
class Workload:
    """What a step trains on.

    Attributes:
        activations: of one microbatch, with activation checkpointing as it is given.
        microbatch_tokens: tokens of one microbatch, of which ranks that share it have a part each.
        saved_activations: those without activation checkpointing, where some layers may do without it; else None.
        optimizer: transformers' name of it.
        dataset_tokens: of all epochs, if known.
        joined_state_bytes: of the states of all jobs' optimizers, where a sweep's jobs are joined; else None.
    """

    activations: Activations
    microbatch_tokens: int
    saved_activations: Activations | None = None
    accumulation_steps: int = 1
    optimizer: str = "adamw_torch_fused"
    dataset_tokens: int | None = None
    joined_state_bytes: int | None = None

    def state_bytes_of(self, size: ModelSize) -> int:
        """Return the bytes of the optimizer's state."""
        joined = self.joined_state_bytes
        return count_state_bytes(size, self.optimizer) if joined is None else joined

    def activations_of(self, placement: ResolvedPlacement) -> Activations:
        """Return the activations of one microbatch where `placement` says how many layers are recomputed."""
        wanted = placement.activation_checkpointing_layers
        if wanted == "all" or self.saved_activations is None:
            return self.activations
        return recompute_some(self.activations, self.saved_activations, wanted)


@dataclass(frozen=True)
class Row:
    """What one placement costs; bytes are one rank's.

    Attributes:
        rest_bytes, slot_bytes, host_bytes, file_bytes: as in `BaseMemory`.
        adapter_bytes: of the adapter, its gradients, DDP's buckets and the optimizer's state.
        activation_bytes: the most while decoder layers run.
        logits_bytes: what the head and the loss take on top of what layers saved; never at the same time.
        peak_bytes: the most of everything on the device.
        gathered_bytes: gathered in a step.
        copied_bytes: copied from host memory or files, in a step.
        step_s: seconds of a step, of which `wait_s` wait for the base.
        lacks: what there is too little of, or None if it fits.
        workspace_bytes: of the buffer that quantized weights are unpacked into, one at a time.
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

    @property
    def fixed_bytes(self) -> int:
        """What the device holds however long a microbatch is."""
        return self.rest_bytes + self.slot_bytes + self.adapter_bytes + self.workspace_bytes


def compute_row(size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement) -> Row:
    """Return what `placement` costs."""
    memory = place_base(size, placement, cluster.hardware.device_type)
    activations = workload.activations_of(placement)
    traffic = _move_base(size, activations, cluster, placement, memory)
    adapter_bytes = count_trained_bytes(size, workload.state_bytes_of(size), cluster.num_ranks)
    beside_bytes = _count_beside(size, workload, cluster, placement)
    steps = workload.accumulation_steps
    step_s = traffic.seconds * steps + _finish_step_s(size, workload, activations, cluster, placement)
    num_groups = cluster.num_ranks // placement.sequence_parallel_size
    tokens_per_s = workload.microbatch_tokens * steps * num_groups / step_s
    return Row(
        placement=placement,
        rest_bytes=memory.rest_bytes,
        slot_bytes=memory.slot_bytes,
        adapter_bytes=adapter_bytes,
        activation_bytes=activations.saved_bytes + activations.layer_bytes,
        logits_bytes=activations.logits_bytes,
        peak_bytes=memory.rest_bytes + memory.slot_bytes + beside_bytes,
        host_bytes=memory.host_bytes,
        file_bytes=memory.file_bytes,
        gathered_bytes=traffic.gathered_bytes * steps,
        copied_bytes=traffic.copied_bytes * steps,
        step_s=step_s,
        wait_s=traffic.wait_s * steps,
        tokens_per_s=tokens_per_s,
        dataset_s=workload.dataset_tokens / tokens_per_s if workload.dataset_tokens else None,
        lacks=_find_lack(memory, beside_bytes, cluster),
        workspace_bytes=activations.workspace_bytes,
    )


def _find_lack(memory: BaseMemory, beside_bytes: int, cluster: Cluster) -> str | None:
    """Return what there is too little of, or None if the base fits with `beside_bytes` beside it."""
    needed_bytes = memory.device_bytes + beside_bytes
    if needed_bytes > cluster.free_bytes:
        return f"{_gib(needed_bytes)} of {_gib(cluster.free_bytes)} GiB"
    node_bytes = memory.host_bytes * cluster.ranks_per_node
    is_cpu = cluster.hardware.device_type == "cpu"
    if not is_cpu and cluster.free_host_bytes is not None and node_bytes > cluster.free_host_bytes:
        return f"{_gib(node_bytes)} of {_gib(cluster.free_host_bytes)} GiB of host memory on a node"
    return None


def leaves_room(size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement) -> bool:
    """Tell whether `placement` may take memory only to be faster.

    On a CPU the memory is also the machine's: a margin stays free, and the base's pages of files stay in the page
    cache, for they would be read from the disk in every pass.
    """
    device_type = cluster.hardware.device_type
    memory = place_base(size, placement, device_type)
    needed_bytes = memory.device_bytes + _count_beside(size, workload, cluster, placement)
    if device_type != "cpu":
        return needed_bytes <= cluster.free_bytes
    return needed_bytes + memory.file_bytes / cluster.ranks_per_node <= _CPU_SHARE * cluster.free_bytes


def _count_beside(size: ModelSize, workload: Workload, cluster: Cluster, placement: ResolvedPlacement) -> int:
    """Return the most bytes that a step takes beside the base."""
    activations = workload.activations_of(placement)
    adapter_bytes = count_trained_bytes(size, workload.state_bytes_of(size), cluster.num_ranks)
    return adapter_bytes + activations.workspace_bytes + activations.peak_bytes


def compute_seconds(work: Work, hardware: Hardware) -> float:
    """Return how long a device takes: for matmuls and everything else, or for starting kernels if that is longer."""
    device_s = max(0.0, work.flops) / hardware.flops_per_s + max(0.0, work.moved_bytes) / hardware.memory_bytes_per_s
    return max(device_s, work.num_kernels * hardware.kernel_s)


def gather_seconds(num_bytes: int, num_shards: int, cluster: Cluster) -> float:
    """Return how long an all-gather of `num_bytes` in all takes on `num_shards` ranks.

    A ring, as NCCL's: inside a node each rank receives what it lacks; between nodes each node does, over all its links.
    """
    local = min(num_shards, cluster.ranks_per_node)
    num_nodes = -(-num_shards // cluster.ranks_per_node)
    inside_s = num_bytes * (num_shards - 1) / num_shards / cluster.hardware.peer_bytes_per_s if local > 1 else 0.0
    across_s = num_bytes * (num_nodes - 1) / num_nodes / cluster.hardware.network_bytes_per_s
    return max(inside_s, across_s) + (local - 1) * _PEER_HOP_S + (num_nodes - 1) * _NETWORK_HOP_S


def exchange_seconds(work: Work, num_ranks: int, cluster: Cluster) -> float:
    """Return how long all-to-alls take among `num_ranks` ranks, each of which keeps its own part.

    Each rank receives as much as it sends: inside a node over its own link, and all ranks of a node over its network.
    """
    local = min(num_ranks, cluster.ranks_per_node)
    num_nodes = -(-num_ranks // cluster.ranks_per_node)
    inside_s = work.exchanged_bytes * (local - 1) / num_ranks / cluster.hardware.peer_bytes_per_s
    node_bytes = work.exchanged_bytes * (num_ranks - local) / num_ranks * cluster.ranks_per_node
    across_s = node_bytes / cluster.hardware.network_bytes_per_s
    hops_s = (local - 1) * _PEER_HOP_S + (num_nodes - 1) * _NETWORK_HOP_S
    return max(inside_s, across_s) + work.num_exchanges * hops_s


def _layer_seconds(work: Work, cluster: Cluster, placement: ResolvedPlacement) -> float:
    """Return how long a layer takes; attention waits for its exchanges."""
    exchange_s = exchange_seconds(work, placement.sequence_parallel_size, cluster)
    return compute_seconds(work, cluster.hardware) + exchange_s


def _move_base(
    size: ModelSize, activations: Activations, cluster: Cluster, placement: ResolvedPlacement, memory: BaseMemory
) -> Traffic:
    hardware = cluster.hardware
    layers = iter(zip(activations.forward, activations.backward, strict=True))
    rest_s = compute_seconds(activations.rest, hardware)
    entries = []
    for unit, kind in size.visits:
        if kind == LAYER:
            forward, backward = next(layers)
            seconds = (_layer_seconds(work, cluster, placement) for work in (forward, backward))
            entries.append(TimedEntry(unit.name, *seconds))
        elif kind in (TOWER, WHOLE):  # an example is planned as text alone
            continue
        elif kind == EMBEDDING:
            entries.append(TimedEntry(unit.name, 0.0, None))
        else:
            entries.append(TimedEntry(unit.name, rest_s / 3, rest_s * 2 / 3))
    transfers = {name: _plan_transfer(unit, cluster, placement) for name, unit in memory.sharded.items()}
    return simulate(entries, transfers, memory.num_slots, placement.prefetch, hardware.is_overlapping)


def _plan_transfer(unit: UnitSize, cluster: Cluster, placement: ResolvedPlacement) -> Transfer:
    hardware, layout = cluster.hardware, unit.layout
    if placement.placement == "file":
        return Transfer(unit.size_class, layout.used_bytes / hardware.file_bytes_per_s, 0, layout.used_bytes)
    gathered_bytes = layout.total_bytes if layout.num_shards > 1 else 0
    copied_bytes = layout.shard_bytes if placement.placement == "host" else 0
    seconds = gather_seconds(gathered_bytes, layout.num_shards, cluster) + copied_bytes / hardware.host_bytes_per_s
    return Transfer(unit.size_class, seconds, gathered_bytes, copied_bytes)


def _finish_step_s(
    size: ModelSize, workload: Workload, activations: Activations, cluster: Cluster, placement: ResolvedPlacement
) -> float:
    """Return the adapter's all-reduce, as far as the last backward does not hide it, and the optimizer's step."""
    hardware = cluster.hardware
    # Parameters, gradients and states are read, parameters and states written.
    state_bytes = workload.state_bytes_of(size)
    update_s = (3 * size.adapter_bytes + 2 * state_bytes) / hardware.memory_bytes_per_s
    if cluster.num_ranks == 1:
        return update_s
    # A reduce-scatter and an all-gather.
    reduce_s = 2 * gather_seconds(size.adapter_bytes, cluster.num_ranks, cluster)
    last_s = 2 * gather_seconds(min(size.adapter_bytes, _LAST_BUCKET_BYTES), cluster.num_ranks, cluster)
    hidden_s = sum(_layer_seconds(work, cluster, placement) for work in activations.backward)
    return update_s + (max(last_s, reduce_s - hidden_s) if hardware.is_overlapping else reduce_s)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
