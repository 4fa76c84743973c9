"""What the person sees of ranks that write into logs, and what rank 0 hears of the person."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from ..runtime.output import warn
from ..runtime.progress import LiveBar, is_terminal

_MIRROR_INTERVAL_S = 0.1
_DRAW_INTERVAL_S = 0.5
_LEAVE_S = 3.0
_PIPE_BYTES = 65536
_PIPE_BUF_BYTES = 4096  # of a pipe that can be written to, so many never wait


class LogMirror(threading.Thread):
    """Copies what is added to a log to a stream, byte for byte; on a terminal it keeps a live bar under it.

    The bar is drawn here and not by a rank: only who writes everything else on a terminal's screen can keep it whole.
    """

    def __init__(self, log: Path, stream: TextIO | None, draw: Callable[[LiveBar], None] | None = None) -> None:
        """Begin at the log's end.

        Args:
            stream: by default stdout.
            draw: asked now and then to show on a bar how far the work is; without it there is none.
        """
        super().__init__(daemon=True)
        self._log = log
        self._stream = stream or sys.stdout
        self._draw = draw
        self._bar = LiveBar(_Screen(self._stream, self._write_all)) if draw and is_terminal(self._stream) else None
        self._is_line_whole = True
        self._drawn_s = 0.0
        self._offset = log.stat().st_size if log.exists() else 0
        self._file: BinaryIO | None = None
        self._is_done = threading.Event()
        self._until_s = float("inf")

    def __enter__(self) -> LogMirror:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._until_s = time.monotonic() + _LEAVE_S
        self._is_done.set()
        self.join()

    def warn(self, line: str) -> None:
        """Show the person a line of the launcher's own on stderr, above the bar."""
        with self._bar.hidden(self._is_line_whole) if self._bar is not None else nullcontext():
            warn(line)

    def run(self) -> None:
        try:
            while not self._is_done.wait(_MIRROR_INTERVAL_S):
                self._copy()
                self._draw_bar()
            if self._bar is not None:
                self._bar.close()
            self._copy()
        except OSError:  # the terminal or the pipe is gone; the log is not
            pass
        finally:
            if self._file is not None:
                self._file.close()

    def _copy(self) -> None:
        if self._file is None:
            if not self._log.exists():
                return
            self._file = self._log.open("rb")
            self._file.seek(self._offset)
        added = self._file.read()
        if not added:
            return
        was_whole, self._is_line_whole = self._is_line_whole, added.endswith(b"\n")
        with self._bar.hidden(self._is_line_whole) if self._bar is not None and was_whole else nullcontext():
            self._write_all(added)

    def _draw_bar(self) -> None:
        if self._bar is None or self._draw is None or time.monotonic() - self._drawn_s < _DRAW_INTERVAL_S:
            return
        self._drawn_s = time.monotonic()
        if self._is_line_whole:
            self._draw(self._bar)

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[self._write(data) :]

    def _write(self, data: bytes) -> int:
        """Write what the stream takes without waiting: a pager may stop reading, and the launcher must hear signals."""
        descriptor = self._stream.fileno()
        while not select.select([], [descriptor], [], _MIRROR_INTERVAL_S)[1]:
            if time.monotonic() > self._until_s:
                raise TimeoutError("nobody reads the output")
        if self._is_done.is_set():
            self._until_s = time.monotonic() + _LEAVE_S
        return os.write(descriptor, data[:_PIPE_BUF_BYTES])


class _Screen:
    """A terminal as tqdm writes to it."""

    def __init__(self, stream: TextIO, write: Callable[[bytes], None]) -> None:
        self.encoding = stream.encoding or "utf-8"
        self._stream = stream
        self._write = write

    def write(self, text: str) -> None:
        self._write(text.encode(self.encoding, "replace"))

    def flush(self) -> None:
        """Do nothing: all is written at once."""

    def fileno(self) -> int:
        """Return what tqdm asks for the terminal's width."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        return True


class Terminal:
    """Hands this process's stdin to rank 0, and rank 0's answers to stdout, through named pipes in a folder.

    Ranks have neither: they are in sessions of their own, and write to logs.
    """

    def __init__(self, folder: Path) -> None:
        self._stdin = folder / "stdin"
        self._stdout = folder / "stdout"
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._shower = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> None:
        for pipe, thread in ((self._stdin, self._feeder), (self._stdout, self._shower)):
            os.mkfifo(pipe)
            thread.start()

    def __exit__(self, *_: object) -> None:
        # The feeder may wait for the person for ever. The shower ends at the pipe's end, once all that was written is
        # shown; a rank 0 that died early has never opened it.
        while self._shower.is_alive():
            with suppress(OSError):
                os.close(os.open(self._stdout, os.O_WRONLY | os.O_NONBLOCK))
            self._shower.join(_MIRROR_INTERVAL_S)

    def _feed(self) -> None:
        with suppress(OSError), self._stdin.open("wb", buffering=0) as pipe:  # waits for rank 0
            while chunk := os.read(0, _PIPE_BYTES):
                pipe.write(chunk)

    def _show(self) -> None:
        with suppress(OSError), self._stdout.open("rb", buffering=0) as pipe:
            while chunk := pipe.read(_PIPE_BYTES):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
