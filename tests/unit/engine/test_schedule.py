"""Which unit is needed next, and which to give up for another."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from lorashard.engine.schedule import Direction, count_visits_until, farthest


def walk_on(position: int, direction: Direction, num_visits: int) -> Iterator[tuple[int, int]]:
    """Yield (how many visits ahead, which visit) for all that comes after `position`, as the passes go.

    Where a forward turns into a backward, or a backward into the next forward, the unit is visited for both at once.
    """
    ahead = 0
    if direction is Direction.BACKWARD:
        for visit in reversed(range(position)):
            ahead += 1
            yield ahead, visit
    else:
        for visit in range(position + 1, num_visits):
            ahead += 1
            yield ahead, visit
    if direction is Direction.FORWARD:
        ahead += 1
    following = range(num_visits)
    for visit in reversed(following) if direction is Direction.TRAINING_FORWARD else following:
        yield ahead, visit
        ahead += 1


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("num_visits", (1, 2, 3, 8))
def test_visits_are_counted_as_the_passes_go(direction, num_visits):
    """An off-by-one here costs a gather each step, and nothing else would show it."""
    for position, target in itertools.product(range(num_visits), repeat=2):
        expected = next(ahead for ahead, visit in walk_on(position, direction, num_visits) if visit == target)
        assert count_visits_until(target, position, direction, num_visits) == expected


Visited = tuple[int, Direction]  # a position, and what runs there


def list_visits(passes: Sequence[str], num_visits: int) -> list[Visited]:
    """Return every stop of a sequence of passes: `train` is a forward and its backward."""
    stops: list[Visited] = []
    for one in passes:
        if one == "train":
            stops += [(position, Direction.TRAINING_FORWARD) for position in range(num_visits)]
            stops += [(position, Direction.BACKWARD) for position in reversed(range(num_visits))]
        else:
            stops += [(position, Direction.FORWARD) for position in range(num_visits)]
    return stops


def count_gathers(stops: Sequence[Visited], unit_at: Sequence[int], num_slots: int) -> int:
    """Return how often a unit must be gathered when `farthest` says which to give up."""
    positions = {unit: [i for i, other in enumerate(unit_at) if other == unit] for unit in unit_at}
    held: list[int] = []
    num_gathers = 0
    for position, direction in stops:
        unit = unit_at[position]
        if unit in held:
            continue
        if len(held) == num_slots:
            held.remove(farthest([(u, positions[u]) for u in held], position, direction, len(unit_at)))
        held.append(unit)
        num_gathers += 1
    return num_gathers


def count_fewest_gathers(units: Sequence[int], num_slots: int) -> int:
    """Return how often a unit must be gathered at least, by trying every choice."""

    @functools.cache
    def fewest(index: int, held: frozenset[int]) -> int:
        if index == len(units):
            return 0
        if units[index] in held:
            return fewest(index + 1, held)
        if len(held) < num_slots:
            return 1 + fewest(index + 1, held | {units[index]})
        return 1 + min(fewest(index + 1, held - {victim} | {units[index]}) for victim in held)

    return fewest(0, frozenset())


@pytest.mark.parametrize("is_tied", (False, True))
@pytest.mark.parametrize("passes", ("train", "train train train", "eval eval train", "train eval train eval"))
def test_no_choice_of_victims_needs_fewer_gathers(passes, is_tied):
    """The order of visits is known, so anything but the optimum is a mistake in the distances."""
    for num_visits, num_slots in itertools.product(range(1, 7), range(1, 5)):
        unit_at = list(range(num_visits))
        if is_tied:
            unit_at[-1] = 0
        stops = list_visits(passes.split(), num_visits)
        expected = count_fewest_gathers([unit_at[position] for position, _ in stops], num_slots)
        assert count_gathers(stops, unit_at, num_slots) == expected


def test_nobody_is_chosen_from_nobody():
    """All slots in use is an answer of its own, not an error here."""
    assert farthest([], 0, Direction.FORWARD, 4) is None


def test_ties_go_to_the_first():
    """Ranks whose candidates stand in one order must choose alike, whatever the candidates' hashes are."""
    keys = [object() for _ in range(8)]
    random.Random(0).shuffle(keys)
    assert farthest([(key, [2]) for key in keys], 0, Direction.FORWARD, 4) is keys[0]


def test_a_unit_with_two_visits_counts_by_the_nearer():
    """A tied embedding is needed again at the head: counted by its first visit alone it would be given up too early."""
    candidates = [("layer", [3]), ("tied", [0, 5])]
    assert farthest(candidates, 4, Direction.FORWARD, 6) == "layer"
    assert farthest(candidates, 2, Direction.FORWARD, 6) == "tied"
