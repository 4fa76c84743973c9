"""How far long work is, told to a person: one live bar on a terminal, or else a plain line now and then."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from .disk import show_bytes

# How much is done, of how much where that is known, and of what: "rows", "units", "bytes", "bytes hashed", ...
Progress = Callable[[int, int | None, str], None]

# Of the environment: a file that gets how far the work is, for a program that started this one.
PROGRESS_FILE_VARIABLE = "LORASHARD_PROGRESS_FILE"

_SILENT_S = 2.0  # work that is over sooner is not told of
_GROWTH = 3  # each line waits so many times longer than the one before
_LONGEST_S = 60.0
_REDRAW_S = 0.1
_FILE_INTERVAL_S = 0.5
_PATIENCE_S = 1.0
_COUNTED = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_UNCOUNTED = "{desc} [{elapsed}{postfix}]"


class Teller(Protocol):
    """Shows how far work is; `close` when it is over."""

    def show(self, what: str, done: int, total: int | None, unit: str, note: str = "") -> None: ...

    def close(self) -> None: ...


class LiveBar:
    """One tqdm bar, the last line of a terminal, for whatever is being done; it vanishes when that is over.

    On stdout or stderr, what else this process writes to the terminal goes through `write_line`, from any thread, and
    what loggers write does so by itself. On another stream it is written within `hidden`.
    """

    def __init__(self, stream: Any, silent_s: float = _SILENT_S) -> None:
        """Prepare a bar.

        Args:
            stream: where it is drawn: what tqdm can write to.
            silent_s: how long work takes that is not worth a bar.
        """
        self._stream = stream
        self._silent_s = silent_s
        self._lock = threading.RLock()
        self._bar: tqdm | None = None
        self._what = ""
        self._begin_s = self._next_s = 0.0
        self._redirected = ExitStack()

    def show(self, what: str, done: int, total: int | None, unit: str, note: str = "") -> None:
        """Draw the bar, a new one where it is of other work than before.

        Args:
            note: what is done meanwhile, such as an evaluation; stands in the bar.
        """
        with self._lock:
            now_s = time.monotonic()
            if what != self._what:
                self.close()
                self._what, self._begin_s = what, now_s
            if now_s < max(self._next_s, self._begin_s + self._silent_s):
                return
            self._next_s = now_s + _REDRAW_S
            if self._bar is None:
                self._bar = self._make(done)
            is_bytes = unit.startswith("bytes")
            self._bar.n, self._bar.total = done, total
            self._bar.unit, self._bar.unit_scale = "B" if is_bytes else unit, is_bytes
            self._bar.bar_format = _UNCOUNTED if total is None else _COUNTED
            self._bar.set_postfix_str(note)  # draws

    def _make(self, done: int) -> tqdm:
        bar = tqdm(
            desc=self._what,
            initial=done,
            unit_divisor=1024,
            file=self._stream,
            dynamic_ncols=True,
            leave=False,
            delay=self._silent_s,  # draws nothing by itself until then
            bar_format=_UNCOUNTED,
        )
        bar.start_t -= self._silent_s  # the work has taken so long already
        if self._stream is sys.stdout or self._stream is sys.stderr:
            self._redirected.enter_context(_logged_above_bars())
        return bar

    @contextmanager
    def hidden(self, is_line_whole: bool = True) -> Iterator[None]:
        """Clear the bar's line, and draw it again afterward. A terminal that takes nothing keeps nobody waiting.

        Args:
            is_line_whole: whether what is written ends its line; else the bar waits for the next `show`.
        """
        is_held = self._lock.acquire(timeout=_PATIENCE_S)
        bar = self._bar if is_held else None
        try:
            if bar is not None:
                bar.clear()
            yield
            if bar is not None and is_line_whole:
                bar.refresh()
        finally:
            if is_held:
                self._lock.release()

    def close(self) -> None:
        """Remove the bar: the work is over."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
            self._redirected.close()
            self._bar, self._what = None, ""


