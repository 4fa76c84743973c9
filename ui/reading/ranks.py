"""What each rank of a run says of itself, in its `ranks/rank_K.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .jsonl_tail import JsonLines
from .series import Series, read_column, to_finite, to_whole

# What charts show of every line, and where it stands in the line: the first that is there.
_SOURCES = {
    "memory_bytes": ("device_used_bytes", "rss_bytes"),
    "peak_bytes": ("device_peak_bytes", "rss_bytes"),
    "wait_s": ("wait_s",),
    "utilization_percent": ("utilization_percent",),
    "temperature_c": ("temperature_c",),
    "cpu_percent": ("cpu_percent",),
}
CHARTED = (*_SOURCES, "wait_share")
_MOST_POINTS = 8192  # of each of them, of each rank
_LAG_S = 15.0
_NAME = re.compile(r"rank_(\d+)\.jsonl")


@dataclass(frozen=True)
class RankRow:
    """A rank as it was when it last wrote.

    Attributes:
        state: `running`; `behind` where it lags behind the others; `failed` where the run's error names it, and then
            `stopped` of the others; else that of the run.
        memory_bytes: used on its device, by whomever; on CPU its resident memory.
        peak_bytes: the most that it has held itself.
        planned_bytes: its peak as planned.
        total_bytes: of its device.
        wait_s: for gathers, since its start.
        wait_share: of the time since its line before, from 0 to 1.
        update_s: when it wrote.
        facts: its whole last line.
    """

    rank: int
    state: str
    step: int | None
    memory_bytes: int | None
    peak_bytes: int | None
    planned_bytes: int | None
    total_bytes: int | None
    wait_s: float | None
    wait_share: float | None
    gathered_bytes: int | None
    utilization_percent: float | None
    temperature_c: float | None
    cpu_percent: float | None
    update_s: float | None
    facts: Mapping[str, Any]


class RankLog:
    """One rank's lines, read as they come.

    Attributes:
        last: the last line that measures something.
        wait_share: at the last line.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._path = path
        self._clear()

    def _clear(self) -> None:
        self.last: dict[str, Any] = {}
        self.wait_share: float | None = None
        self.peak_bytes: int | None = None
        self.series = {name: Series(_MOST_POINTS) for name in CHARTED}
        self._before: dict[str, Any] = {}  # the last line that tells when it was written, and how long was waited

    def update(self) -> None:
        """Read what has come."""
        self._lines.follow(self._clear, self._take)

    @property
    def update_s(self) -> float | None:
        """When the rank last wrote."""
        said = to_finite(self.last.get("time"))
        if said is not None:
            return said
        try:
            return self._path.stat().st_mtime if self.last else None
        except OSError:
            return None

    def _take(self, batch: Sequence[dict[str, Any]]) -> None:
        rows = [row for row in batch if isinstance(row.get("step"), (int, float))]
        if not rows:
            return
        self.last = rows[-1]
        for name, names in _SOURCES.items():
            for one in names:
                xs, ys = read_column(rows, one)
                if len(xs):
                    self._add(name, xs, ys)
                    break
        self._add_wait_shares(rows)

    def _add(self, name: str, xs: np.ndarray, ys: np.ndarray) -> None:
        if name == "peak_bytes":
            ys = np.maximum.accumulate(np.maximum(ys, self.peak_bytes or 0))
            self.peak_bytes = int(ys[-1])
        self.series[name].extend(xs, ys)

    def _add_wait_shares(self, rows: Sequence[dict[str, Any]]) -> None:
        rows = [row for row in rows if "time" in row and "wait_s" in row]
        rows = [self._before, *rows] if self._before else rows
        if not rows:
            return
        self._before = rows[-1]
        xs, at_s = read_column(rows, "time")
        waited_s, elapsed_s = np.diff(read_column(rows, "wait_s")[1]), np.diff(at_s)
        is_known = (elapsed_s > 0) & (waited_s >= 0)  # a rank that was started again counts from 0
        shares = np.minimum(1, waited_s[is_known] / elapsed_s[is_known])
        self.series["wait_share"].extend(xs[1:][is_known], shares)
        self.wait_share = float(shares[-1]) if len(shares) and is_known[-1] else None


def list_rank_files(folder: Path) -> dict[int, Path]:
    """Return the ranks' files in a run's folder, by rank."""
    try:
        found = {int(match[1]): path for path in (folder / "ranks").iterdir() if (match := _NAME.fullmatch(path.name))}
    except OSError:
        return {}
    return dict(sorted(found.items()))


def find_behind(logs: Mapping[int, RankLog], now_s: float) -> dict[int, int]:
    """Return the ranks that have long not written of a step that others have written of, with their last step."""
    steps = {rank: int(log.last["step"]) for rank, log in logs.items() if log.last}
    newest = max(steps.values(), default=0)
    first_s = min((logs[rank].update_s or now_s for rank, step in steps.items() if step == newest), default=now_s)
    if now_s - first_s < _LAG_S:  # ranks do not write at the same moment
        return {}
    return {rank: step for rank, step in steps.items() if step < newest}


def find_planned_bytes(plan: Mapping[str, Any] | None) -> int | None:
    """Return the peak of a rank that a run was planned to have."""
    if plan is None:
        return None
    try:
        return int(plan["rows"][plan["chosen"]]["peak_bytes"])
    except (KeyError, TypeError, IndexError, ValueError):
        return None


def describe_rank(rank: int, log: RankLog, state: str, planned_bytes: int | None) -> RankRow:
    """Return a rank as it was when it last wrote."""
    last = log.last
    return RankRow(
        rank=rank,
        state=state,
        step=to_whole(last.get("step")),
        memory_bytes=to_whole(last.get("device_used_bytes", last.get("rss_bytes"))),
        peak_bytes=log.peak_bytes,
        planned_bytes=planned_bytes,
        total_bytes=to_whole(last.get("device_total_bytes")),
        wait_s=to_finite(last.get("wait_s")),
        wait_share=log.wait_share,
        gathered_bytes=to_whole(last.get("gathered_bytes")),
        utilization_percent=to_finite(last.get("utilization_percent")),
        temperature_c=to_finite(last.get("temperature_c")),
        cpu_percent=to_finite(last.get("cpu_percent")),
        update_s=log.update_s,
        facts=last,
    )
