"""What a command says: progress on stderr, its result on stdout, once, however many ranks there are."""

from __future__ import annotations

import io
import json
import logging
import os
import select
import stat
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .disk import find_fault

RESULT_FILE_VARIABLE = "LORASHARD_RESULT_FILE"
# The descriptor of the launcher's own stderr, in a rank whose output goes to a log.
TERMINAL_VARIABLE = "LORASHARD_TERMINAL_FD"
_PATIENCE_S = 1.0
_MOST_BYTES_AT_ONCE = 4096  # of a pipe that can be written to, so many never wait (PIPE_BUF)


class _Log(io.FileIO):
    """A log that takes output without an error when its disk is full: the launcher's stderr is shown it instead."""

    def __init__(self, descriptor: int, terminal: int | None) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._terminal = terminal
        self._lost_bytes = 0

    def write(self, data: Any) -> int:
        given = memoryview(data).cast("B")
        done = 0
        try:
            if self._lost_bytes:
                super().write(f"\nlorashard: {self._lost_bytes} bytes of output are missing here\n".encode())
                self._lost_bytes = 0
            while done < len(given):
                done += super().write(given[done:]) or 0
        except OSError as error:
            if find_fault(error) is None:
                raise
            self._lost_bytes += len(given) - done
            self._show(given)  # also what the log has of it: half a line tells nobody anything
        return len(given)

    def _show(self, data: memoryview) -> None:
        try:
            while data and self._terminal is not None and select.select([], [self._terminal], [], 0)[1]:
                data = data[os.write(self._terminal, data[:_MOST_BYTES_AT_ONCE]) :]
        except OSError:  # it is gone, or its disk is full too
            self._terminal = None


def leave_out_notices() -> None:
    """Keep off stderr what nobody can do anything about, and each rank of each command would show.

    That is a line of bitsandbytes, which PEFT imports wherever it is installed: it asks for a package with kernels that
    lorashard never calls. And that PEFT and TRL ask transformers' models for three names that have new ones.
    """
    names = "(is_)?gradient_checkpointing(_enable|_disable)?"
    warnings.filterwarnings("ignore", f"`{names}` is deprecated", FutureWarning)
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_worth_showing)


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")


def outlive_full_disks(is_result_elsewhere: bool) -> None:
    """Let what this process prints into a file be lost, rather than end the process, when the disk is full.

    A progress bar or a warning is not worth a run.

    Args:
        is_result_elsewhere: stdout is a log too, and not where the command's result goes.
    """
    handed = os.environ.pop(TERMINAL_VARIABLE, None)
    terminal = int(handed) if handed else None
    if terminal is not None:
        os.set_inheritable(terminal, False)
    for name in ("stdout", "stderr") if is_result_elsewhere else ("stderr",):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not _is_file(stream):
            continue
        stream.flush()
        log = io.BufferedWriter(_Log(stream.fileno(), terminal))
        replaced = io.TextIOWrapper(log, stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, replaced)


def _is_file(stream: Any) -> bool:
    return stream is not None and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def warn(line: str) -> None:
    """Show the person a line on stderr. A terminal that is gone, or that nobody reads, is no reason to fail or wait."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something without one
        descriptor = None
    try:
        if descriptor is None or select.select([], [descriptor], [], _PATIENCE_S)[1]:
            _write_line(line)
    except OSError:
        if descriptor is not None:  # what is left in the buffer must not fail at the interpreter's end
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def say(rank: int, line: str) -> None:
    """Tell the person how it goes; rank 0 speaks."""
    if rank == 0:
        _write_line(line)


def _write_line(line: str) -> None:
    from .progress import write_line  # tqdm is more than a rank's first steps need, which import this file

    write_line(f"lorashard: {line}", sys.stderr)


def give(rank: int, result: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Give a command's result: as text, or as JSON and nothing else on stdout; rank 0's counts.

    Ranks of lorashard's own launcher write into logs, so the launcher is handed what it shall print.
    """
    if rank != 0:
        return
    shown = json.dumps(result, indent=1) if as_json else text
    file = os.environ.get(RESULT_FILE_VARIABLE)
    if file:
        Path(file).write_text(shown + "\n", encoding="utf-8")
    else:
        print(shown, flush=True)