class ProgressLines:
    """A line when work has taken two seconds, and from there on ever fewer, at least one a minute."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._what = ""
        self._begin_s = self._wait_s = 0.0

    def show(self, what: str, done: int, total: int | None, unit: str, note: str = "") -> None:
        """Tell how far the work is, if it is time to, and if that is known."""
        if not unit:
            return
        now_s = time.monotonic()
        if what != self._what:
            self._what, self._begin_s, self._wait_s = what, now_s, _SILENT_S
        if now_s - self._begin_s >= self._wait_s:
            self._begin_s = now_s
            self._wait_s = min(_LONGEST_S, _GROWTH * self._wait_s)
            self._tell(f"{what}: {show_amount(done, total, unit)}")

    def close(self) -> None:
        """Hear that the work is over."""
        self._what = ""


class ProgressFile:
    """A JSON file with `what`, `done`, `total` and `unit`, replaced at most twice a second; none without a path."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._next_s = 0.0

    def write(self, what: str, done: int, total: int | None, unit: str) -> None:
        """Write how far the work is, if it is time to. A disk that refuses does not stop the work."""
        if not self._path or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _FILE_INTERVAL_S
        with suppress(OSError):
            partial = f"{self._path}.partial"
            with open(partial, "w", encoding="utf-8") as file:
                json.dump({"what": what, "done": done, "total": total, "unit": unit}, file)
            os.replace(partial, self._path)


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a person looks at a stream, who may have closed it."""
    return stream is not None and not stream.closed and stream.isatty()


def show_amount(done: int, total: int | None, unit: str) -> str:
    """Return `3 of 12 units`, `1.5 GiB of 4.0 GiB hashed`, or without a total `3 units`."""
    if unit.startswith("bytes"):
        amount = show_bytes(done) if total is None else f"{show_bytes(done)} of {show_bytes(total)}"
        return f"{amount}{unit.removeprefix('bytes')}"
    return f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"


@contextmanager
def told_progress(
    what: str, is_shown: bool = True, given: Progress | None = None, stream: TextIO | None = None
) -> Iterator[Progress]:
    """Give a callable that tells the person how far `what` is, where it takes longer than two seconds.

    Args:
        is_shown: false on the ranks that are to be silent.
        given: told instead, if the caller wants to hear of it.
        stream: by default stderr.
    """
    if given is not None:
        yield given
        return
    stream = stream or sys.stderr
    teller: Teller = LiveBar(stream) if is_terminal(stream) else ProgressLines(lambda line: _tell(line, stream))
    file = ProgressFile(os.environ.get(PROGRESS_FILE_VARIABLE))

    def show(done: int, total: int | None, unit: str) -> None:
        if is_shown:
            teller.show(what, done, total, unit)
            file.write(what, done, total, unit)

    try:
        yield show
    finally:
        teller.close()


@contextmanager
def told_work(what: str, is_shown: bool = True, silent_s: float = _SILENT_S) -> Iterator[None]:
    """Say on stderr what is being done, once it has taken a while: of work that does not tell how far it is.

    Args:
        is_shown: as for `told_progress`.
        silent_s: how long work takes that is not told of.
    """
    timer = threading.Timer(silent_s, _tell, [f"{what} ...", sys.stderr])
    timer.daemon = True
    if is_shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write_line(line: str, stream: TextIO | None) -> None:
    """Write a line to stdout or stderr; on a terminal above the bars of this process."""
    if stream is None:
        return
    if is_terminal(stream):
        tqdm.write(line, file=stream)
    else:
        print(line, file=stream)
    stream.flush()


def _tell(line: str, stream: TextIO | None) -> None:
    write_line(f"lorashard: {line}", stream)


@contextmanager
def _logged_above_bars() -> Iterator[None]:
    """Let what loggers write to a terminal stand above the bars of this process, each handler in its own way."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    shown = [handler for handler in {*handlers, logging.lastResort} if _writes_to_terminal(handler)]
    for handler in shown:
        vars(handler)["emit"] = partial(_emit_above_bars, handler.emit)
    try:
        yield
    finally:
        for handler in shown:
            del vars(handler)["emit"]


def _writes_to_terminal(handler: logging.Handler | None) -> bool:
    stream = getattr(handler, "stream", None)
    is_taken = handler is None or "emit" in vars(handler)  # for another bar
    return not is_taken and (stream is sys.stdout or stream is sys.stderr) and is_terminal(stream)


def _emit_above_bars(emit: Callable[[logging.LogRecord], None], record: logging.LogRecord) -> None:
    with tqdm.external_write_mode(file=sys.stderr):
        emit(record)


def show_duration(seconds: float) -> str:
    """Return a duration as a person says it: `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
