"""One live run a folder: who owns it, and how another is told so.

The lock is the kernel's (flock), which lets go of it when its owner dies, however it dies. Beside it lies who owns the
folder, for the one that is refused, and for the one that comes after a run that was killed.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from .disk import replace_text
from .errors import ConfigError
from .output import warn

_LOCK_NAME = ".lock"
_SOFT_LOCK_NAME = ".lock.soft"
_OWNER_NAME = ".owner.json"
_PATIENCE_S = 1.0  # for one that is just letting go, or is writing down who it is
_WITHOUT_FLOCK = (ENOSYS, ENOLCK, EOPNOTSUPP)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Own a run's folder, which is made where it is not there.

    Where the file system has no flock, the lock is a file that names its owner's process and host: of one of this host
    it is seen whether it lives, of one of another host it cannot be.

    Raises:
        ConfigError: Another live run owns it, or it cannot be written to.
    """
    is_new = not folder.is_dir()
    owner = folder / _OWNER_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be locked: {error.strerror}") from error
    try:
        left = _read_owner(owner)
        if left:
            warn(f"{folder} was left behind by a run that was killed ({_name(left)}): its lock is taken over")
        _write_owner(owner)
        yield
    finally:
        owner.unlink(missing_ok=True)
        if is_new and os.listdir(folder) == [_LOCK_NAME]:  # nothing came of it
            (folder / _LOCK_NAME).unlink()
            folder.rmdir()
        lock.release()


def _take(folder: Path) -> BaseFileLock:
    lock: BaseFileLock = FileLock(folder / _LOCK_NAME, timeout=_PATIENCE_S, fallback_to_soft=False)
    try:
        return _acquire(lock, folder)
    except OSError as error:
        if error.errno not in _WITHOUT_FLOCK:
            raise
    return _acquire(SoftFileLock(folder / _SOFT_LOCK_NAME, timeout=_PATIENCE_S), folder)


def _acquire(lock: BaseFileLock, folder: Path) -> BaseFileLock:
    try:
        lock.acquire()
    except Timeout:  # not of its own: the error that it was is of no use to the person
        owner = _read_owner(folder / _OWNER_NAME)
        message = f"output_dir {folder} is owned by another run that is alive ({_name(owner)})"
        advice = "wait until it has ended, stop it, or choose another folder"
        if isinstance(lock, SoftFileLock) and owner.get("host") != platform.node():
            message = f"output_dir {folder} is owned by another run ({_name(owner)})"
            advice = (
                "this file system has no flock, so whether that process of another machine lives cannot be known "
                f"here: if it does not, delete {lock.lock_file}"
            )
        raise ConfigError(f"{message}: {advice}") from None
    return lock


def _read_owner(path: Path) -> dict[str, Any]:
    """Return who is said to own the folder; nothing where that is not said, or was only half written."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write_owner(path: Path) -> None:
    replace_text(path, json.dumps({"pid": os.getpid(), "host": platform.node(), "begin_s": time.time()}))


def _name(owner: dict[str, Any]) -> str:
    if not {"pid", "host", "begin_s"} <= owner.keys():
        return "which has not said who it is"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["begin_s"]))
    return f"process {owner['pid']} on {owner['host']}, since {since}"
