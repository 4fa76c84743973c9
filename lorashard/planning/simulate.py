"""What a training microbatch moves and how long it takes: the engine's order of events, without the engine.

The engine decides by a static order alone (`engine.schedule`), so the same decisions can be made here beforehand. A
test holds both together.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..engine.schedule import Direction, farthest


@dataclass(frozen=True)
class Stop:
    """One visit of a forward: which unit, and how long it computes.

    Attributes:
        unit: its index among the units.
        backward_s: None where there is no backward, as for an embedding.
    """

    unit: int
    forward_s: float
    backward_s: float | None


@dataclass(frozen=True)
class Transfer:
    """What making a unit whole takes; None instead of it for a unit that stays whole."""

    size_class: str
    seconds: float
    gathered_bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class Traffic:
    """What a microbatch takes, once the slots hold what they always hold.

    Attributes:
        seconds: from its beginning to the next one's.
        wait_s: of these, waiting for transfers.
    """

    seconds: float
    wait_s: float
    num_transfers: int
    gathered_bytes: int
    copied_bytes: int


def simulate(
    stops: Sequence[Stop],
    transfers: Sequence[Transfer | None],
    num_slots: dict[str, int],
    prefetch: int,
    is_overlapping: bool = True,
) -> Traffic:
    """Run microbatches until they repeat, and return the last.

    Args:
        transfers: of each unit.
        num_slots: of each size class.
        is_overlapping: whether transfers run beside the computation.
    """
    run = _Run(stops, transfers, num_slots, prefetch, is_overlapping)
    for _ in range(2):
        run.microbatch()
    before = dict(run.totals)
    run.microbatch()
    return Traffic(**{name: total - before[name] for name, total in run.totals.items()})


class _State(enum.Enum):
    SHARDED = enum.auto()
    WHOLE = enum.auto()
    IDLE = enum.auto()


@dataclass
class _Slot:
    owner: int | None = None
    readers_done_s: float = 0.0


@dataclass
class _Run:
    stops: Sequence[Stop]
    transfers: Sequence[Transfer | None]
    num_slots: dict[str, int]
    prefetch: int
    is_overlapping: bool
    totals: dict[str, Any] = field(default_factory=lambda: dict.fromkeys((f.name for f in fields(Traffic)), 0))
    stream_s: float = 0.0
    position: int = 0
    direction: Direction = Direction.FORWARD
    slots: dict[str, list[_Slot]] = field(init=False)
    states: list[_State] = field(init=False)
    arrivals_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = {name: [_Slot() for _ in range(number)] for name, number in self.num_slots.items()}
        self.states = [_State.SHARDED for _ in self.transfers]
        self.positions = [[i for i, stop in enumerate(self.stops) if stop.unit == u] for u in range(len(self.states))]

    def microbatch(self) -> None:
        self.direction = Direction.TRAINING_FORWARD
        for position, stop in enumerate(self.stops):
            self.position = position
            self._make_whole(stop.unit)
            self._start_ahead(stop.unit for stop in self.stops[position + 1 :])
            self._add(seconds=stop.forward_s)
            self._reshard(stop.unit)
        for position in reversed(range(len(self.stops))):
            stop = self.stops[position]
            if stop.backward_s is None:
                continue
            self.direction = Direction.BACKWARD
            self.position = self.positions[stop.unit][-1]
            self._make_whole(stop.unit)
            self._start_ahead(self._below(position))
            self._add(seconds=stop.backward_s)
            self._reshard(stop.unit)
            self._start_ahead(self._below(position))

    def _below(self, position: int) -> Iterator[int]:
        for stop in reversed(self.stops[:position]):
            if stop.backward_s is None:
                return
            yield stop.unit

    def _start_ahead(self, units: Iterator[int]) -> None:
        num_started = 0
        for unit in units:
            if num_started == self.prefetch:
                return
            if self.transfers[unit] is not None:
                self._start(unit)
                num_started += 1

    def _make_whole(self, unit: int) -> None:
        if self.transfers[unit] is None:
            return
        is_started = self._start(unit)
        assert is_started, "no slot is free"
        self.states[unit] = _State.WHOLE
        wait_s = max(0.0, self.arrivals_s[unit] - self.totals["seconds"])
        self._add(seconds=wait_s, wait_s=wait_s)

    def _start(self, unit: int) -> bool:
        transfer = self.transfers[unit]
        assert transfer is not None
        if self.states[unit] is not _State.SHARDED:
            return True
        slot = self._take_slot(transfer.size_class)
        if slot is None:
            return False
        slot.owner = unit
        self.states[unit] = _State.IDLE
        if self.is_overlapping:
            self.stream_s = max(self.stream_s, slot.readers_done_s) + transfer.seconds
        else:
            self._add(seconds=transfer.seconds, wait_s=transfer.seconds)
            self.stream_s = self.totals["seconds"]
        self.arrivals_s[unit] = self.stream_s
        self._add(num_transfers=1, gathered_bytes=transfer.gathered_bytes, copied_bytes=transfer.copied_bytes)
        return True

    def _take_slot(self, size_class: str) -> _Slot | None:
        slots = self.slots[size_class]
        for slot in slots:
            if slot.owner is None:
                return slot
        owned = {slot.owner: slot for slot in slots if slot.owner is not None}
        evictable = [(unit, self.positions[unit]) for unit in owned if self.states[unit] is not _State.WHOLE]
        victim = farthest(evictable, self.position, self.direction, len(self.stops))
        if victim is None:
            return None
        self.states[victim] = _State.SHARDED
        owned[victim].owner = None
        return owned[victim]

    def _reshard(self, unit: int) -> None:
        if self.states[unit] is not _State.WHOLE:
            return
        self.states[unit] = _State.IDLE
        for slots in self.slots.values():
            for slot in slots:
                if slot.owner == unit:
                    slot.readers_done_s = self.totals["seconds"]

    def _add(self, **more: float) -> None:
        for name, value in more.items():
            self.totals[name] += value
