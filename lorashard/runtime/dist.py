"""Ranks and collectives: this file and `shared_groups.py` alone name `torch.distributed`'s collective operations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from .launch_env import read_launcher_env
from .rank_store import Lookout
from .shared_groups import SharedGroup, share_groups

T = TypeVar("T")
_logger = logging.getLogger(__name__)
WAIT_WARNING_S = 60.0


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object: ...


def find_node_size() -> int | None:
    """Return the number of ranks on each node, or None where it is not known, not one, or ranks go across nodes.

    Rank 0 says so where all ranks know theirs and it leads nowhere: they are taken for one node then.

    Ranks: collective over all ranks.
    """
    env = read_launcher_env()
    facts = gather_objects((env.local_world_size, env.local_rank) if env else (None, 0))
    sizes = {size for size, _ in facts}
    size = next(iter(sizes))
    is_in_order = size is not None and all(local == rank % size for rank, (_, local) in enumerate(facts))
    if len(sizes) == 1 and is_in_order:
        return size
    if None not in sizes and get_rank() == 0:
        _logger.warning(
            "the ranks count as one node: expected as many on each node, following one another, found (LOCAL_RANK of "
            "LOCAL_WORLD_SIZE, by rank) %s",
            ", ".join(f"{local} of {size}" for size, local in facts),
        )
    return None


def is_initialized() -> bool:
    """Tell whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_initialized() else 1


def set_timeout(timeout_s: float) -> None:
    """Say how long a collective may take, in groups made from here on too; transformers says it to GPUs alone."""
    if is_initialized():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def leave_group() -> None:
    """End the process group, if there is one: its threads would abort an interpreter that ends before them.

    Ranks: local, when no collective is to come.
    """
    if is_initialized():
        dist.destroy_process_group()


def broadcast_object(value: T, source_rank: int = 0) -> T:
    """Return `source_rank`'s `value`, a small picklable object.

    Ranks: collective over all ranks.
    """
    if get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=source_rank)
    return values[0]


def gather_objects(value: T) -> list[T]:
    """Return every rank's `value`, small picklable objects, by rank.

    Ranks: collective over all ranks.
    """
    if get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_(tensors: Iterable[torch.Tensor], source_rank: int = 0) -> None:
    """Overwrite `tensors`, on whichever device each is, on every rank with those of `source_rank`.

    Ranks: collective over all ranks, in the order of `tensors`. Nothing to do with one rank.
    """
    if get_world_size() == 1:
        return
    host_group: SharedGroup | None = None
    for tensor in tensors:
        world = dist.group.WORLD
        assert world is not None
        if tensor.device.type in [served.type for served in world._device_types]:
            dist.broadcast(tensor, src=source_rank)
            continue
        if host_group is None:  # NCCL, which is the default, sends no tensor of a CPU
            (host_group,) = share_groups(get_world_size(), agreements="gloo")
        dist.broadcast(tensor, src=source_rank, group=host_group.find())


def sum_(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, as DistributedDataParallel does with gradients.

    Ranks: collective over all ranks. Nothing to do with one rank.
    """
    if get_world_size() > 1:
        dist.all_reduce(tensor)


@dataclass(frozen=True)
class HostGroup:
    """All ranks, talking over gloo on the host: no device waits for what they agree on.

    Ranks: creating one is collective over all ranks. One rank needs no process group.
    """

    group: SharedGroup | None = None
    lookout: Lookout | None = None

    @classmethod
    def of_all(
        cls, wait_warning_s: float = WAIT_WARNING_S, describe_ranks: Callable[[], str] = lambda: ""
    ) -> HostGroup:
        """Make one, over a group that all share.

        Args:
            wait_warning_s: how long a rank waits for others before it says where each stands; 0: for ever.
            describe_ranks: what else is known of where they stand, a line each.
        """
        size = get_world_size()
        if size == 1:
            return cls()
        (group,) = share_groups(size, agreements="gloo")
        return cls(group, Lookout(get_rank(), range(size), wait_warning_s, describe_ranks))

    def find_largest(self, values: Sequence[int], deed: str = "agree") -> list[int]:
        """Return for each of `values`, 64-bit integers, the largest that any rank has there.

        Rank 0 hears from each rank and tells all through a tree: gloo's all-reduce would go round a ring of all twice.

        Args:
            deed: what they are needed for, as a rank that waits long says it.

        Raises:
            ShardError: the group's time-out is over.

        Ranks: collective over all ranks.
        """
        if self.group is None or self.lookout is None:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        everyone = [torch.empty_like(largest) for _ in range(get_world_size())] if get_rank() == 0 else None
        group = self.group.find()
        gather = dist.gather(largest, everyone, dst=0, group=group, async_op=True)
        # On the others it ends when rank 0 has come to it; that all have, its answer alone says.
        self.lookout.wait(gather, deed, tells_of_all=everyone is not None)
        if everyone is not None:
            largest = torch.stack(everyone).amax(0)
        self.lookout.wait(dist.broadcast(largest, src=0, group=group, async_op=True), deed)
        return largest.tolist()

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value`, a small picklable object.

        Ranks: collective over all ranks.
        """
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group.find())
        return values[0]


