"""sweep.json: the jobs of a sweep and how far each is, for whoever looks at its folder. Imports no torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..config.run_config import RunConfig
from ..config.sweep import Job, SweepStop, check_datasets, read_jobs
from ..runtime.disk import replace_text
from .root import SWEEP_NAME

JobState = Literal["waiting", "running", "done", "stopped", "failed", "halved"]
_INTERVAL_S = 1.0  # between two writes for progress alone


def select_jobs(config: RunConfig) -> tuple[Job, ...]:
    """Return the jobs of a sweep that are to be trained; none where the run is no sweep.

    A sweep that is resumed leaves out the jobs that an earlier start has given up, and those that have come to their
    end, unless all have.

    Raises:
        ConfigError: as `read_jobs`; or a job has no dataset.
    """
    jobs = read_jobs(config)
    check_datasets(jobs)
    if not config.resume_from_checkpoint:
        return jobs
    rows = {row["name"]: row for row in _read_rows(Path(config.output_dir))}
    running = tuple(job for job in jobs if "halved_at" not in rows.get(job.name, {}))
    max_steps = config.trainer.get("max_steps", -1)
    ended = {name for name, row in rows.items() if row["state"] == "done" and max_steps in (-1, row["max_steps"])}
    return tuple(job for job in running if job.name not in ended) or running


class SweepFile:
    """Keeps sweep.json, with one line for each job.

    Ranks: local; one writes into each folder.
    """

    def __init__(self, folder: Path, jobs: Sequence[Job], stop: SweepStop | None, writes: bool, resumes: bool) -> None:
        """Take the jobs.

        Args:
            stop: by whose metric the jobs are compared; None: by the loss of evaluations.
            writes: whether this process writes the file.
            resumes: whether what an earlier start has written of other jobs stays.
        """
        self._path = folder / SWEEP_NAME
        self._metric = stop.metric if stop is not None else "eval_loss"
        self._writes = writes
        self._next_s = -math.inf
        names = {job.name for job in jobs}
        self._rows: dict[str, dict[str, Any]] = {
            row["name"]: _complete(row) for row in _read_rows(folder) if resumes and row["name"] not in names
        }
        for job in jobs:
            self._rows[job.name] = {
                "name": job.name, "options": job.options, "state": "waiting", "step": 0, "max_steps": None,
                "value": None, "why": "",
            }  # fmt: skip
        self._write()

    @property
    def decided_step(self) -> int:
        """The last step whose evaluations have given jobs up in an earlier start, or 0."""
        return max((row.get("halved_at", 0) for row in self._rows.values()), default=0)

    def enter(self, name: str, state: JobState, why: str = "") -> None:
        """Say what has become of a job, and why it ended early."""
        self._rows[name] |= {"state": state, "why": why}
        self._write()

    def give_up(self, losers: Mapping[str, int]) -> None:
        """Say which jobs halving gives up, each by the evaluation of a step: all at once, before they end."""
        for name, step in losers.items():
            self._rows[name]["halved_at"] = step
        if losers:
            self._write()

    def is_alive(self, name: str) -> bool:
        """Tell whether a job has not ended."""
        return self._rows[name]["state"] in ("waiting", "running")

    def note(self, name: str, step: int, max_steps: int, logs: Mapping[str, Any]) -> None:
        """Say how far a job is, and what it has logged; written once a second at most."""
        self._rows[name] |= {"step": step, "max_steps": max_steps}
        if (value := logs.get(self._metric)) is not None:
            self._rows[name]["value"] = value if math.isfinite(value) else None
        if time.monotonic() >= self._next_s:
            self._write()

    def _write(self) -> None:
        if not self._writes:
            return
        self._next_s = time.monotonic() + _INTERVAL_S
        lines = ",\n".join(json.dumps(row, default=str) for row in self._rows.values())
        replace_text(self._path, f'{{"metric": {json.dumps(self._metric)}, "jobs": [\n{lines}\n]}}\n')


def explain_halving(step: int) -> str:
    """Return why a job ended that halving has given up."""
    return f"given up after the evaluation at step {step}"


def _complete(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a job from an earlier start, which may have been killed before a loser had ended."""
    if "halved_at" not in row or row["state"] == "done":
        return row
    return row | {"state": "halved", "why": explain_halving(row["halved_at"])}


def _read_rows(folder: Path) -> list[dict[str, Any]]:
    try:
        return json.loads((folder / SWEEP_NAME).read_text(encoding="utf-8"))["jobs"]
    except FileNotFoundError:
        return []
