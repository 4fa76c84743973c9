"""The places of prepared rows in the user's dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import datasets
import numpy as np


def write_place(file: TextIO, place: str) -> None:
    """Add the place of the next row that is kept to a split's file of places."""
    file.write(" ".join(place.splitlines()) + "\n")


def read_places(path: Path, positions: Sequence[int]) -> list[str]:
    """Return the places of rows by their positions in the file, from 0."""
    wanted = set(positions)
    found = {}
    with path.open(encoding="utf-8") as file:
        for position, line in enumerate(file):
            if position in wanted:
                found[position] = line.rstrip("\n")
    return [found[position] for position in positions]


def find_positions(indices: Sequence[int], num_rows: int, shuffle_seed: int | None) -> list[int]:
    """Return where rows of a shuffled dataset were before it was shuffled.

    Args:
        shuffle_seed: None if it was not.
    """
    if shuffle_seed is None:
        return list(indices)
    order = datasets.Dataset.from_dict({"position": np.arange(num_rows)})
    return order.shuffle(seed=shuffle_seed, keep_in_memory=True)[list(indices)]["position"]
