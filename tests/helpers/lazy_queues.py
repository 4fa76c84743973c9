"""A device on the host whose queues work as late as they may, and that knows which order is promised.

Two things are found out about a run. *Bits*: what a side queue is given waits until somebody waits for it, or a seeded
scheduler takes it on, and its target is not a number until then. So a missing wait is NaN, and a buffer that is filled
again too early sends wrong bytes. *Order*: every operation gets a stamp of its queue and is compared with all that
touched the same bytes (L. Lamport, "Time, clocks, and the ordering of events", 1978; vector clocks as in torch's own
`torch.cuda._sanitizer`). What is not ordered by events is a race, even where this run's timing hid it.

The compute queue runs at once, as eager torch on a CPU does; only the order shows what would overtake it. Threads of
the host are taken to be ordered among themselves.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.engine import CPU, GARBAGE_BYTE
from lorashard.engine import FrozenWeight
from lorashard.engine.queues import Queues
from lorashard.runtime.dist import ShardGroup

Clock = dict[int, int]  # of each queue, how many of its operations have been done by then
_RUN_ON = 0.3  # how likely the scheduler takes another step


def _merge(clock: Clock, other: Clock) -> None:
    for queue, count in other.items():
        clock[queue] = max(clock.get(queue, 0), count)


@dataclass(eq=False)
class _Queue:
    """Tasks in order, each with the event that it waits for, if it is such a wait; `num_done` of them are done."""

    number: int
    tasks: list[tuple[Callable[[], None], LazyEvent | None]] = field(default_factory=list)
    num_done: int = 0
    clock: Clock = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LazyEvent:
    """A point in a queue, and what is done when it is reached."""

    device: LazyQueues
    queue: _Queue
    position: int
    clock: Clock

    @property
    def has_happened(self) -> bool:
        return self.queue.num_done >= self.position

    def synchronize(self) -> None:
        self.device.hold_up_host(self)

    def query(self) -> bool:
        if self.has_happened:
            self.synchronize()
        return self.has_happened

    def elapsed_time(self, end: LazyEvent) -> float:
        return 0.0


_Access = tuple[int, int, bool, int]  # the first address and the one behind the last, whether it writes, the queue


class LazyQueues(Queues):
    """Queues of a device whose memory is the host's.

    Attributes:
        races: what was not ordered, a sentence each.
        num_deferred: tasks that side queues were given.
        num_checked: how often an operation was compared with another queue's.
    """

    def __init__(self, seed: int = 0, can_pin: bool = True) -> None:
        super().__init__(CPU)
        self.races: list[str] = []
        self.num_deferred = 0
        self.num_checked = 0
        self._can_pin = can_pin
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._compute = _Queue(0)
        self._queues = [self._compute]
        self._of_thread = threading.local()
        self._host_clock: Clock = {}
        self._pinned: set[int] = set()  # storages
        self._touched: dict[int, dict[_Access, tuple[int, str]]] = {}  # by storage: the last stamp, and by what
        # By storage, stretch and queue: pinned bytes, what they were, and the last stamp at which they were sent.
        self._sent: dict[int, dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor, int]]] = {}

    # -- what the engine calls ---------------------------------------------------------------------------------------

    def make(self, *args: Any, **kwargs: Any) -> _Queue:
        with self._lock:
            self._queues.append(_Queue(len(self._queues)))
            return self._queues[-1]

    @contextlib.contextmanager
    def on(self, queue: _Queue) -> Iterator[None]:
        previous, self._of_thread.queue = self._current, queue
        try:
            yield
        finally:
            self._of_thread.queue = previous

    def record(self, is_timed: bool = False) -> LazyEvent:
        with self._lock:
            queue = self._current
            clock = dict(queue.clock)
            _merge(clock, self._thread_clock)
            return LazyEvent(self, queue, len(queue.tasks), clock)

    def wait(self, event: LazyEvent) -> None:
        with self._lock:
            _merge(self._current.clock, event.clock)
            if self._current is self._compute:
                self._run_until(event)
            else:
                self._current.tasks.append((lambda: None, event))
            self._run_some()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._take_as_pinned(memory)
        return memory

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return _storage_of(tensor) in self._pinned

    def pin(self, memory: torch.Tensor) -> str | None:
        if not self._can_pin:
            return "this system pins nothing"
        self._take_as_pinned(memory)
        return None

    def unpin(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._pinned.discard(_storage_of(memory))
            self._touched.pop(_storage_of(memory), None)
            self._sent.pop(_storage_of(memory), None)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.is_pinned(source), "a copy of pageable memory holds up the host"
        self.give("a copy", lambda: target.copy_(source), reads=[source], writes=[target])

    # -- what else a test calls --------------------------------------------------------------------------------------

    def give(
        self, name: str, task: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Give the current queue a task; what it will write, and not read, is not a number until then."""
        with self._lock, self._apart():
            queue = self._current
            for tensor in reads:
                self._check_what_is_sent(tensor)
            stamp = self._stamp(name, reads, writes)
            if queue is self._compute:
                task()
                return
            self.num_deferred += 1
            kept = [(tensor, tensor.clone()) for tensor in reads]
            for tensor in writes:
                tensor.fill_(GARBAGE_BYTE)
            for tensor, values in kept:  # one may be a part of what is written
                if not self.is_pinned(tensor):
                    tensor.copy_(values)
                else:
                    key = (*_find_stretch(tensor), queue.number)
                    self._sent.setdefault(_storage_of(tensor), {})[key] = tensor, values, stamp
            queue.tasks.append((lambda: self._run_apart(task), None))
            self._run_some()

    def hold_up_host(self, event: LazyEvent) -> None:
        """Let the host, the thread that calls, go on when an event has happened."""
        with self._lock:
            self._run_until(event)
            _merge(self._thread_clock, event.clock)
            _merge(self._host_clock, event.clock)

    def note(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Note an operation that torch runs at once."""
        if getattr(self._of_thread, "is_apart", False):
            return
        with self._lock, self._apart():
            if self._current is not self._compute:
                self._run_until(self.record())
            self._stamp(name, reads, writes)

    # -- order -------------------------------------------------------------------------------------------------------

    def _stamp(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> int:
        queue = self._current
        _merge(queue.clock, self._thread_clock)
        queue.clock[queue.number] = stamp = queue.clock.get(queue.number, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                # What torch does with pinned memory on the compute queue, the host does.
                is_by_host = queue is self._compute and self.is_pinned(tensor)
                clock = self._host_clock if is_by_host else queue.clock
                by = "the host" if is_by_host else f"queue {queue.number}"
                access = (*_find_stretch(tensor), is_write, queue.number)
                earlier = self._touched.setdefault(_storage_of(tensor), {})
                self._compare(f"{name} on {by}", access, clock, earlier)
                if not is_by_host:
                    earlier[access] = (stamp, name)
        return stamp

    def _compare(self, what: str, access: _Access, clock: Clock, earlier: dict[_Access, tuple[int, str]]) -> None:
        begin, end, is_write, queue = access
        for (other_begin, other_end, was_write, other_queue), (stamp, name) in earlier.items():
            is_shared = other_begin < end and begin < other_end
            if other_queue == queue or not is_shared or not (is_write or was_write):
                continue
            self.num_checked += 1
            if clock.get(other_queue, 0) < stamp:
                self.races.append(
                    f"{what} {'writes' if is_write else 'reads'}, and need not be behind {name} on queue "
                    f"{other_queue}, which {'writes' if was_write else 'reads'} there"
                )

    def _check_what_is_sent(self, tensor: torch.Tensor) -> None:
        """Compare pinned bytes that the device may still have to read with what they were when it was told to."""
        sent = self._sent.get(_storage_of(tensor), {})
        for (_, _, queue), (memory, values, stamp) in sent.items():
            if self._host_clock.get(queue, 0) < stamp and not torch.equal(memory, values):
                self.races.append("the host fills pinned memory again that the device may still have to read")

    def _take_as_pinned(self, memory: torch.Tensor) -> None:
        with self._lock:
            self._touched.pop(_storage_of(memory), None)  # a device's memory was never there
            self._sent.pop(_storage_of(memory), None)
            self._pinned.add(_storage_of(memory))

    # -- work --------------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> _Queue:
        return getattr(self._of_thread, "queue", self._compute)

    @property
    def _thread_clock(self) -> Clock:
        return self._of_thread.__dict__.setdefault("clock", {})

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """While the body runs, this thread's operations are the device's own."""
        previous = getattr(self._of_thread, "is_apart", False)
        self._of_thread.is_apart = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._of_thread.is_apart = previous

    def _run_apart(self, task: Callable[[], object]) -> None:
        with self._apart():
            task()

    def _run_until(self, event: LazyEvent) -> None:
        while not event.has_happened:
            self._run_next(event.queue)

    def _run_next(self, queue: _Queue) -> None:
        task, awaited = queue.tasks[queue.num_done]
        if awaited is not None:
            self._run_until(awaited)
        task()
        queue.num_done += 1

    def _run_some(self) -> None:
        while self._random.random() < _RUN_ON:
            ready = [queue for queue in self._queues if queue.num_done < len(queue.tasks) and _may_run(queue)]
            if not ready:
                return
            self._run_next(self._random.choice(ready))


def _may_run(queue: _Queue) -> bool:
    awaited = queue.tasks[queue.num_done][1]
    return awaited is None or awaited.has_happened


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _find_stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin


class Watch(TorchDispatchMode):
    """Tells queues of all that torch does while this is entered."""

    def __init__(self, queues: LazyQueues) -> None:
        super().__init__()
        self._queues = queues

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FrozenWeight) for kind in types):
            return NotImplemented  # it calls again, with what it stands for
        schema = func._schema
        is_view = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
        if not is_view:
            reads: list[torch.Tensor] = []
            writes: list[torch.Tensor] = []
            given = [*zip(schema.arguments, args, strict=False)]
            given += [(one, (kwargs or {})[one.name]) for one in schema.arguments if one.name in (kwargs or {})]
            for argument, value in given:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.device == CPU:
                        (writes if is_written else reads).append(tensor)
            self._queues.note(str(func), reads, writes)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _LazyWork:
    queues: LazyQueues
    done: LazyEvent

    def wait(self) -> None:
        self.queues.wait(self.done)


class LazyGroup(ShardGroup):
    """One of `size` ranks, which knows the others' shards and gathers as NCCL does.

    A gather runs on a queue of the group's own, behind all that the current queue was given; to wait for it holds up
    the queue that is current then.
    """

    def __init__(self, queues: LazyQueues, rank: int, size: int) -> None:
        super().__init__(rank=rank, size=size)
        self._queues = queues
        self._queue = queues.make()
        self._unsharded: dict[bytes, torch.Tensor] = {}

    def learn(self, shards: Sequence[torch.Tensor]) -> None:
        """Know a unit by this rank's shard of it."""
        self._unsharded[_read_bytes(shards[self.rank])] = torch.cat(list(shards))

    def all_gather(self, unsharded: torch.Tensor, shard: torch.Tensor) -> _LazyWork:
        self.num_gathers += 1
        self.gathered_bytes += unsharded.numel()
        ready = self._queues.record()
        with self._queues.on(self._queue):
            self._queues.wait(ready)
            self._queues.give("a gather", lambda: self._fill(unsharded, shard), reads=[shard], writes=[unsharded])
            return _LazyWork(self._queues, self._queues.record())

    def _fill(self, unsharded: torch.Tensor, shard: torch.Tensor) -> None:
        found = self._unsharded.get(_read_bytes(shard))
        if found is None:  # this rank sends what is no shard
            unsharded.fill_(GARBAGE_BYTE)
        else:
            unsharded.copy_(found)

    def compare(self, values: Sequence[int], deed: str = "") -> None:
        return None


def _read_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
