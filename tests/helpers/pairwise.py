"""Few rows in which every two values of different axes meet: most bugs need two, and all combinations are too many."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]
_NUM_CANDIDATES = 12


def cover_pairs(
    axes: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool], pinned: Sequence[Row] = (), seed: int = 0
) -> list[Row]:
    """Return `pinned` and, after them, rows that cover every pair of values that may meet; the first ones cover most.

    Args:
        is_allowed: tells whether a row, of which some axes may not have been chosen yet, may be.
    """
    choose = random.Random(seed)
    missing = list_pairs(axes, is_allowed) - set().union(*(pairs_of(row) for row in pinned), set())
    rows = list(pinned)
    while missing:
        ordered = sorted(missing, key=lambda pair: sorted(map(repr, pair)))
        firsts = [dict(sorted(choose.choice(ordered))) for _ in range(_NUM_CANDIDATES)]
        candidates = [_complete(first, axes, is_allowed, missing, choose) for first in firsts]
        rows.append(max(candidates, key=lambda row: len(missing & pairs_of(row))))
        missing -= pairs_of(rows[-1])
    return rows


def list_pairs(axes: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool]) -> set[Pair]:
    """Return the pairs of values, each as {(axis, value), (axis, value)}, that may meet."""
    return {
        frozenset(pair)
        for one, other in itertools.combinations(axes, 2)
        for pair in itertools.product(((one, value) for value in axes[one]), ((other, value) for value in axes[other]))
        if is_allowed(dict(pair))
    }


def pairs_of(row: Row) -> set[Pair]:
    """Return the pairs that a row covers."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def _complete(
    row: Row, axes: Mapping[str, Sequence[Any]], is_allowed: Callable[[Row], bool], missing: set[Pair], choose: Any
) -> Row:
    """Choose the other axes' values, in an order by chance; each covers as much as it can."""
    left = [axis for axis in axes if axis not in row]
    choose.shuffle(left)
    for axis in left:
        allowed = [value for value in axes[axis] if is_allowed(row | {axis: value})]
        assert allowed, f"no {axis} goes with {row}"
        row |= {axis: max(allowed, key=lambda value: len(missing & pairs_of(row | {axis: value})))}
    return row
