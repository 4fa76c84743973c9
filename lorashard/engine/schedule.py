"""The static order of one forward: how far each visit of a unit lies ahead, and so which slot to fill next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from .unit import Unit

Key = TypeVar("Key")


@dataclass(frozen=True)
class ScheduleEntry:
    """One entry in the static order of a forward: entering any of `modules` needs `unit` unsharded.

    Args:
        unit: what is entered. A tied embedding's unit has two entries: first as embedding, last as LM head.
        modules: leaving one releases the unit, unless `holds`.
        holds: keep the unit to the end of the forward, since it is read outside of its modules: fused losses read
            `lm_head.weight` after the final norm without calling the LM head.
        has_backward: false for a frozen embedding, which needs only its indices for that.
    """

    unit: Unit
    modules: tuple[nn.Module, ...]
    holds: bool = False
    has_backward: bool = True


class Direction(enum.Enum):
    """What is running, and so what comes after it."""

    FORWARD = "a forward without gradients: the next forward comes after it"
    TRAINING_FORWARD = "a forward that a backward will follow"
    BACKWARD = "a backward: the next forward comes after it"


def count_visits_until(target: int, position: int, direction: Direction, num_visits: int) -> int:
    """Return how many visits lie between the one at `position` and the next one at `target`.

    A forward visits 0 .. num_visits - 1, a backward the same in reverse. The unit whose next visit lies farthest ahead
    is the one to reshard (L. Belady, "A study of replacement algorithms", 1966): the order is known, so the optimal
    choice is too, and every rank makes the same one.
    """
    if direction is Direction.BACKWARD:
        return position - target if target < position else position + target
    if target > position:
        return target - position
    if direction is Direction.TRAINING_FORWARD:
        return (num_visits - 1 - position) + (num_visits - 1 - target)
    return num_visits - position + target


def find_next_of_class(classes: Sequence[str | None], position: int) -> int | None:
    """Return whose turn it is in the slot that is left where a forward enters `position` from another class.

    The embedding is left for the first layer, and the head comes next in its slot: nothing else waits for that.

    Args:
        classes: of each visit of a forward the size class, or None of a unit that needs no slot.
    """
    left = classes[position - 1] if position > 0 else None
    if left is None or left == classes[position]:
        return None
    return next((i for i in range(position + 1, len(classes)) if classes[i] == left), None)


def choose_slot(
    owners: Sequence[Key | None],
    is_in_use: Callable[[Key], bool],
    visits: Mapping[Key, Sequence[int]],
    position: int,
    direction: Direction,
    num_visits: int,
) -> int | None:
    """Return which of a class's slots to fill next, or None if all are in use.

    A free slot is taken first; otherwise the owner whose next visit lies farthest ahead is resharded. Ties go to the
    first: all ranks must choose alike.

    Args:
        owners: the unit in each slot, or None.
        visits: the positions of each unit in the order of a forward.
    """
    if None in owners:
        return owners.index(None)
    chosen, farthest = None, -1
    for slot, owner in enumerate(owners):
        if owner is not None and not is_in_use(owner):
            first, *others = visits[owner]
            distance = count_visits_until(first, position, direction, num_visits)
            for ahead in others:  # of a tied embedding's unit
                distance = min(distance, count_visits_until(ahead, position, direction, num_visits))
            if distance > farthest:
                chosen, farthest = slot, distance
    return chosen
