"""Sweeps: many adapters that train together on one base. Each job is a run whose folder lies in the sweep's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorashard.errors import ConfigError
from lorashard.runs.root import SWEEP_NAME, find_place

from .jsonl_tail import read_json
from .sanitize import hide_secrets, show_safely
from .series import to_finite, to_whole
from .summaries import Summary, is_run, summarize

STATES = ("waiting", "running", "done", "stopped", "failed", "halved")
LOSS = "loss"


@dataclass(frozen=True)
class JobRow:
    """A job in one row.

    Attributes:
        name: in its sweep; `run` is that by which it is opened as a run.
        options: those in which it may differ from the other jobs.
        state: waiting, running, stopping, done, stopped, failed, halved or dead.
        metric, value: what jobs are compared by, and its newest.
        why: one sentence of why it ended; empty where there is none.
        summary: of its folder; None where it has none yet, or no longer.
    """

    name: str
    run: str
    options: dict[str, Any]
    state: str
    step: int | None
    max_steps: int | None
    metric: str
    value: float | None
    why: str
    summary: Summary | None

    @property
    def can_stop(self) -> bool:
        return self.state == "running" and self.summary is not None


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder is that of a sweep."""
    return (folder / SWEEP_NAME).is_file()


def list_job_names(folder: Path) -> list[str]:
    """Return the names of a sweep's jobs, in their order; those of folders outside of it are left out."""
    return [entry["name"] for entry in _read_entries(folder)]


def read_jobs(folder: Path, sweep: str, rows: Mapping[str, Summary]) -> list[JobRow]:
    """Return the jobs of a sweep, the best first; none of what is no sweep.

    Args:
        sweep: its name.
        rows: the summaries of those that have a folder, by `SWEEP/JOB`.
    """
    metric = find_metric(folder)
    jobs = [_read_job(entry, sweep, metric, rows) for entry in _read_entries(folder)]
    sign = 1 if is_less_better(metric) else -1
    return sorted(jobs, key=lambda job: (job.value is None, sign * (job.value or 0.0)))


def list_jobs(folder: Path, sweep: str) -> list[JobRow]:
    """Return the jobs of a sweep, the best first, each read anew; none of what is no sweep."""
    names = [name for name in list_job_names(folder) if is_run(folder / name)]
    rows = [summarize(folder / name, name=f"{sweep}/{name}") for name in names]
    return read_jobs(folder, sweep, {row.name: row for row in rows})


def find_best(jobs: Sequence[JobRow]) -> JobRow | None:
    """Return the best of jobs that are sorted; None where none has a value."""
    return jobs[0] if jobs and jobs[0].value is not None else None


def find_metric(folder: Path) -> str:
    """Return what the jobs of a sweep are compared by."""
    return show_safely(str(read_json(folder / SWEEP_NAME).get("metric") or LOSS))


def is_less_better(metric: str) -> bool:
    """Tell whether a smaller value of a metric is the better one, as `SweepStop` does."""
    return metric.endswith(LOSS)


def _read_job(entry: Mapping[str, Any], sweep: str, metric: str, rows: Mapping[str, Summary]) -> JobRow:
    name = entry["name"]
    row = rows.get(f"{sweep}/{name}")
    options = entry.get("options")
    said = to_whole(entry.get("step"))
    return JobRow(
        name=name,
        run=f"{sweep}/{name}",
        options=dict(hide_secrets(options)) if isinstance(options, dict) else {},
        state=_judge(str(entry.get("state")), row),
        step=said if row is None or row.step is None else max(row.step, said or 0),
        max_steps=to_whole(entry.get("max_steps")) or (row.max_steps if row is not None else None),
        metric=metric,
        value=_find_value(entry, metric, row),
        why=show_safely(str(entry.get("why") or "")),
        summary=row,
    )


def _judge(said: str, row: Summary | None) -> str:
    """Return a job's state: that of its folder, which knows whether somebody lives, but for what only a sweep knows."""
    if said not in STATES:
        said = "waiting"
    if row is None or said == "halved" or (said == "waiting" and row.is_live):
        return said
    return "running" if row.state == "starting" and said == "running" else row.state


def _find_value(entry: Mapping[str, Any], metric: str, row: Summary | None) -> float | None:
    live = {"loss": row.loss, "eval_loss": row.eval_loss}.get(metric) if row is not None else None
    value = live if live is not None else to_finite(entry.get("value"))
    return value if value is not None and math.isfinite(value) else None


def _read_entries(folder: Path) -> list[dict[str, Any]]:
    entries = read_json(folder / SWEEP_NAME).get("jobs")
    entries = entries if isinstance(entries, list) else []
    return [one for one in entries if isinstance(one, dict) and _is_inside(folder, one.get("name"))]


def _is_inside(folder: Path, name: Any) -> bool:
    """Tell whether a name is that of a folder in the sweep's."""
    if not isinstance(name, str):
        return False
    try:
        find_place(folder, name)
    except ConfigError:
        return False
    return True
