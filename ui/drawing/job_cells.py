"""The jobs of a sweep in words, for pages and terminals."""

from __future__ import annotations

from collections.abc import Sequence

from ..reading.comparing import show_option
from ..reading.sweeps import JobRow
from .wording import NONE, show_count, show_number

NUM_JOB_TEXT = 3  # columns of text, before those of numbers
_HEADERS = ("job", "state", "what differs", "step", "loss", "eval loss", "learning rate")
_LOSSES = ("loss", "eval_loss")  # which have columns of their own


def list_job_headers(jobs: Sequence[JobRow]) -> tuple[str, ...]:
    """Return the headers of a table of jobs; what they are compared by has a column, where it is no loss."""
    metric = jobs[0].metric if jobs else _LOSSES[0]
    return _HEADERS if metric in _LOSSES else (*_HEADERS, metric.replace("_", " "))


def write_job(job: JobRow) -> tuple[str, ...]:
    """Return a job's cells under `list_job_headers`."""
    row = job.summary
    step = show_count(job.step) + (f" / {show_count(job.max_steps)}" if job.max_steps and job.step is not None else "")
    live = (None, None, None) if row is None else (row.loss, row.eval_loss, row.learning_rate)
    losses = [job.value if job.metric == name else loss for name, loss in zip(_LOSSES, live[:2], strict=True)]
    rate = show_number(live[2])
    cells = (job.name, job.state, write_options(job), step, *map(show_number, losses), rate)
    return cells if job.metric in _LOSSES else (*cells, show_number(job.value))


def write_options(job: JobRow) -> str:
    """Return in which options a job may differ from the others."""
    return ", ".join(f"{name} {show_option(value)}" for name, value in job.options.items()) or NONE
