"""The record of gpu.py: a file that is complete after each row, and which rows are still to be measured."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, write_record

# What a process is given to end in once its time is up.
GRACE_S = 20
# Of the seconds that a row took before: it is expected to take no more.
_MARGIN = 1.3
_MEASURING = ("common", "contenders", "gpu_finetune", "gpu_jobs", "random_base")


@dataclass(frozen=True)
class Row:
    """Something that is measured in processes of its own.

    Attributes:
        most_s: seconds after which it is ended, loading included.
        settings: what it is measured with, as JSON.
        is_own: whether lorashard computes in it, so that its code decides what is found.
    """

    name: str
    most_s: float
    settings: dict[str, Any] = field(default_factory=dict)
    is_own: bool = True


@dataclass
class Record:
    """What was measured, by row; on the disk it is valid JSON at any time.

    Attributes:
        machine: the GPU and the versions, which together with a row's settings and code identify what is measured.
        about: what else each row says of where it was made.
        summarize: makes the rest of the file from the rows.
    """

    path: Path | None
    machine: dict[str, Any]
    about: dict[str, Any]
    summarize: Callable[[dict[str, Any]], dict[str, Any]]
    rows: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self.rows = json.loads(self.path.read_text())["rows"]

    def find_differences(self, row: Row) -> list[str] | None:
        """Return in what a row differs from the one that was measured; None if it never was.

        A row that ran out of memory or time was measured too.
        """
        if row.name not in self.rows:
            return None
        found, key = self.rows[row.name]["key"], self._make_key(row)
        return [name for name in key if found.get(name) != key[name]]

    def is_measured(self, row: Row) -> bool:
        return self.find_differences(row) == []

    def expect_s(self, row: Row) -> float:
        """Return the seconds that a row takes at most: what it may, or somewhat more than it has taken before."""
        found = self.rows.get(row.name, {})
        return row.most_s if "error" in found else min(row.most_s, _MARGIN * found.get("duration_s", math.inf))

    def put(self, row: Row, found: dict[str, Any], duration_s: float) -> None:
        """Add what was found, in place of what the row was before, and write the file."""
        date = time.strftime("%Y-%m-%d %H:%M:%S")
        about = {"date": date, **self.about, "duration_s": duration_s}
        self.rows[row.name] = {"key": self._make_key(row), **about, **found}
        if self.path is not None:
            write_record(self.make(), self.path)

    def make(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {"benchmark": "gpu", **self.summarize(self.rows), "rows": self.rows}

    def _make_key(self, row: Row) -> dict[str, Any]:
        key = {**self.machine, "settings": row.settings, "code": hash_code(row.is_own)}
        return json.loads(json.dumps(key))  # as it is read back: lists in place of tuples


def hash_code(has_lorashard: bool) -> str:
    """Return a hash of the code that measures, and of lorashard's where it is measured: a state without git has one."""
    paths = [ROOT / "benchmarks" / f"{name}.py" for name in _MEASURING]
    if has_lorashard:
        paths += sorted((ROOT / "lorashard").rglob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def measure_rows(
    rows: Sequence[Row],
    record: Record,
    measure: Callable[[Row, float], dict[str, Any]],
    end_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """Measure the rows that fit in before `end_s`, in order, and return those that did not.

    Args:
        measure: takes a row and the seconds after which it is to be ended.
    """
    left = []
    for row in rows:
        begin_s = clock()
        room_s = end_s - begin_s - GRACE_S
        if record.expect_s(row) > room_s:
            left.append(row)
            continue
        limit_s = min(row.most_s, room_s)
        found = measure(row, limit_s)
        duration_s = clock() - begin_s
        if limit_s < row.most_s and duration_s >= limit_s:  # it was ended before its own time was up
            left.append(row)
        else:
            record.put(row, found, duration_s)
    return left
