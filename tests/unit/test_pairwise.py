"""The ladder's rows: few, always the same, and none of what must meet is left out."""

from helpers import ladder
from helpers.pairwise import cover_pairs, list_pairs, pairs_of


def test_every_pair_of_the_ladder_meets():
    """Catches an axis, or a value, that was added and is tried with the plainest of everything else alone."""
    rows = ladder.list_rows()
    met = set().union(*(pairs_of(row) for row in rows))
    assert list_pairs(ladder.AXES, ladder.is_allowed) - met == set()
    assert all(row.keys() == ladder.AXES.keys() for row in rows)
    assert len(rows) < 100


def test_pairs_that_may_not_meet_do_not():
    """Catches a constraint that is not asked, and rows that change from one run of the tests to the next."""
    axes = {"a": (1, 2, 3), "b": ("x", "y"), "c": (None, True)}

    def is_allowed(row):
        return not (row.get("a") == 3 and row.get("b") == "y")

    rows = cover_pairs(axes, is_allowed, pinned=({"a": 3, "b": "x", "c": None, "other": 4},))
    assert rows == cover_pairs(axes, is_allowed, pinned=rows[:1])
    assert all(map(is_allowed, rows)) and len(rows) == 6
    assert list_pairs(axes, is_allowed) <= set().union(*(pairs_of(row) for row in rows))
    assert len(list_pairs(axes, is_allowed)) == 3 * 2 - 1 + 3 * 2 + 2 * 2
