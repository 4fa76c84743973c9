"""Ranks and collectives: the only file that names `torch.distributed`'s collective operations."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from .plugins import is_on

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class LauncherEnv:
    """What torchrun, `accelerate launch` and `lorashard finetune` tell a rank through its environment."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None


def read_launcher_env() -> LauncherEnv | None:
    """Return this process's place among the ranks, or None where no launcher started it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return LauncherEnv(
        rank=int(os.environ["RANK"]),
        local_rank=local_rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        # accelerate writes 1 for ranks on the CPU, where nobody has told it.
        local_world_size=local_world_size if local_world_size > local_rank else None,
    )


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


def has_launcher_store() -> bool:
    """Tell whether the launcher keeps the store that ranks meet in; where it does not, as under `srun`, rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def is_cpu_requested() -> bool:
    """Tell whether accelerate was told through its environment to compute on the CPU."""
    return is_on(os.environ.get("ACCELERATE_USE_CPU"))


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


def is_timeout(error: BaseException) -> bool:
    """Tell whether an error says that a collective waited too long for other ranks."""
    return isinstance(error, RuntimeError) and re.search("timed? ?out", str(error), re.IGNORECASE) is not None


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
    """Overwrite `tensors` on every rank with those of `source_rank`.

    Ranks: collective over all ranks, in the order of `tensors`. Nothing to do with one rank.
    """
    if get_world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor, src=source_rank)


def sum_(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, as DistributedDataParallel does with gradients.

    Ranks: collective over all ranks. Nothing to do with one rank.
    """
    if get_world_size() > 1:
        dist.all_reduce(tensor)


def _make_group(backend: str | None, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Make a group whose collectives may take as long as the default group's (`ddp_timeout`): torch's own does not ask.

    Ranks: collective over all ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    options = world._get_backend(world._device_types[0]).options
    return dist.new_group(ranks, timeout=options._timeout, backend=backend)


@dataclass(frozen=True)
class HostGroup:
    """All ranks, talking over gloo on the host: no device waits for what they agree on.

    Ranks: creating one is collective over all ranks. One rank needs no process group.
    """

    group: dist.ProcessGroup | None = None

    @classmethod
    def of_all(cls) -> HostGroup:
        """Make the group."""
        return cls(_make_group("gloo") if get_world_size() > 1 else None)

    def find_largest(self, values: Sequence[int]) -> list[int]:
        """Return for each of `values`, 64-bit integers, the largest that any rank has there.

        Ranks: collective over all ranks.
        """
        if self.group is None:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()


class RollCall:
    """How far each rank has come, noted in the launcher's store, which answers while ranks wait for one another.

    Ranks: local; it needs no process group.
    """

    def __init__(self, env: LauncherEnv, timeout_s: float, name: str = "roll-call") -> None:
        """Connect to the store.

        Args:
            timeout_s: how long the store may take to be there.
            name: ranks of the same name read one another's notes. A store outlives the ranks that torchrun restarts.

        Raises:
            RuntimeError: There is no store.
        """
        timeout = timedelta(seconds=timeout_s)
        store, _, self._size = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))
        self._store = dist.PrefixStore(f"lorashard-{name}", store)
        self._rank = env.rank

    def note(self, step: str) -> None:
        """Say that this rank has come to `step`."""
        self._store.set(f"{step}/{self._rank}", "")

    def find_absent(self, step: str) -> list[int]:
        """Return the ranks that have not come to `step`."""
        return [rank for rank in range(self._size) if not self._store.check([f"{step}/{rank}"])]

    def leave_word(self, word: str) -> None:
        """Say something in place of what this rank said before."""
        self._store.set(f"word/{self._rank}", word)

    def read_words(self) -> list[str | None]:
        """Return the last word of each rank, by rank; None of one that has said nothing."""
        keys = [f"word/{rank}" for rank in range(self._size)]
        if self._store.check(keys):
            return [word.decode() for word in self._store.multi_get(keys)]
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

    def leave_failure(self, reason: str) -> None:
        """Tell the others that this rank goes no further."""
        self._store.set("failure", reason)

    def read_failure(self) -> str | None:
        """Return why some rank goes no further, or None."""
        return self._store.get("failure").decode() if self._store.check(["failure"]) else None

    def claim(self) -> bool:
        """Tell whether this rank is the first to ask this."""
        return self._store.add("claims", 1) == 1


@dataclass
class ShardGroup:
    """The ranks that a unit is sharded over, with process groups of their own.

    Base gathers never queue behind the adapter's all-reduce, since they have their own communicator. Ranks compare
    where they stand over a second, gloo group on the host: it needs no device synchronisation and cannot pair up
    with a gather.

    Ranks: creating one is collective over all ranks. `size` 1 needs no process group.
    """

    rank: int = 0
    size: int = 1
    gather_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    num_gathers: int = field(default=0, init=False)
    gathered_bytes: int = field(default=0, init=False)

    @classmethod
    def of_size(cls, size: int) -> ShardGroup:
        """Shard over this rank's `size` consecutive ranks of the default process group, whose size `size` divides.

        Ranks: collective over all ranks: each makes the groups of all.
        """
        if size == 1:
            return cls()
        own: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        for begin in range(0, get_world_size(), size):
            ranks = list(range(begin, begin + size))
            groups = _make_group(None, ranks), _make_group("gloo", ranks)
            if get_rank() in ranks:
                own = groups
        assert own is not None, f"groups of {size} do not cover {get_world_size()} ranks"
        return cls(get_rank() % size, size, *own)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        """Start filling `whole` (uint8, [size * shard]) with every rank's `shard` (uint8, [shard]).

        `shard` may be this rank's part of `whole`.

        Ranks: collective over the group, in one order.
        Memory: none beyond the two tensors.
        """
        self.num_gathers += 1
        self.gathered_bytes += whole.numel()
        if dist.get_backend(self.gather_group) == "gloo":
            return _start_broadcasts(whole.view(self.size, -1), shard, self.rank, self.gather_group)
        # torch 2.13 renamed the operation and deprecates the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(whole, shard, group=self.gather_group, async_op=True)

    def compare(self, values: Sequence[int]) -> list[list[int]] | None:
        """Return every rank's `values` (64-bit integers) if any rank's differ, else None.

        Ranks: collective over the group, on the host.
        """
        mine = torch.tensor(values, dtype=torch.int64)
        low_and_high = torch.stack([mine, -mine])
        dist.all_reduce(low_and_high, op=dist.ReduceOp.MIN, group=self.control_group)
        if torch.equal(low_and_high[0], -low_and_high[1]):
            return None
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.control_group)
        return [one.tolist() for one in everyone]


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
