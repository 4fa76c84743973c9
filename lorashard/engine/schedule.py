"""Which unit is needed next: the static order of visits, and how far each lies ahead. Pure arithmetic."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")


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


def farthest(
    candidates: Iterable[tuple[Key, Iterable[int]]], position: int, direction: Direction, num_visits: int
) -> Key | None:
    """Return the key of the candidate (key, its visits) whose nearest next visit lies farthest ahead, or None.

    Ties go to the first: all ranks must choose alike.
    """
    best_key: Key | None = None
    best_distance = -1
    for key, visits in candidates:
        distance = min(count_visits_until(visit, position, direction, num_visits) for visit in visits)
        if distance > best_distance:
            best_key, best_distance = key, distance
    return best_key
