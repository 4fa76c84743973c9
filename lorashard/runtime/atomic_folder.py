"""A folder that appears under its name when all of it is on the disk, or not at all.

It is filled under a hidden name on the same disk, and renamed when it is complete. The hidden name carries the host and
the process, so that what a killed process has left can be told from what another one is writing.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from .disk import sync


@contextmanager
def fill_atomically(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `folder` if the block ends well; if not, nothing is left.

    Raises:
        OSError: it cannot be written, or `folder` is there already and not empty.
    """
    remove_abandoned(folder)
    partial = name_partial(folder)
    try:
        make_empty(partial)
        yield partial
        publish_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def make_empty(partial: Path) -> None:
    """Make a folder that this process alone fills; a killed one may have had its number, as in a restarted container.

    Raises:
        OSError: it cannot be made.
    """
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def name_partial(folder: Path) -> Path:
    """Return where this process fills `folder`: beside it, or in the nearest folder above it that exists."""
    return _find_place(folder) / f"{_prefix(folder)}{socket.gethostname()}-{os.getpid()}"


def list_partials(folder: Path) -> list[Path]:
    """Return where processes of any machine fill `folder`, or did until they were killed."""
    return [path for path in _find_place(folder).iterdir() if path.name.startswith(_prefix(folder))]


def remove_abandoned(folder: Path) -> None:
    """Remove what processes of this machine that are no longer running have left of `folder`."""
    prefix = f"{_prefix(folder)}{socket.gethostname()}-"
    for partial in list_partials(folder):
        pid = partial.name.removeprefix(prefix)
        if partial.name != pid and pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(partial)


def publish_folder(partial: Path, folder: Path, displace: Callable[[Path], object] | None = None) -> None:
    """Give a complete folder its name, after all that is in it is on the disk.

    Args:
        displace: moves away a folder that has the name already; called at the last moment.

    Raises:
        OSError: it is not on the disk, or `folder` is there already and not empty.
    """
    for path in (*partial.rglob("*"), partial):
        sync(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if displace is not None and folder.exists():
        displace(folder)
    os.rename(partial, folder)
    sync(folder.parent)


def _find_place(folder: Path) -> Path:
    return next(parent for parent in folder.absolute().parents if parent.is_dir())


def _prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
