"""The options of `lorashard runs` and `lorashard watch`."""

from __future__ import annotations

from lorashard.config.use_options import CommandWords


class RunsOptions(CommandWords):
    """`lorashard runs`."""

    root: str = "runs"
    """The folder of the runs."""
    as_json: bool = False
    """Print JSON: a list with the fields of the web UI's endpoint `/list_runs`."""


class WatchOptions(CommandWords):
    """`lorashard watch RUN`."""

    positionals = ("run",)
    num_required = 1

    run: str
    """The name of a run in `root`, or a run's folder."""
    root: str = "runs"
    """The folder of the runs."""
    once: bool = False
    """Print how it is now, and end."""
    as_json: bool = False
    """Print JSON, a line for each change: the fields of the web UI's endpoint `/list_runs`, with `progress`, `ranks`
    and `alerts`."""
