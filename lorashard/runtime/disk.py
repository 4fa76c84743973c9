"""A run's small files, which outlive a full disk: what cannot be written waits, and is written when there is room."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

# What a disk answers that is full, over a quota or a limit, read-only, gone or broken.
FAULTS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV)
)
_CHUNK_BYTES = 65536


class Emit(Protocol):
    """Records an event and its fields; `runs.events.EventLog.emit` writes it down."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class PatientFiles:
    """Writes lines and whole small files; nothing that a disk refuses reaches the caller.

    An outage is reported once when it begins (`disk_refused`: path, reason) and once when all that waited is written
    (`disk_accepted`: num_lines, num_lost). Each later call tries again, in order. No file ever keeps half a line, nor
    half of a text.

    Args:
        emit: hears of outages.
        most_lines: how many of a file wait; the oldest are lost first. A line is some hundred bytes.
    """

    def __init__(self, emit: Emit, most_lines: int = 20_000) -> None:
        self._emit = emit
        self._most_lines = most_lines
        self._texts: dict[Path, str] = {}
        self._lines: dict[Path, deque[str]] = {}
        self._num_waiting = 0  # lines that an outage has kept back so far
        self._num_lost = 0
        self._is_out = False
        self._refusal: dict[str, str] | None = None  # that nobody has heard of

    def replace(self, path: Path, text: str) -> None:
        """Make `text` the content of a file; until that is there, the file stays as it is."""
        self._texts[path] = text
        self.flush()

    def append(self, path: Path, line: str) -> None:
        """Add a line to a file."""
        lines = self._lines.setdefault(path, deque())
        lines.append(line)
        if len(lines) > self._most_lines:
            lines.popleft()
            self._num_lost += 1
        self.flush()

    def flush(self) -> None:
        """Try to write what waits."""
        for path in list(self._texts):
            if self._try(path, lambda path=path: replace_text(path, self._texts[path])):  # type: ignore[misc]
                del self._texts[path]
        for path, lines in list(self._lines.items()):
            if self._try(path, lambda path=path, lines=lines: append_lines(path, lines)):  # type: ignore[misc]
                self._num_waiting += len(lines) if self._is_out else 0
                del self._lines[path]
        if self._is_out and not self._texts and not self._lines:
            counts = {"num_lines": self._num_waiting, "num_lost": self._num_lost}
            self._is_out, self._num_waiting, self._num_lost = False, 0, 0
            self._emit("disk_accepted", **counts)
        if self._refusal is not None:  # only now: who hears of it writes to these files too
            refusal, self._refusal = self._refusal, None
            self._emit("disk_refused", **refusal)

    def _try(self, path: Path, write: Callable[[], None]) -> bool:
        try:
            write()
            return True
        except OSError as error:
            if not self._is_out:
                self._is_out = True
                self._refusal = {"path": str(path), "reason": describe_fault(error, path.parent)}
            return False


def replace_text(path: Path, text: str) -> None:
    """Make `text` the content of a file, all of it or nothing.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # it would take what little room there is
        raise


def append_lines(path: Path, lines: deque[str]) -> None:
    """Add lines to a file, all or none; half a line at its end, which a kill has left there, goes.

    Processes that append to one file take turns.

    Raises:
        OSError: they cannot be written.
    """
    left = memoryview("".join(f"{line}\n" for line in lines).encode())
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        with suppress(OSError):  # not every file system can lock
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        end = _find_end(descriptor)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with suppress(OSError):  # it is fixed before the next line then
                os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def _find_end(descriptor: int) -> int:
    """Return where a file's whole lines end, having cut off what is behind."""
    size = end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _CHUNK_BYTES)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        end = begin + found + 1
        if found >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def cut_lines(path: Path, last_step: int | None) -> None:
    """Leave of a file the lines up to those of `last_step`: steps only rise in it. None leaves no file.

    It is made shorter where it lies, which takes no room on a disk.
    """
    if last_step is None:
        path.unlink(missing_ok=True)
        return
    if not path.exists():
        return
    end = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or _read_step(line) > last_step:
                break
            end += len(line)
        file.truncate(end)


def _read_step(line: bytes) -> float:
    """Return a line's step; one that a broken disk or machine has left unreadable comes after all."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def find_fault(error: BaseException) -> int | None:
    """Return the `errno` of a disk's refusal, whoever tells of it; None of other errors.

    Libraries in Rust (safetensors, tokenizers) put it into their text. `torch.save` knows only that it could not write.
    """
    if isinstance(error, OSError):
        number = error.errno
    elif isinstance(error, RuntimeError) and re.search(r"inline_container\.cc|PytorchStreamWriter", str(error)):
        number = errno.EIO
    else:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number = int(found.group(1)) if found else None
    return number if number in FAULTS else None


def describe_fault(error: BaseException, folder: Path) -> str:
    """Return what a disk has refused and how much is free there, for a message."""
    number = find_fault(error) or getattr(error, "errno", None)
    reason = os.strerror(number) if number else " ".join(str(error).split())
    if isinstance(error, RuntimeError):
        reason = "torch.save could not write to its end"
    with suppress(OSError):
        reason += f", {show_bytes(shutil.disk_usage(folder).free)} free in {folder}"
    return reason


def sync(path: Path) -> None:
    """Have the disk keep a file's content, or the names in a folder, before anything that follows.

    Raises:
        OSError: it does not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def show_bytes(num_bytes: int) -> str:
    """Return a size as a person reads it."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
