"""A rank in a row of a table, in the browser and in a terminal."""

from __future__ import annotations

from lorashard.runtime.disk import show_bytes

from ..reading.ranks import RankRow
from .wording import NONE, show_ago, show_count, show_duration, show_time

RANK_HEADERS = (
    "rank",
    "state",
    "memory now",
    "peak",
    "planned",
    "gather wait",
    "utilization",
    "temperature",
    "step",
    "last update",
)


def write_rank(row: RankRow, now_s: float, is_live: bool) -> tuple[str, ...]:
    """Return the cells of a rank, one for each of `RANK_HEADERS`."""
    return (
        str(row.rank),
        row.state,
        _show_bytes(row.memory_bytes),
        _show_peak(row),
        _show_bytes(row.planned_bytes),
        _show_wait(row),
        _show_use(row),
        NONE if row.temperature_c is None else f"{row.temperature_c:.0f} \u00b0C",
        show_count(row.step),
        show_ago(row.update_s, now_s) if is_live else show_time(row.update_s),
    )


def _show_bytes(num_bytes: float | None) -> str:
    return NONE if num_bytes is None else show_bytes(int(num_bytes))


def _show_peak(row: RankRow) -> str:
    is_on_cpu = row.cpu_percent is not None  # then it is the process's, with all libraries, which no plan counts
    if row.peak_bytes is None or not row.planned_bytes or is_on_cpu:
        return _show_bytes(row.peak_bytes)
    return f"{show_bytes(int(row.peak_bytes))} ({row.peak_bytes / row.planned_bytes:.0%} of plan)"


def _show_use(row: RankRow) -> str:
    percent = row.cpu_percent if row.utilization_percent is None else row.utilization_percent
    return NONE if percent is None else f"{percent:.0f} %"


def _show_wait(row: RankRow) -> str:
    if row.wait_s is None:
        return NONE
    share = "" if row.wait_share is None else f" ({row.wait_share:.0%} recently)"
    return f"{show_duration(row.wait_s)}{share}"
