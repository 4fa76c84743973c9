"""What a run is told by, on its page and in a terminal: its large figures, and what it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lorashard.runtime.disk import show_bytes

from ..reading.eta import Progress
from ..reading.places import show_paths
from ..reading.ranks import RankRow
from ..reading.summaries import Summary
from .wording import NONE, show_count, show_duration, show_number, show_time


def find_percent(summary: Summary) -> int | None:
    """Return the share of the steps that are done, rounded down; None where it is not known."""
    if summary.step is None or not summary.max_steps:
        return None
    return min(100, 100 * summary.step // summary.max_steps)


def list_figures(
    summary: Summary, progress: Progress, ranks: Sequence[RankRow], num_tokens: float | None
) -> list[tuple[str, str, str]]:
    """Return loss, step, time, speed and memory, each by its name, its value and a note.

    Args:
        num_tokens: trained on so far, over all resumes.
    """
    percent = find_percent(summary)
    step = f"{show_count(summary.step)} of {show_count(summary.max_steps)}" if summary.max_steps else NONE
    return [
        ("loss", show_number(summary.loss), _name("evaluation", show_number(summary.eval_loss))),
        ("step", step, "" if percent is None else f"{percent} %"),
        _find_time(summary, progress),
        ("tokens/s", show_count(summary.tokens_per_s), _name("tokens so far", show_count(num_tokens))),
        _find_memory(ranks),
    ]


def list_facts(summary: Summary, placement: str = "") -> list[tuple[str, str]]:
    """Return what the run was given, each by its name and its value.

    Args:
        placement: that was taken.
    """
    pairs = [
        ("model", show_paths(summary.model or NONE)),
        ("dataset", show_paths(summary.dataset or NONE)),
        ("method", summary.method or NONE),
        ("quantization", summary.quantization),
        ("ranks", show_count(summary.num_ranks)),
        ("placement", placement),
        ("started", show_time(summary.begin_s)),
    ]
    return [(name, value) for name, value in pairs if value]


def _name(name: str, shown: str) -> str:
    return "" if shown == NONE else f"{name} {shown}"


def _find_time(summary: Summary, progress: Progress) -> tuple[str, str, str]:
    if summary.is_live:
        of_what = "" if progress.phase == "train" or progress.eta_s is None else f"of phase {progress.phase}"
        return "time left", show_duration(progress.eta_s), of_what
    is_known = summary.begin_s is not None and summary.update_s is not None
    lasted_s = summary.update_s - summary.begin_s if is_known else None  # type: ignore[operator]
    return "time taken", show_duration(lasted_s), "since it was started last" if is_known else ""


def _find_memory(ranks: Sequence[RankRow]) -> tuple[str, str, str]:
    """Return the most that a rank has held, against its plan."""
    name = "peak memory, fullest rank"
    known = [(row.peak_bytes, row) for row in ranks if row.peak_bytes is not None]
    if not known:
        return name, NONE, ""
    peak_bytes, row = max(known, key=lambda pair: pair[0])
    words = [f"rank {row.rank}"]
    if row.planned_bytes and row.cpu_percent is not None:  # of a process, whose libraries no plan counts
        words.append(f"with libraries; planned without {show_bytes(row.planned_bytes)}")
    elif row.planned_bytes:
        words.append(f"{peak_bytes / row.planned_bytes:.0%} of the planned {show_bytes(row.planned_bytes)}")
    return name, show_bytes(peak_bytes), ", ".join(words)


def describe_placement(plan: Mapping[str, Any] | None, options: Mapping[str, Any]) -> str:
    """Return the placement that was taken, with what else was decided; before that, what was asked for."""
    try:
        assert plan is not None
        taken = dict(plan["rows"][plan["chosen"]]["placement"])
    except (AssertionError, KeyError, TypeError, IndexError, ValueError):
        return str(options.get("placement") or NONE)
    words = [str(taken.get("placement"))]
    if taken.get("resident_layers"):
        words.append(f"resident_layers {taken['resident_layers']}")
    if taken.get("group_size"):
        words.append(f"sharded over {taken['group_size']}")
    if options.get("placement") in (None, "auto"):
        words.append("chosen by the plan")
    return ", ".join(words)
