"""The files of processes that `running.detached` started, and which processes of a run are suspended.

A process is identified by its PID and its start time, so that a reused PID is not mistaken for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lorashard.runs.lock import Owner, find_process

from .jsonl_tail import read_json
from .series import to_finite

PROCESS_NAME = ".launcher.json"  # in a run's folder


@dataclass(frozen=True)
class Launch:
    """A process that was started, from its file.

    Attributes:
        begin_s: when it was started; 0 if nothing was.
        process: the process while it is alive.
        is_over: whether it has ended and its exit code is written, if it ever will be.
    """

    begin_s: float
    process: psutil.Process | None
    is_over: bool


def read_launch(process_file: Path, exit_file: Path) -> Launch:
    """Return the process that was started last, from the files that `running.detached` writes."""
    said = read_json(process_file)
    begin_s = to_finite(said.get("begin_s")) or 0.0
    process = _find_process(said.get("pid"), begin_s)
    is_over = process is None and (exit_file.exists() or _find_process(said.get("waiter_pid"), begin_s) is None)
    return Launch(begin_s, process, is_over)


def _find_process(pid: Any, begin_s: float) -> psutil.Process | None:
    try:
        return find_process(int(pid), begin_s)
    except (TypeError, ValueError, OverflowError):  # a damaged file
        return None


def find_stopped(owner: Owner | None) -> list[int]:
    """Return the PIDs of the run's processes on this machine that a signal or a debugger has suspended."""
    if owner is None or owner.pid is None or not owner.is_here:
        return []
    try:
        launcher = psutil.Process(owner.pid)
        return [one.pid for one in [launcher, *launcher.children(recursive=True)] if _is_stopped(one)]
    except psutil.Error:
        return []


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
