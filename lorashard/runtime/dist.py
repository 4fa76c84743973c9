"""Ranks and collectives: the only file that names `torch.distributed`'s collective operations."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import ShardError
from .plugins import is_on
from .progress import write_line

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_OWN = "lorashard:"  # begins the description of each group that is made here
WAIT_WARNING_S = 60.0
_MOMENT_S = 1.0  # a shorter wait for other ranks is not worth a word in the store


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
    """Overwrite `tensors`, on whichever device each is, on every rank with those of `source_rank`.

    Ranks: collective over all ranks, in the order of `tensors`. Nothing to do with one rank.
    """
    if get_world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor, src=source_rank, group=_find_group_of(tensor.device))


def _find_group_of(device: torch.device) -> dist.ProcessGroup | None:
    """Return a group of all ranks that can send a device's tensors: NCCL's, which is the default, sends none of a CPU.

    Ranks: collective over all ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    if device.type in [served.type for served in world._device_types]:
        return world
    return _share_group("agreements", "gloo", get_world_size())


def sum_(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, in place, as DistributedDataParallel does with gradients.

    Ranks: collective over all ranks. Nothing to do with one rank.
    """
    if get_world_size() > 1:
        dist.all_reduce(tensor)


class _Use(weakref.ref):
    """Marks a process group as used for as long as the mark itself is kept; `_is_used` finds it."""


def _is_used(group: dist.ProcessGroup) -> bool:
    return any(isinstance(mark, _Use) for mark in weakref.getweakrefs(group))


def _find_own_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this rank that were made here, in the order in which they were made."""
    return [group for group in dist.distributed_c10d._world.pg_map if group.group_desc.startswith(_OWN)]


def _share_group(purpose: str, backend: str | None, size: int) -> dist.ProcessGroup:
    """Return this rank's group of `size` consecutive ranks for a purpose: the one that is there, or else a new one.

    Torch's table of groups is where it is found again, so it goes with the default group. Its collectives may take as
    long as the default group's (`ddp_timeout`): torch's own `new_group` does not ask.

    Ranks: collective over all ranks: each makes the groups of all. One that is there is there on all ranks.
    """
    world = dist.group.WORLD
    assert world is not None
    timeout = world._get_backend(world._device_types[0]).options._timeout
    description = f"{_OWN} {purpose} over {size} ranks"
    for group in _find_own_groups():
        if group.group_desc == description:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
            return group
    own: dist.ProcessGroup | None = None
    for begin in range(0, get_world_size(), size):
        ranks = list(range(begin, begin + size))
        group = dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=description)
        if get_rank() in ranks:
            own = group
    assert own is not None, f"groups of {size} do not cover {get_world_size()} ranks"
    return own


def _end_unused_groups(size: int) -> None:
    """End the groups of other sizes than `size` that no rank uses any more.

    Models are collected at different times on different ranks, and the end of an NCCL group is a collective of the
    ranks of a node, so none ends when its last model does: all ranks end it here, where they meet.

    Ranks: collective over all ranks.
    """
    others = [group for group in _find_own_groups() if not group.group_desc.endswith(f" {size} ranks")]
    if not others:
        return
    unused = [group.group_desc for group in others if not _is_used(group)]
    ended = set(unused).intersection(*gather_objects(unused))
    while others:
        group = others.pop(0)
        if group.group_desc in ended:
            # These hold the threads. Their end comes with the last name for them, after the group's, since only a
            # backend's own end waits for the threads without the interpreter's lock, for which they may wait.
            backends = [group._get_backend(device) for device in group._device_types]
            dist.destroy_process_group(group)
            del group
            backends.clear()


class Lookout:
    """Waits for other ranks, and says where each of them stands if that takes long.

    A rank leaves a word in the process group's store only when it has waited for a moment, so that where ranks meet at
    once nothing is added. One that has left no word is elsewhere: the last that it did here is the last that all did.

    Ranks: local.
    """

    def __init__(
        self, ranks: Sequence[int], warn_after_s: float, describe_ranks: Callable[[], str] = lambda: ""
    ) -> None:
        """Make one.

        Args:
            ranks: those that wait for one another.
            warn_after_s: how long one waits before it speaks; 0: for ever.
            describe_ranks: what else is known of where they stand, a line each.
        """
        self._ranks = ranks
        self._warn_after_s = warn_after_s
        self._last: tuple[str, float] | None = None  # what all came to last, and when
        self._has_failed = False  # a word about that is still in the store
        self.describe_ranks = describe_ranks

    def wait(self, work: Any, deed: str, *, tells_of_all: bool = True) -> None:
        """Wait for a collective on the host.

        Args:
            deed: what the ranks meet for, such as `begin a forward`.
            tells_of_all: whether its end says that all ranks have come.

        Raises:
            ShardError: the group's time-out is over; it says where each rank stands.
        """
        begin_s = time.monotonic()
        if not _is_done_within(work, min(_MOMENT_S, self._warn_after_s / 4) or _MOMENT_S):
            self._wait_long(work, deed, begin_s)
        if self._has_failed:
            _leave_word(RollCall.of_group("waits"), "")
            self._has_failed = False
        if tells_of_all:
            self._last = deed, time.monotonic()

    def _wait_long(self, work: Any, deed: str, begin_s: float) -> None:
        roll_call = RollCall.of_group("waits")
        _leave_word(roll_call, f"waits too, to {deed}")
        left_s = begin_s + self._warn_after_s - time.monotonic()
        try:
            if self._warn_after_s > 0 and not _is_done_within(work, max(left_s, 0.001)):
                write_line(f"lorashard: {self._describe(roll_call, deed, begin_s)}", sys.stderr)
            work.wait()
        except RuntimeError as error:
            _leave_word(roll_call, f"has waited in vain, to {deed}")
            self._has_failed = True
            text = self._describe(roll_call, deed, begin_s)
            if not is_timeout(error):  # another rank is gone, or has come to its timeout
                error.add_note(text)
                raise
            raise ShardError(text) from error
        _leave_word(roll_call, "")

    def _describe(self, roll_call: RollCall, deed: str, begin_s: float) -> str:
        now_s = time.monotonic()
        words: Sequence[str | None] = []
        with suppress(RuntimeError):
            words = roll_call.read_words()
        last = "has not been there since the model was loaded"
        if self._last is not None:
            last = f"is elsewhere: it last came, {now_s - self._last[1]:.0f} s ago, to {self._last[0]}"
        others = [
            f"rank {rank} {(words[rank] or last) if words else 'cannot be asked: the store does not answer'}"
            for rank in self._ranks
            if rank != get_rank()
        ]
        text = (
            f"rank {get_rank()} has waited {now_s - begin_s:.0f} s for other ranks to {deed}; {'; '.join(others)}. "
            "Sharded ranks must run the same forwards, backwards and steps in the same order: look for what one rank "
            "does alone (an evaluation, generate, a collective of the script); if one is only slow, raise "
            "wait_warning_s, and the process group's timeout (ddp_timeout)"
        )
        return "\n".join(filter(None, [text, self.describe_ranks()]))


