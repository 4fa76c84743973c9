"""Numbers and times, formatted for people."""

from __future__ import annotations

import math
import time

from lorashard.runtime import progress

NONE = "\u2013"


def show_number(value: float | None) -> str:
    """Return a number with four significant digits."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.2e}"


def show_count(value: float | None) -> str:
    """Return a whole number with separators."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.0f}"


def show_duration(seconds: float | None) -> str:
    """Return a time span with its two largest units."""
    return NONE if seconds is None or not math.isfinite(seconds) else progress.show_duration(max(0.0, seconds))


def show_time(epoch_s: float | None) -> str:
    """Return a point in time, on the clock of the server."""
    return NONE if epoch_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(epoch_s))


def show_ago(epoch_s: float | None, now_s: float) -> str:
    """Return how long ago something was."""
    return NONE if epoch_s is None else f"{show_duration(now_s - epoch_s)} ago"
