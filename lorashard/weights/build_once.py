"""Folders that are derived from models: made once on a machine, and complete or not there."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from ..runtime.atomic_folder import fill_atomically, list_partials, remove_abandoned

_LOOK_S = 0.2


def make_once(
    folder: Path,
    check_room: Callable[[int], None],
    fill: Callable[[Path], None],
    look: Callable[[list[Path]], None] = lambda partials: None,
) -> None:
    """Create a folder if it does not exist; the first process on a machine fills it, the others wait.

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
        look(list_partials(folder))
        return False  # keep waiting

    with FileLock(folder.with_suffix(".lock")).acquire(poll_interval=_LOOK_S, cancel_check=look_on):
        if folder.is_dir():
            return
        remove_abandoned(folder)
        check_room(shutil.disk_usage(folder.parent).free)
        try:
            with fill_atomically(folder) as partial:
                fill(partial)
        except OSError as error:
            # Another machine was faster: file locks do not reach it on every network file system.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not folder.is_dir():
                raise
