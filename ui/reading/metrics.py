"""A run's metrics.jsonl, read as it grows: each number over the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .jsonl_tail import JsonLines
from .series import Series, read_column

TOKENS = "num_tokens"
_MOST_RECENT = 256
_MOST_ODD = 1000
_EXACT = ("learning_rate", "epoch", TOKENS)


def is_noisy(name: str) -> bool:
    """Tell whether a curve is to be smoothed: not what is set or counted, nor an evaluation's few points."""
    return name not in _EXACT and not name.startswith("eval_")


class Metrics:
    """Each number of metrics.jsonl over the steps.

    Attributes:
        series: by name; tokens are those of the whole run, though the trainer counts from 0 where it is resumed.
        recent: the last lines.
        odd: step, name and number of what was not finite, and the steps that were left out.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._clear()

    def _clear(self) -> None:
        self.series: dict[str, Series] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=_MOST_RECENT)
        self.odd: deque[tuple[int, str, float]] = deque(maxlen=_MOST_ODD)
        self._resumed: Sequence[float] = ()
        self._counted = (-np.inf, 0.0)  # the last step with a count of tokens, and that count
        self._counted_before = 0.0  # in the parts of the run before its last resume

    def update(self, resumed: Sequence[float] = ()) -> None:
        """Read what has come.

        Args:
            resumed: the steps from which the run was resumed, rising.
        """
        self._resumed = resumed
        self._lines.follow(self._clear, self._take)

    def _take(self, batch: Sequence[dict[str, Any]]) -> None:
        rows = [row for row in batch if isinstance(row.get("step"), (int, float))]
        self.recent.extend(rows[-_MOST_RECENT:])
        for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
            xs, ys = read_column(rows, name)
            if len(xs) == 0:
                continue
            if name not in self.series:
                self.series[name] = Series()
            if name == TOKENS:
                self._add_tokens(xs, ys)
            else:
                self.series[name].extend(xs, ys)
            is_odd = np.ones(len(xs), dtype=bool) if name == "skipped_steps" else ~np.isfinite(ys)
            self.odd.extend((int(x), name, float(y)) for x, y in zip(xs[is_odd], ys[is_odd], strict=True))

    def _add_tokens(self, xs: np.ndarray, ys: np.ndarray) -> None:
        """Add counts, each to what the run had counted before it was resumed last."""
        earlier_xs, earlier_ys = (
            np.concatenate(([last], new[:-1])) for last, new in zip(self._counted, (xs, ys), strict=True)
        )
        self._counted = (xs[-1], ys[-1])
        is_resumed = np.searchsorted(self._resumed, xs) > np.searchsorted(self._resumed, earlier_xs)
        is_anew = is_resumed | (ys < earlier_ys) | (xs <= earlier_xs)
        begin = 0
        for end in [*np.flatnonzero(is_anew).tolist(), len(xs)]:
            if end > begin:
                self.series[TOKENS].extend(xs[begin:end], ys[begin:end] + self._counted_before)
            if end < len(xs):
                self._counted_before = self.series[TOKENS].before(xs[end])
            begin = end
