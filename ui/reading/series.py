"""Numbers over steps, as many as a chart can show: thinned, with what stands out kept, and smoothed."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

_MOST_POINTS = 200_000
_MOST_THINNED = 4  # ways in which browsers look at one series
Span = tuple[float, float]  # of steps


class Series:
    """One number over rising steps. Memory is bounded: beyond `most_points` the older ones are thinned."""

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._xs = array("d")
        self._ys = array("d")
        self._most_points = most_points
        self._thinned: dict[tuple[int, float, Span | None], tuple[list[float], list[float], list[float]]] = {}

    def __len__(self) -> int:
        return len(self._xs)

    def extend(self, xs: np.ndarray, ys: np.ndarray) -> None:
        """Add points. One of a step that is there already replaces it and what follows: the step was run again."""
        self._thinned.clear()
        begin = 0
        for end in [*(np.flatnonzero(np.diff(xs) <= 0) + 1).tolist(), len(xs)]:
            while self._xs and begin < end and self._xs[-1] >= xs[begin]:
                self._xs.pop()
                self._ys.pop()
            self._xs.frombytes(xs[begin:end].tobytes())
            self._ys.frombytes(ys[begin:end].tobytes())
            begin = end
        if len(self._xs) > self._most_points:
            xs, ys = self._copy()
            kept = choose_points(ys, self._most_points // 2)
            self._xs, self._ys = array("d", xs[kept].tobytes()), array("d", ys[kept].tobytes())

    def before(self, x: float) -> float:
        """Return the last y of a smaller x; 0 where there is none."""
        place = bisect_left(self._xs, x)
        return self._ys[place - 1] if place else 0.0

    def points(
        self, max_points: int, smoothing: float = 0.0, span: Span | None = None
    ) -> tuple[list[float], list[float], list[float]]:
        """Return xs, ys and smoothed ys of at most `max_points`, and with a span of as many more.

        Args:
            smoothing: how much of the mean so far each point leaves in place, from 0 to below 1: an exponential moving
                average over all points, whose first ones are not drawn to 0.
            span: a range of xs that is looked at closely: its points come besides those of the whole, whose extremes
                stay.
        """
        asked = (max_points, smoothing, span)
        if asked not in self._thinned:
            xs, ys = self._copy()
            kept = choose_points(ys, max_points)
            if span is not None:
                begin, end = np.searchsorted(xs, span[0]), np.searchsorted(xs, span[1], "right")
                kept = np.union1d(kept, begin + choose_points(ys[begin:end], max_points))
            smoothed = smooth(ys, smoothing)
            while len(self._thinned) >= _MOST_THINNED:
                self._thinned.pop(next(iter(self._thinned)))
            self._thinned[asked] = (xs[kept].tolist(), ys[kept].tolist(), smoothed[kept].tolist())
        return self._thinned[asked]

    def tail(self, num_points: int) -> list[float]:
        """Return the last ys."""
        return self._ys[-num_points:].tolist()

    def _copy(self) -> tuple[np.ndarray, np.ndarray]:
        # Copies: an array whose buffer somebody holds cannot grow.
        return np.array(self._xs, dtype=float), np.array(self._ys, dtype=float)


def choose_points(ys: np.ndarray, max_points: int) -> np.ndarray:
    """Return which points to keep: both ends, and the least and greatest finite one of each stretch."""
    if len(ys) <= max_points:
        return np.arange(len(ys))
    inner = ys[1:-1]
    length = -(-len(inner) // max(1, (max_points - 2) // 2))  # of a stretch, of which two points are kept
    padded = np.full(-(-len(inner) // length) * length, np.nan)
    padded[: len(inner)] = inner
    stretches = padded.reshape(-1, length)
    is_finite = np.isfinite(stretches)
    starts = np.arange(len(stretches)) * length + 1
    lowest = starts + np.where(is_finite, stretches, np.inf).argmin(axis=1)
    highest = starts + np.where(is_finite, stretches, -np.inf).argmax(axis=1)
    return np.unique(np.concatenate([[0], lowest, highest, [len(ys) - 1]]))


def smooth(ys: np.ndarray, smoothing: float) -> np.ndarray:
    """Return the exponential moving average with bias correction; a number that is not finite leaves it as it was."""
    if not 0 < smoothing < 1:
        return ys
    return pd.Series(ys).ewm(alpha=1 - smoothing, adjust=True, ignore_na=True).mean().to_numpy()


def read_column(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the numbers of those JSON lines that have a number of this name. All have a step."""
    rows = [row for row in rows if name in row]
    values = [row[name] for row in rows]
    if not {type(value) for value in values} <= {int, float}:
        numbers = [to_number(value) for value in values]
        rows = [row for row, number in zip(rows, numbers, strict=True) if number is not None]
        values = [number for number in numbers if number is not None]
    return np.array([row["step"] for row in rows], dtype=float), np.array(values, dtype=float)


def to_number(value: Any) -> float | None:
    """Return a number of a JSON line, where `nan` and `inf` stand as words; None of anything else."""
    if isinstance(value, (int, float)):
        return None if isinstance(value, bool) else float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def to_finite(value: Any) -> float | None:
    """Return a finite number of a JSON line; None of anything else."""
    number = to_number(value)
    return number if number is not None and math.isfinite(number) else None


def to_whole(value: Any) -> int | None:
    """Return a finite number of a JSON line without its fraction; None of anything else."""
    number = to_finite(value)
    return None if number is None else int(number)
