"""A rank's or the launcher's log: its end, or what matches in it, read from the end, however large it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lorashard.errors import ConfigError
from lorashard.runtime.disk import show_bytes

from .sanitize import mask_secrets, tame
from .states import LAUNCHER_LOG

_BLOCK_BYTES = 1 << 16
_MOST_BYTES = 64 << 20
_MOST_LINE_BYTES = 1 << 17  # a progress bar writes megabytes into one line, of which the end is seen
_MOST_CHARACTERS = 4000  # of a line that is shown
_MOST_LINES = 5000


def list_logs(folder: Path) -> list[int | Literal["launcher"]]:
    """Return whose logs a run has: the launcher's, where the web UI started it, and the ranks'."""
    ranks = []
    for path in folder.glob("logs/rank_*.log"):
        number = path.stem.removeprefix("rank_")
        if number.isdecimal():
            ranks.append(int(number))
    has_launcher = (folder / LAUNCHER_LOG).is_file()
    return [*(["launcher"] if has_launcher else []), *sorted(ranks)]  # type: ignore[list-item]


def read_log(
    folder: Path,
    rank: int | Literal["launcher"],
    query: str = "",
    max_lines: int = 400,
    most_bytes: int = _MOST_BYTES,
) -> str:
    """Return the last lines of a log, or the last of those that match, fit to be shown.

    Args:
        folder: the run's.
        query: what a line must hold, in any case; empty: all.
        most_bytes: at the log's end that are searched.

    Raises:
        ConfigError: there is no such log.
    """
    path = find_log(folder, rank)
    wanted = query.casefold()
    max_lines = max(1, min(max_lines, _MOST_LINES))
    found: list[str] = []
    try:
        size = path.stat().st_size
        num_read = 0
        for raw in read_backwards(path):
            if num_read > most_bytes:
                found.append(f"(of this log's {show_bytes(size)}, the last {show_bytes(num_read)} are searched)")
                break
            num_read += len(raw) + 1
            line = tame(raw.decode("utf-8", "replace"))
            if wanted not in line.casefold():
                continue
            line = mask_secrets(line)
            if wanted not in line.casefold():  # nobody shall find out a token by asking for it
                continue
            found.append(line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]} ...")
            if len(found) == max_lines:
                break
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=path) from error
    return "\n".join(reversed(found))


def find_log(folder: Path, rank: int | Literal["launcher"]) -> Path:
    """Return a log's path.

    Raises:
        ConfigError: there is no such log.
    """
    there = list_logs(folder)
    if rank not in there or isinstance(rank, bool):
        names = ", ".join("launcher" if one == "launcher" else f"rank {one}" for one in there) or "none yet"
        who = "the launcher" if rank == "launcher" else f"rank {rank}"
        raise ConfigError(f"run {folder.name} has no log of {who}", fix=f"choose one of: {names}")
    path = folder / name_log(rank)
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise ConfigError(f"a link that leads out of the folder of run {folder.name}", where=path.name)
    return path


def name_log(rank: int | Literal["launcher"]) -> Path:
    """Return a log's path within a run's folder."""
    return LAUNCHER_LOG if rank == "launcher" else Path("logs", f"rank_{rank}.log")


def read_backwards(path: Path, block_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """Yield a file's lines from the last to the first, as many as are taken. Of a very long one, the end.

    Memory: a few blocks of `block_bytes`, whatever the file.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        line = b""  # what is known of the line that begins before `end`
        is_last = True
        while end > 0:
            begin = max(0, end - block_bytes)
            first, *others = os.pread(file.fileno(), end - begin, begin).split(b"\n")
            end = begin
            if not others:
                line = first + line if len(line) < _MOST_LINE_BYTES else line
                continue
            others[-1] += line
            if is_last and not others[-1]:  # the file ends with a whole line
                others.pop()
            yield from reversed(others)
            line, is_last = first, False
        if line or not is_last:
            yield line
