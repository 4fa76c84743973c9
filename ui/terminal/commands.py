"""`lorashard runs` and `lorashard watch`."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from lorashard.errors import ConfigError
from lorashard.runs.root import is_job
from lorashard.runtime.signals import STOPPED_EXIT_CODE

from ..drawing.run_facts import describe_placement
from ..reading.places import write_path
from ..reading.runs import RunReader, Runs
from ..reading.summaries import is_run
from ..reading.sweeps import list_jobs
from .options import RunsOptions, WatchOptions
from .tables import View, draw_run, draw_runs, write_line

_REFRESH_S = 1.0
_PIPE_COLUMNS = 1000  # what is written to a file is not cut
_EXIT_CODES = {"done": 0, "stopped": STOPPED_EXIT_CODE}


def list_runs(options: RunsOptions) -> int:
    """Print the runs of a folder, the newest first; return the exit code.

    Raises:
        ConfigError: there is no such folder.
    """
    summaries = Runs(_find_root(options.root)).list_with_jobs()
    if options.as_json:
        print(json.dumps([_to_json(asdict(row)) for row in summaries], indent=1))
    elif summaries:
        console = _make_console()
        console.print(draw_runs(summaries, console.width))
    else:
        print(f"No runs yet. Runs started with --output_dir {write_path(options.root)}/NAME appear here.")
    return 0


def watch(options: WatchOptions) -> int:
    """Show a run until it has ended, or once; return 0 if it is done, or is asked for once, 75 if it stopped, else 1.

    Raises:
        ConfigError: there is no such run, or it has been deleted.
    """
    views = _follow(_open_run(options), options.once)
    console = _make_console()
    if options.as_json:
        state = _print_changes(views, lambda view: json.dumps(_to_json(asdict(view.summary) | _rest_of(view))))
    elif options.once or not console.is_terminal or console.is_dumb_terminal:
        state = _print_plainly(views, console, options.once)
    else:
        state = "starting"
        with Live(console=console, auto_refresh=False) as live:
            for view in views:
                live.update(draw_run(view, console.width), refresh=True)
                state = view.summary.state
    return 0 if options.once else _EXIT_CODES.get(state, 1)


def _follow(run: RunReader, is_once: bool) -> Iterator[View]:
    """Yield how a run is, again and again until it has ended."""
    while True:
        if not is_run(run.folder):
            raise ConfigError(f"the run {run.name!r} has been deleted")
        placement = describe_placement(run.plan(), run.options())
        jobs = list_jobs(run.folder, run.name)
        view = View(run.summary(), run.progress(), run.ranks(), run.alerts(), placement, run.num_tokens(), jobs)
        yield view
        if is_once or not view.summary.is_live:
            return
        time.sleep(_REFRESH_S)


def _print_changes(views: Iterator[View], write: Callable[[View], str]) -> str:
    last, state = "", ""
    for view in views:
        line, state = write(view), view.summary.state
        if line != last:
            print(line, flush=True)
        last = line
    return state


def _print_plainly(views: Iterator[View], console: Console, is_once: bool) -> str:
    """Print a line for each change, and in the end the whole."""
    last: list[View] = []

    def write(view: View) -> str:
        last[:] = [view]
        return write_line(view)

    if is_once:
        write(next(views))
    else:
        _print_changes(views, write)
    console.print(draw_run(last[0], console.width))
    return last[0].summary.state


def _open_run(options: WatchOptions) -> RunReader:
    places = (Path(options.root).expanduser() / options.run, Path(options.run).expanduser())
    folder = next((place for place in places if is_run(place)), None)
    if folder is None:
        raise ConfigError(
            f"there is no run {options.run!r}",
            where=options.root,
            fix=f"lorashard runs --root {options.root} lists them",
        )
    folder = folder.resolve()
    return RunReader(folder, f"{folder.parent.name}/{folder.name}" if is_job(folder) else "")


def _find_root(name: str) -> Path:
    root = Path(name).expanduser()
    if not root.is_dir():
        raise ConfigError(option="root", expected="a folder of runs", found=name)
    return root.resolve()


def _make_console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals have no UTF-8
    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)


def _rest_of(view: View) -> dict[str, Any]:
    ranks = [asdict(row) for row in view.ranks]
    return {"progress": asdict(view.progress), "ranks": ranks, "alerts": [asdict(alert) for alert in view.alerts]} | (
        {"jobs": [asdict(job) for job in view.jobs]} if view.jobs else {}
    )


def _to_json(value: Any) -> Any:
    """Return a value with null for the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _to_json(inner) for key, inner in value.items()}
    return [_to_json(inner) for inner in value] if isinstance(value, list | tuple) else value
