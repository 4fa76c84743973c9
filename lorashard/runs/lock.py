"""One live run a folder: who owns it, and how another is told so.

The lock is the kernel's (flock), which lets go of it when its owner dies, however it dies. Beside it lies who owns the
folder, for the one that is refused, and for the one that comes after a run that was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any, Literal

import psutil
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from ..errors import ConfigError
from ..runtime.disk import replace_text
from ..runtime.output import warn

_LOCK_NAME = ".lock"
_SOFT_LOCK_NAME = ".lock.soft"
_OWNER_NAME = ".owner.json"
_PATIENCE_S = 1.0  # for one that is just letting go, or is writing down who it is
_WITHOUT_FLOCK = (ENOSYS, ENOLCK, EOPNOTSUPP)
_INTRODUCTION_S = 0.3  # how long one that has just taken the lock may need to write down who it is
_CLOCK_STEP_S = 2.0
_NAMESPACE_MARK = "?pidns-"
_NAMESPACE = "/proc/self/ns/pid"


@dataclass(frozen=True)
class Owner:
    """Who owns a run's folder: the process that started its ranks, alive as far as can be told from here.

    Attributes:
        pid, host, begin_s: None while it has not said who it is.
        is_here: whether `pid` is that process on this machine; only such a process may be sent signals.
    """

    pid: int | None
    host: str | None
    begin_s: float | None
    is_here: bool

    def __str__(self) -> str:
        return _name({"pid": self.pid, "host": self.host, "begin_s": self.begin_s} if self.pid else {})


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Own a run's folder, which is made where it is not there.

    Where the file system has no flock, the lock is a file that names its owner's process and host: of one of this host
    it is seen whether it lives, of one of another host or container it cannot be.

    Raises:
        ConfigError: Another live run owns it, or it cannot be written to.
    """
    is_new = not folder.is_dir()
    owner = folder / _OWNER_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder)
    except OSError as error:
        raise ConfigError("it cannot be locked", option="output_dir", found=error.strerror, where=folder) from error
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


def find_owner(folder: Path) -> Owner | None:
    """Return who owns a run's folder; None where nobody lives, whatever has been left there.

    On a file system without flock an owner of another machine counts as alive, for it cannot be known.
    """
    deadline_s = time.monotonic() + _INTRODUCTION_S
    while True:
        said = _read_owner(folder / _OWNER_NAME)
        is_held = _is_held(folder / _LOCK_NAME)
        if is_held is None:
            is_held = _locate_soft_owner(folder / _SOFT_LOCK_NAME) != "nobody"
        if not is_held:
            return None
        owner = _identify(said)
        is_known = owner.is_here or owner.host not in (None, platform.node())
        if is_known or time.monotonic() > deadline_s:
            return owner
        time.sleep(_INTRODUCTION_S / 10)


def _is_held(lock: Path) -> bool | None:
    """Tell whether a process has the lock; None where the file system has no flock.

    The lock is taken to see, for some microseconds and shared, so that lookers do not see one another: a run that
    starts meanwhile is patient enough (`_PATIENCE_S`).
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # without flock there is no such file either
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None if lock.with_name(_SOFT_LOCK_NAME).exists() else False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _locate_soft_owner(lock: Path) -> Literal["nobody", "here", "elsewhere"]:
    """Tell where the process lives that has a lock that is a file; of one elsewhere it cannot be known whether it does.

    Its lines are a process id and a host, to which filelock adds the PID namespace, such as a container's, outside of
    which the id means nothing.
    """
    try:
        pid, host = lock.read_text(encoding="utf-8").split()[:2]
        name, _, namespace = host.partition(_NAMESPACE_MARK)
        is_here = name == platform.node() and (not namespace or int(namespace, 16) == os.stat(_NAMESPACE).st_ino)
        if not is_here:
            return "elsewhere"
        return "nobody" if find_process(int(pid), time.time()) is None else "here"
    except (OSError, ValueError):
        return "nobody"


def _identify(said: dict[str, Any]) -> Owner:
    """Return the owner of a lock that is held, by what was written beside it, which an owner before may have left."""
    if not {"pid", "host", "begin_s"} <= said.keys():
        return Owner(None, None, None, is_here=False)
    is_here = said["host"] == platform.node() and find_process(int(said["pid"]), said["begin_s"]) is not None
    return Owner(int(said["pid"]), said["host"], said["begin_s"], is_here)


def find_process(pid: int, at_s: float) -> psutil.Process | None:
    """Return a process that lives and was there at a time: another that has its number now began later.

    One that has ended is still listed, as a zombie, until its parent asks for its exit code; process 1, which inherits
    it, may never do so in a container.
    """
    try:
        process = psutil.Process(pid)
        is_same = process.create_time() <= at_s + _CLOCK_STEP_S
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


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
        found = f"another run that is alive ({_name(owner)})"
        fix = "wait until it has ended, stop it, or choose another folder"
        if isinstance(lock, SoftFileLock) and _locate_soft_owner(Path(lock.lock_file)) != "here":
            found = f"another run ({_name(owner)})"
            fix = (
                "this file system has no flock, so whether a process of another machine or container lives cannot be "
                f"known here: if it does not, delete {lock.lock_file}"
            )
        raise ConfigError(
            option="output_dir", expected="a folder that no run owns", found=found, where=folder, fix=fix
        ) from None
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
