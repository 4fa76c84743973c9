"""What lorashard has printed into a log: its own lines, read as they come."""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path

_SAID = re.compile(rb"lorashard: ([^\r\n]+)\n")
_MOST_LINES = 300
_MOST_BYTES = 16 << 20  # of a log that is there already
_BLOCK_BYTES = 1 << 20


class SaidLines:
    """Gathers the lines in which lorashard itself speaks. A progress bar may stand before them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)

    def read(self) -> list[str]:
        """Return all of them so far, the last ones of very many."""
        try:
            with self._path.open("rb") as file:
                self._read_new(file.fileno())
        except OSError:  # not there yet, or gone
            self._begin_anew(None, 0)
        return list(self._lines)

    def _begin_anew(self, inode: int | None, offset: int) -> None:
        self._inode, self._offset = inode, offset
        self._lines.clear()

    def _read_new(self, descriptor: int) -> None:
        facts = os.fstat(descriptor)
        if facts.st_ino != self._inode or facts.st_size < self._offset:
            self._begin_anew(facts.st_ino, max(0, facts.st_size - _MOST_BYTES))
        while self._offset < facts.st_size:
            block = os.pread(descriptor, min(_BLOCK_BYTES, facts.st_size - self._offset), self._offset)
            end = block.rfind(b"\n") + 1
            if end == 0 and len(block) < _BLOCK_BYTES:
                return  # half a line
            end = end or len(block)
            self._lines += [line.decode("utf-8", "replace") for line in _SAID.findall(block[:end])]
            self._offset += end