def _is_done_within(work: Any, seconds: float) -> bool:
    """Tell whether a collective on the host has ended after at most `seconds`; one that has failed raises."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has failed, or has ended right now
    return True


def _leave_word(roll_call: RollCall, word: str) -> None:
    with suppress(RuntimeError):  # the store may be gone: what is waited for comes all the same, or ends by its timeout
        roll_call.leave_word(word)


@dataclass(frozen=True)
class HostGroup:
    """All ranks, talking over gloo on the host: no device waits for what they agree on.

    Ranks: creating one is collective over all ranks. One rank needs no process group.
    """

    group: dist.ProcessGroup | None = None
    lookout: Lookout | None = None
    use: _Use | None = None

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
        group = _share_group("agreements", "gloo", size)
        return cls(group, Lookout(range(size), wait_warning_s, describe_ranks), _Use(group))

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
        gather = dist.gather(largest, everyone, dst=0, group=self.group, async_op=True)
        # On the others it ends when rank 0 has come to it; that all have, its answer alone says.
        self.lookout.wait(gather, deed, tells_of_all=everyone is not None)
        if everyone is not None:
            largest = torch.stack(everyone).amax(0)
        self.lookout.wait(dist.broadcast(largest, src=0, group=self.group, async_op=True), deed)
        return largest.tolist()

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value`, a small picklable object.

        Ranks: collective over all ranks.
        """
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]


class RollCall:
    """How far each rank has come, noted in a store, which answers while ranks wait for one another.

    Ranks: local.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, name: str) -> None:
        """Use a store.

        Args:
            name: ranks of the same name read one another's notes. A store outlives the ranks that torchrun restarts.
        """
        self._store = dist.PrefixStore(f"lorashard-{name}", store)
        self._rank = rank
        self._size = size

    @classmethod
    def of_launch(cls, env: LauncherEnv, timeout_s: float, name: str = "roll-call") -> RollCall:
        """Connect to the launcher's store, which needs no process group.

        Args:
            timeout_s: how long the store may take to be there.

        Raises:
            RuntimeError: There is no store.
        """
        timeout = timedelta(seconds=timeout_s)
        store, _, size = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))
        return cls(store, env.rank, size, name)

    @classmethod
    def of_group(cls, name: str) -> RollCall:
        """Use the store that the default process group met in, whichever that is."""
        return cls(dist.distributed_c10d._get_default_store(), get_rank(), get_world_size(), name)

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
    where they stand over a second, gloo group on the host: it needs no device synchronization and cannot pair up
    with a gather. Models that are sharded over the same ranks share the two, and have a `number` each.

    Ranks: creating one is collective over all ranks. `size` 1 needs no process group.
    """

    rank: int = 0
    size: int = 1
    gather_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    number: int = 0
    lookout: Lookout | None = None
    uses: tuple[_Use, ...] = ()
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
        _end_unused_groups(size)
        if size == 1:
            return cls()
        groups = _share_group("gathers", None, size), _share_group("comparisons", "gloo", size)
        begin = get_rank() - get_rank() % size
        store = dist.distributed_c10d._get_process_group_store(groups[1])
        return cls(
            get_rank() % size,
            size,
            *groups,
            number=store.add(f"models/{get_rank()}", 1),
            lookout=Lookout(range(begin, begin + size), wait_warning_s),
            uses=tuple(map(_Use, groups)),
        )

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

    def compare(self, values: Sequence[int], deed: str = "compare where they stand") -> list[list[int]] | None:
        """Return every rank's `values` (64-bit integers) if any rank's differ, else None.

        Args:
            deed: what they are compared before, as a rank that waits long says it.

        Raises:
            ShardError: the group's time-out is over.

        Ranks: collective over the group, on the host.
        """
        assert self.lookout is not None
        mine = torch.tensor(values, dtype=torch.int64)
        low_and_high = torch.stack([mine, -mine])
        work = dist.all_reduce(low_and_high, op=dist.ReduceOp.MIN, group=self.control_group, async_op=True)
        self.lookout.wait(work, deed)
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
