"""Which options of a run were chosen, and the title of its tab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..drawing.markup import Markup, note, table
from ..drawing.run_facts import find_percent
from ..drawing.wording import NONE
from ..reading.defaults import find_chosen
from ..reading.places import show_paths
from ..reading.summaries import Summary


def write_title(summary: Summary) -> str:
    """Return the title of the run's tab: how far it is while it trains, else its state, and its name."""
    percent = find_percent(summary)
    word = f"{percent} %" if summary.is_live and percent is not None else summary.state
    return f"{word} {summary.name}"


def draw_chosen(options: Mapping[str, Any]) -> Markup:
    """Return the options that differ from the defaults, with these."""
    if not options:
        return note("The run has no configuration yet.")
    rows = [(name, _show(value), _show(default)) for name, value, default in find_chosen(options)]
    return table(("option", "value", "default"), rows, "Options that differ from the defaults", 3, "cards")


def _show(value: Any) -> str:
    if value is None:
        return NONE
    return str(value).lower() if isinstance(value, bool) else show_paths(str(value))