@dataclass
class ShardGroup:
    """The ranks that a unit is sharded over, with process groups of their own.

    Base gathers never queue behind the adapter's all-reduce, since they have their own communicator. Ranks compare
    where they stand over a second, gloo group on the host: it needs no device synchronization and cannot pair up
    with a gather. Models that are sharded over the same ranks share the two, and have a `number` each.

    Ranks: creating one is collective over all ranks. `size` 1 needs no process group.
    """

    rank: int = 0
    size: int = 1
    gather_group: SharedGroup | None = None
    control_group: SharedGroup | None = None
    number: int = 0
    lookout: Lookout | None = None
    num_gathers: int = field(default=0, init=False)
    gathered_bytes: int = field(default=0, init=False)

    @classmethod
    def of_size(cls, size: int, wait_warning_s: float = WAIT_WARNING_S) -> ShardGroup:
        """Shard over this rank's `size` consecutive ranks of the default process group, whose size `size` divides.

        Args:
            wait_warning_s: how long a rank waits for others in a comparison before it says where each stands; 0: for
                ever.

        Ranks: collective over all ranks: each makes the groups of all.
        """
        if size == 1:
            share_groups(size)
            return cls()
        gathers, comparisons = share_groups(size, gathers=None, comparisons="gloo")
        begin = get_rank() - get_rank() % size
        store = dist.distributed_c10d._get_process_group_store(comparisons.find())
        return cls(
            get_rank() % size,
            size,
            gathers,
            comparisons,
            number=store.add(f"models/{get_rank()}", 1),
            lookout=Lookout(get_rank(), range(begin, begin + size), wait_warning_s),
        )

    def all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start filling `unsharded` (uint8, [size * shard]) with every rank's `shard` (uint8, [shard]).

        `shard` may be this rank's part of `unsharded`.

        Ranks: collective over the group, in one order.
        Memory: none beyond the two tensors.
        """
        self.num_gathers += 1
        self.gathered_bytes += unsharded.numel()
        group = self.gather_group.find() if self.gather_group is not None else None
        if dist.get_backend(group) == "gloo":
            return _start_broadcasts(unsharded.view(self.size, -1), shard, self.rank, group)
        # torch 2.13 renamed the operation and deprecates the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(unsharded, shard, group=group, async_op=True)

    def compare(self, values: Sequence[int], deed: str = "compare where they stand") -> list[list[int]] | None:
        """Return every rank's `values` (64-bit integers) if any rank's differ, else None.

        Args:
            deed: what they are compared before, as a rank that waits long says it.

        Raises:
            ShardError: the group's time-out is over.

        Ranks: collective over the group, on the host.
        """
        assert self.lookout is not None and self.control_group is not None
        group = self.control_group.find()
        mine = torch.tensor(values, dtype=torch.int64)
        low_and_high = torch.stack([mine, -mine])
        work = dist.all_reduce(low_and_high, op=dist.ReduceOp.MIN, group=group, async_op=True)
        self.lookout.wait(work, deed)
        if torch.equal(low_and_high[0], -low_and_high[1]):
            return None
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=group)
        return [one.tolist() for one in everyone]


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each row of tokens, with a process group of their own.

    Ranks: creating one is collective over all ranks.
    """

    rank: int
    size: int
    exchanges: SharedGroup
    comparisons: ShardGroup

    @classmethod
    def of_size(cls, size: int, wait_warning_s: float = WAIT_WARNING_S) -> SequenceGroup:
        """Share rows among this rank's `size` consecutive ranks of the default process group; more than one.

        Ranks: collective over all ranks: each makes the groups of all.
        """
        comparisons = ShardGroup.of_size(size, wait_warning_s)
        (exchanges,) = share_groups(size, sequences=None)
        return cls(get_rank() % size, size, exchanges, comparisons)

    def exchange(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return every rank's block for this rank: block k of what comes back is rank k's.

        Args:
            blocks: [size, ...], one for each rank, contiguous.

        Ranks: collective over the group.
        """
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.exchanges.find())
        return received

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group.

        Ranks: collective over the group.
        """
        summed = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.exchanges.find())
        return summed

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `tensor`, of one shape on all, by rank.

        Ranks: collective over the group.
        """
        tensor = tensor.contiguous()
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everyone, tensor, group=self.exchanges.find())
        return everyone


@dataclass(frozen=True)
class _Works:
    """Several collectives that are waited for as one."""

    works: tuple[Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _start_broadcasts(rows: torch.Tensor, shard: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> Work:
    """Gather by one broadcast from each rank: gloo's own all-gather goes through buffers that it allocates each time.

    Args:
        rows: uint8, [ranks, shard].
    """
    if rows[rank].data_ptr() != shard.data_ptr():
        rows[rank].copy_(shard)
    return _Works(tuple(dist.broadcast(row, group=group, group_src=k, async_op=True) for k, row in enumerate(rows)))
