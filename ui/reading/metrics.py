"""A run's metrics.jsonl, read as it grows: each number over the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .jsonl_tail import JsonLines
from .series import Series, read_column

_MOST_RECENT = 256
_MOST_ODD = 1000


class Metrics:
    """Each number of metrics.jsonl over the steps.

    Attributes:
        series: by name.
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

    def update(self) -> None:
        """Read what has come."""
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
            self.series[name].extend(xs, ys)
            is_odd = np.ones(len(xs), dtype=bool) if name == "skipped_steps" else ~np.isfinite(ys)
            self.odd.extend((int(x), name, float(y)) for x, y in zip(xs[is_odd], ys[is_odd], strict=True))
