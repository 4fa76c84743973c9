"""Files that grow: what is new at the end of a file of JSON lines, and the last lines of a long one.

A run appends to its files, cuts them where it resumes, and deletes them where it begins anew; a line may be half
written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

_BLOCK_BYTES = 1 << 20
_FINGERPRINT_BYTES = 256


class JsonLines:
    """Reads a file of JSON lines again and again, and gives each line once.

    Attributes:
        was_replaced: whether, at the last read, the file was no longer the one whose lines were given before: it was
            cut or written anew. That read has then begun at its first line, and what earlier ones gave no longer holds.
    """

    def __init__(self, path: Path) -> None:
        self.was_replaced = False
        self._path = path
        self._offset = 0  # behind the last line that was given
        self._fingerprint = b""  # the bytes before it
        self._inode: int | None = None
        self._seen: tuple[int, int, int] | None = None  # inode, size and time when all was read

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that came since the last call. A line without its end waits."""
        return [row for batch in self.read_batches() for row in batch]

    def follow(self, clear: Callable[[], None], take: Callable[[list[dict[str, Any]]], None]) -> None:
        """Hand the lines that came since the last call to `take`, after `clear` where what it has no longer holds."""
        is_cleared = False
        for batch in self.read_batches():
            if self.was_replaced and not is_cleared:
                clear()
                is_cleared = True
            take(batch)
        if self.was_replaced and not is_cleared:
            clear()

    def read_batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the lines that came since the last call, so many at a time that memory stays small.

        `was_replaced` is right when the first batch is there, and when there is none.
        """
        self.was_replaced = False
        try:
            file = self._path.open("rb")
        except OSError:  # not there yet, gone, or not to be read: nothing in it holds
            self._begin_anew()
            return
        with file:
            facts = os.fstat(file.fileno())
            seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            if seen == self._seen:
                return
            if not self._is_continued(file.fileno(), facts):
                self._begin_anew()
            self._inode = facts.st_ino
            yield from self._read_to(file.fileno(), facts.st_size)
            self._seen = seen

    def _is_continued(self, descriptor: int, facts: os.stat_result) -> bool:
        if facts.st_ino != self._inode:
            return False
        begin = self._offset - len(self._fingerprint)
        return os.pread(descriptor, len(self._fingerprint), begin) == self._fingerprint

    def _begin_anew(self) -> None:
        self.was_replaced = self._offset > 0
        self._offset, self._fingerprint = 0, b""
        self._inode = self._seen = None

    def _read_to(self, descriptor: int, size: int) -> Iterator[list[dict[str, Any]]]:
        block_bytes = _BLOCK_BYTES
        while self._offset < size:
            block = os.pread(descriptor, min(block_bytes, size - self._offset), self._offset)
            end = block.rfind(b"\n") + 1
            if end == 0 and self._offset + len(block) < size and block:
                block_bytes *= 2  # a line that is longer than a block
                continue
            if end == 0:
                return
            self._offset += end
            self._fingerprint = block[max(0, end - _FINGERPRINT_BYTES) : end]
            yield [row for row in map(parse_line, block[: end - 1].split(b"\n")) if row is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a line's JSON object; None where it is no such thing."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            row = json.loads(line)  # knows NaN and Infinity, which JSON does not
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def read_last_rows(path: Path, num_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the whole lines among the last `num_bytes` of a file of JSON lines; none where it cannot be read."""
    rows = map(parse_line, read_end(path, num_bytes).split(b"\n"))
    return [row for row in rows if row is not None]  # half a line is no JSON


def sample_rows(path: Path, num_places: int, place_bytes: int) -> list[dict[str, Any]]:
    """Return the whole lines at so many places of a file of JSON lines, in order: of a short one all of them.

    It costs the same however long the file is. Nothing where it cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= num_places * place_bytes:
                parts = [os.pread(file.fileno(), size, 0)]
            else:
                begins = [(size - place_bytes) * number // (num_places - 1) for number in range(num_places)]
                parts = [os.pread(file.fileno(), place_bytes, begin) for begin in begins]
    except OSError:
        return []
    rows = (parse_line(line) for part in parts for line in part.split(b"\n"))
    return [row for row in rows if row is not None]  # half a line is no JSON


def read_end(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - num_bytes)
            return os.pread(file.fileno(), size - begin, begin)
    except OSError:
        return b""


def read_json(path: Path) -> dict[str, Any]:
    """Return a small file's JSON object; empty where it is not there, not to be read, or no such thing."""
    try:
        return parse_line(path.read_bytes()) or {}
    except OSError:
        return {}
