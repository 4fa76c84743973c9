"""Ranks and collectives: the only file that names `torch.distributed`'s collective operations."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import ShardError
from .launch_env import read_launcher_env
from .rank_store import Lookout, RankStore

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_OWN = "lorashard:"  # begins the description of each group that is made here
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
            (host_group,) = _share_groups(get_world_size(), agreements="gloo")
        dist.broadcast(tensor, src=source_rank, group=host_group.find())


def sum_(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, as DistributedDataParallel does with gradients.

    Ranks: collective over all ranks. Nothing to do with one rank.
    """
    if get_world_size() > 1:
        dist.all_reduce(tensor)


class SharedGroup(weakref.ref):
    """A process group that all of this rank's models over the same ranks share, and that ends here with the last one.

    Note [The end of a shared group]
        Models are collected at different times on different ranks. The end of a gloo group is local: a rank's part ends
        when the last object that holds this does. What the others still have of it can be used no more, and nothing
        would use it but a model that this rank has dropped. The end of an NCCL group is a collective of the ranks of a
        node: that waits until all ranks meet to share groups again, and none uses it any more.

    Its users hold this, never the process group, so that the table of torch holds the last name for that.

    Ranks: local. The end of a gloo group waits for what this rank has still in flight there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Not `__del__`: what is collected in a cycle has lost its weak references by then, itself if it is one.
        weakref.finalize(self, _end_with_users, weakref.ref(group), os.getpid()).atexit = False

    def find(self) -> dist.ProcessGroup:
        """Return the process group.

        Raises:
            ShardError: it has ended, with the default one.
        """
        group = self()
        if group is None:
            raise ShardError(
                "the process group of the model has ended", fix="load or shard the model after init_process_group"
            )
        return group


def _end_with_users(reference: weakref.ref[dist.ProcessGroup], process_id: int) -> None:
    """End a group whose last user on this rank has gone; see [The end of a shared group]."""
    is_there = reference() in dist.distributed_c10d._world.pg_map
    if process_id == os.getpid() and is_there and _is_gloo(reference()):  # a forked process has none of its threads
        _end_group(reference)


def _is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Tell whether a group knows gloo alone, whatever its devices."""
    return group is not None and {group._get_backend(d).name() for d in group._device_types} == {"gloo"}


def _end_group(reference: weakref.ref[dist.ProcessGroup]) -> None:
    """End this rank's part of a group.

    Ranks: local for gloo; collective over the group for NCCL.
    """
    group = reference()
    assert group is not None
    # These hold the threads. Their end comes with the last name for them, after the group's, since only a backend's own
    # end waits for the threads without the interpreter's lock, for which they may wait.
    backends = [group._get_backend(device) for device in group._device_types]
    dist.destroy_process_group(group)
    del group
    backends.clear()


def _find_own_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups of this rank that were made here, by description, in the order in which they were made."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return {group.group_desc: group for group in groups if group.group_desc.startswith(_OWN)}


def _find_shared(group: dist.ProcessGroup) -> SharedGroup | None:
    """Return what the users of a group hold; None if it has none on this rank."""
    return next((mark for mark in weakref.getweakrefs(group) if isinstance(mark, SharedGroup)), None)


def _share_groups(size: int, **backends: str | None) -> list[SharedGroup]:
    """Return this rank's groups of `size` consecutive ranks: those that every rank still has, or else new ones.

    Torch's table of groups is where they are found again, so they go with the default group. Other groups that no rank
    uses any more end here; see [The end of a shared group].

    Args:
        backends: of each purpose; None is the default group's.

    Ranks: collective over all ranks: each makes the groups of all.
    """
    own = _find_own_groups()
    users = {name: _find_shared(group) for name, group in own.items()}  # held, so that none ends before all is decided
    everyone = _exchange({name: user is not None for name, user in users.items()})
    common = [name for name in own if all(name in groups for groups in everyone)]
    number = 1 + max((int(name.split()[-1]) for groups in everyone for name in groups), default=0)
    shared, reused = [], set()
    for purpose, backend in backends.items():
        kind = f"{_OWN} {purpose} over {size} ranks, number"
        names = [name for name in common if name.startswith(kind)]
        if names:
            dist.distributed_c10d._set_pg_timeout(_read_timeout(), own[names[-1]])
            shared.append(users[names[-1]] or SharedGroup(own[names[-1]]))
            reused.add(names[-1])
        else:
            shared.append(SharedGroup(_make_group(size, backend, f"{kind} {number}")))
    for name in common:
        if name not in reused and not any(groups[name] for groups in everyone):
            _end_group(weakref.ref(own.pop(name)))
    return shared


def _exchange(facts: dict[str, bool]) -> list[dict[str, bool]]:
    """Return every rank's `facts` through the store, which NCCL's device is not needed for."""
    if get_world_size() == 1:
        return [facts]
    words = RankStore.of_group("groups").exchange(json.dumps(facts), _read_timeout().total_seconds())
    return [json.loads(word) for word in words]


def _read_timeout() -> timedelta:
    """Return how long a collective of the default group may take (`ddp_timeout`); torch's `new_group` does not ask."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout


def _make_group(size: int, backend: str | None, description: str) -> dist.ProcessGroup:
    """Make groups of `size` consecutive ranks, and return this rank's.

    Ranks: collective over all ranks.
    """
    own: dist.ProcessGroup | None = None
    for begin in range(0, get_world_size(), size):
        ranks = list(range(begin, begin + size))
        group = dist.new_group(ranks, _read_timeout(), backend, _put_first(backend), group_desc=description)
        if get_rank() in ranks:
            own = group
    assert own is not None, f"groups of {size} do not cover {get_world_size()} ranks"
    if _is_gloo(own):
        dist.barrier(own)  # the first to end it would cut off those that still connect
    return own


def _put_first(backend: str | None) -> Any:
    """Return options by which NCCL's kernels go before the computation's; None for others, or if the user decides."""
    options = None
    if backend is None and "nccl" in dist.get_backend_config() and "TORCH_NCCL_HIGH_PRIORITY" not in os.environ:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _read_timeout()  # torch warns of another than the group's
    return options


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
        (group,) = _share_groups(size, agreements="gloo")
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
            _share_groups(size)
            return cls()
        gathers, comparisons = _share_groups(size, gathers=None, comparisons="gloo")
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
        (exchanges,) = _share_groups(size, sequences=None)
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
