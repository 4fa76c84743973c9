"""What is printed of runs. Texts of a run are shown without the control characters that a terminal would obey."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..drawing.job_cells import NUM_JOB_TEXT, list_job_headers, write_job
from ..drawing.rank_cells import RANK_HEADERS, write_rank
from ..drawing.run_facts import list_facts, list_figures
from ..drawing.wording import NONE, show_count, show_duration, show_number, show_time
from ..reading.alert import Alert
from ..reading.eta import Progress
from ..reading.places import show_paths
from ..reading.ranks import RankRow
from ..reading.sanitize import show_safely
from ..reading.summaries import Summary
from ..reading.sweeps import JobRow

_STYLES = {
    "done": "green",
    "failed": "bold red",
    "dead": "yellow",
    "stopped": "dim",
    "queued": "dim",
    "waiting": "dim",
    "halved": "dim",
}
_NOTE_STYLES = {"error": "red", "warning": "yellow"}
_RUN_HEADERS = ("name", "state", "progress", "loss", "tokens/s", "duration")
_MORE_HEADERS = ("model", "dataset", "eval loss", "started", "ranks")  # where the terminal is wide
_WIDE_RANK_HEADERS = ("planned", "utilization", "temperature", "last update")
_WIDE_COLUMNS = 120
_BAR_COLUMNS = 60


@dataclass(frozen=True)
class View:
    """How a run is at a moment."""

    summary: Summary
    progress: Progress
    ranks: Sequence[RankRow]
    alerts: Sequence[Alert]
    placement: str
    num_tokens: float | None
    jobs: Sequence[JobRow] = ()


def draw_runs(summaries: Sequence[Summary], num_columns: int) -> Table:
    """Return the table of runs, with each job indented below its sweep.

    The less important columns are left out of a narrow terminal.
    """
    headers = _RUN_HEADERS + (_MORE_HEADERS if num_columns >= _WIDE_COLUMNS else ())
    table = Table(box=None, pad_edge=False)
    for header in headers:
        is_text = header in ("name", "state", "model", "dataset")
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    for row in summaries:
        cells = {
            "name": f"  {row.name.partition('/')[2]}" if "/" in row.name else row.name,
            "state": row.state,
            "progress": _show_step(row, " / ")
            + (f", {show_duration(row.eta_s)} left" if row.eta_s is not None else ""),
            "loss": show_number(row.loss),
            "tokens/s": show_count(row.tokens_per_s),
            "duration": show_duration(row.duration_s),
            "model": PurePath(row.model or NONE).name,
            "dataset": PurePath(row.dataset or NONE).name,
            "eval loss": show_number(row.eval_loss),
            "started": show_time(row.begin_s),
            "ranks": show_count(row.num_ranks),
        }
        styles = {"state": _find_style(row.state)}
        table.add_row(*(_safe(cells[header], styles.get(header, "")) for header in headers))
    return table


def draw_jobs(jobs: Sequence[JobRow], num_columns: int) -> Table:
    """Return the table of a sweep's jobs; what differs is left out of a narrow terminal, as names tell it too."""
    table = Table(box=None, pad_edge=False)
    headers = list_job_headers(jobs)
    for number, header in enumerate(headers):
        is_text = number < NUM_JOB_TEXT
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    for job in jobs:
        cells = [_safe(cell) for cell in write_job(job)]
        cells[1] = _safe(job.state, _find_style(job.state))
        table.add_row(*cells)
    if num_columns < _WIDE_COLUMNS:
        del table.columns[2]
    return table


def draw_run(view: View, num_columns: int) -> RenderableType:
    """Return all that is shown of one run; the less important columns are left out of a narrow terminal."""
    row, progress = view.summary, view.progress
    title = Text.assemble(_safe(row.name, "bold"), "  ", _safe(row.state, _find_style(row.state)))
    facts = Table.grid(padding=(0, 2))
    for name, value in list_facts(row, view.placement):
        facts.add_row(Text(name, "dim"), _safe(value))
    for name, value, more in list_figures(row, progress, view.ranks, view.num_tokens):
        facts.add_row(Text(name, "dim"), _safe(f"{value}  ({more})" if more else value))
    parts: list[RenderableType] = [title, facts, Text()]
    if progress.fraction is not None:
        width = min(_BAR_COLUMNS, num_columns)
        parts += [ProgressBar(total=1.0, completed=progress.fraction, width=width), Text()]  # which ends the bar's line
    parts.append(_safe(progress.sentence))
    parts += [_draw_alert(alert) for alert in view.alerts]
    if view.jobs:
        parts += [Text(), draw_jobs(view.jobs, num_columns)]
    if view.ranks:
        parts += [Text(), _draw_ranks(view.ranks, row.is_live, num_columns)]
    return Group(*parts)


def write_line(view: View) -> str:
    """Return how a run is in one line, for a terminal that cannot draw over what it has printed."""
    loss = "" if view.summary.loss is None else f", loss {show_number(view.summary.loss)}"
    return show_safely(f"{view.summary.state}: {view.progress.sentence}{loss}")


def _draw_ranks(rows: Sequence[RankRow], is_live: bool, num_columns: int) -> Table:
    left_out = () if num_columns >= _WIDE_COLUMNS else _WIDE_RANK_HEADERS
    table = Table(box=None, pad_edge=False)
    for header in (header for header in RANK_HEADERS if header not in left_out):
        table.add_column(header, justify="left" if header in ("rank", "state") else "right", no_wrap=True)
    for row in rows:
        cells = zip(RANK_HEADERS, write_rank(row, time.time(), is_live), strict=True)
        table.add_row(*(_safe(cell) for header, cell in cells if header not in left_out))
    return table


def _draw_alert(alert: Alert) -> Text:
    where = [f"rank {alert.rank}" if alert.rank is not None else "", f"step {alert.step}" if alert.step else ""]
    place = ", ".join(word for word in where if word and word not in alert.sentence)
    sentence = show_paths(alert.sentence)
    return _safe(f"{place}: {sentence}" if place else sentence, _NOTE_STYLES.get(alert.severity, ""))


def _show_step(row: Summary, between: str) -> str:
    return show_count(row.step) + (f"{between}{show_count(row.max_steps)}" if row.max_steps else "")


def _find_style(state: str) -> str:
    return _STYLES.get(state, "bold blue")


def _safe(text: Any, style: str = "") -> Text:
    return Text(show_safely(str(text)), style)
