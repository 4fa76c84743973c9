"""What a training microbatch moves and how long it takes: the engine's order of events, without the engine.

Slots are chosen by the engine's own `choose_slot`. The order of gathers is repeated here; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, takewhile

from ..engine.schedule import Direction, choose_slot, find_next_of_class


@dataclass(frozen=True)
class TimedEntry:
    """One entry of a forward's schedule: which unit, and how long it computes.

    Attributes:
        unit: its name.
        backward_s: None where there is no backward, as for an embedding.
    """

    unit: str
    forward_s: float
    backward_s: float | None


@dataclass(frozen=True)
class Transfer:
    """What it takes to unshard a unit."""

    size_class: str
    seconds: float
    gathered_bytes: int
    copied_bytes: int


@dataclass
class Traffic:
    """What microbatches take.

    Attributes:
        seconds: from the beginning of one to that of the next.
        wait_s: of these, waiting for transfers.
    """

    seconds: float = 0
    wait_s: float = 0
    gathered_bytes: int = 0
    copied_bytes: int = 0


@dataclass
class _Slot:
    owner: str | None = None
    arrival_s: float = 0.0
    readers_done_s: float = 0.0


def simulate(
    entries: Sequence[TimedEntry],
    transfers: Mapping[str, Transfer],
    num_slots: Mapping[str, int],
    prefetch: int,
    is_overlapping: bool = True,
) -> Traffic:
    """Run microbatches until they repeat, and return what the last took.

    Args:
        transfers: of each unit that is sharded; the others stay unsharded.
        num_slots: of each size class.
        is_overlapping: whether transfers run beside the computation.
    """
    simulation = _Simulation(entries, transfers, num_slots, prefetch, is_overlapping)
    for _ in range(2):
        simulation.run_microbatch()
    before = asdict(simulation.total)
    simulation.run_microbatch()
    return Traffic(**{name: total - before[name] for name, total in asdict(simulation.total).items()})


class _Simulation:
    def __init__(
        self,
        entries: Sequence[TimedEntry],
        transfers: Mapping[str, Transfer],
        num_slots: Mapping[str, int],
        prefetch: int,
        is_overlapping: bool,
    ) -> None:
        self.total = Traffic()
        self._entries = entries
        self._transfers = transfers
        self._prefetch = prefetch
        self._is_overlapping = is_overlapping
        self._slots = {name: [_Slot() for _ in range(number)] for name, number in num_slots.items()}
        self._slot_of: dict[str, _Slot] = {}
        self._positions = {
            entry.unit: [i for i, other in enumerate(entries) if other.unit == entry.unit] for entry in entries
        }
        self._classes = [transfers[e.unit].size_class if e.unit in transfers else None for e in entries]
        self._position = 0
        self._direction = Direction.FORWARD
        self._in_use: str | None = None
        self._last_arrival_s = 0.0

    def run_microbatch(self) -> None:
        units = [entry.unit for entry in self._entries]
        self._direction = Direction.TRAINING_FORWARD
        for position, entry in enumerate(self._entries):
            following = find_next_of_class(self._classes, position)
            self._compute(
                position, entry.forward_s, units[position + 1 :], None if following is None else units[following]
            )
        self._direction = Direction.BACKWARD
        for position, entry in reversed(list(enumerate(self._entries))):
            if entry.backward_s is not None:
                ahead = self._ahead_of_backward(position)
                self._compute(position, entry.backward_s, ahead)
                self._start_ahead(ahead)

    def _ahead_of_backward(self, position: int) -> list[str]:
        """Return the units that come after the backward of an entry, ending with the next forward's first."""
        below = takewhile(lambda other: other.backward_s is not None, reversed(self._entries[:position]))
        is_slot_free = self._classes[0] not in (None, self._classes[position])
        return [other.unit for other in below] + ([self._entries[0].unit] if is_slot_free else [])

    def _compute(self, position: int, seconds: float, ahead: Iterable[str], following: str | None = None) -> None:
        """Unshard the unit of an entry, start the transfers of those ahead of it, compute, and reshard.

        Args:
            following: whose turn it is in the slot that was left for this entry's.
        """
        self._position = position
        unit = self._entries[position].unit
        if unit in self._transfers:
            self._start(unit)
            self._in_use = unit
            self._wait(max(0.0, self._slot_of[unit].arrival_s - self.total.seconds))
        self._start_ahead(ahead)
        if following is not None and self._prefetch > 0:
            self._start(following)
        self.total.seconds += seconds
        if unit in self._transfers:
            self._in_use = None
            self._slot_of[unit].readers_done_s = self.total.seconds

    def _start_ahead(self, ahead: Iterable[str]) -> None:
        for unit in islice((unit for unit in ahead if unit in self._transfers), self._prefetch):
            self._start(unit)

    def _start(self, unit: str) -> None:
        """Start the transfer of a unit, if it is sharded and a slot can be had."""
        if unit in self._slot_of:
            return
        transfer = self._transfers[unit]
        slots = self._slots[transfer.size_class]
        chosen = choose_slot(
            [slot.owner for slot in slots],
            lambda owner: owner == self._in_use,
            self._positions,
            self._position,
            self._direction,
            len(self._entries),
        )
        if chosen is None:
            return
        slot = slots[chosen]
        if slot.owner is not None:
            del self._slot_of[slot.owner]
        slot.owner, self._slot_of[unit] = unit, slot
        if self._is_overlapping:
            self._last_arrival_s = max(self._last_arrival_s, slot.readers_done_s) + transfer.seconds
        else:
            self._wait(transfer.seconds)
            self._last_arrival_s = self.total.seconds
        slot.arrival_s = self._last_arrival_s
        self.total.gathered_bytes += transfer.gathered_bytes
        self.total.copied_bytes += transfer.copied_bytes

    def _wait(self, seconds: float) -> None:
        self.total.seconds += seconds
        self.total.wait_s += seconds
