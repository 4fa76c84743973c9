"""Folders that are derived from models, made once on a machine, and whole or not there."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
from filelock import FileLock

_LOOK_S = 0.2


def make_once(
    folder: Path,
    check_room: Callable[[int], None],
    fill: Callable[[Path], None],
    look: Callable[[list[Path]], None] = lambda partials: None,
) -> None:
    """Make a folder if it is not there.

    The first of the processes on a machine makes it, the others wait.

    Args:
        check_room: called with the free bytes before anything is written; raises if they are too few.
        fill: writes the content into a partial folder, which is renamed when it is complete.
        look: called repeatedly with the partial folders while another process fills one.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)

    def look_on() -> bool:
        look(list(folder.parent.glob(f"{folder.name}.partial-*")))
        return False  # and wait on

    with FileLock(folder.with_suffix(".lock")).acquire(poll_interval=_LOOK_S, cancel_check=look_on):
        if folder.is_dir():
            return
        _remove_left_over(folder)
        check_room(shutil.disk_usage(folder.parent).free)
        # A name of its own: file locks do not reach other machines on every network file system.
        partial = folder.with_name(f"{folder.name}.partial-{socket.gethostname()}-{os.getpid()}")
        try:
            partial.mkdir()
            fill(partial)
            if not folder.is_dir():
                os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _remove_left_over(folder: Path) -> None:
    """Remove what processes of this machine left that were killed while they made it."""
    for partial in folder.parent.glob(f"{folder.name}.partial-{socket.gethostname()}-*"):
        if not psutil.pid_exists(int(partial.name.rpartition("-")[2])):
            shutil.rmtree(partial)
