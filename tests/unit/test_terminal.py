"""What the launcher shows, where nobody looks: it must go on, hear signals, and end."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time

WARN = """
import sys
from lorashard.output import warn
warn("first")
warn("second")
print("went on", file=sys.stdout, flush=True)
"""
MIRROR = """
import pathlib, sys
from lorashard.terminal import LogMirror
log = pathlib.Path(sys.argv[1])
with LogMirror(log, None):
    log.write_text("x" * 2**20)
"""
# A run of 40 steps as its launcher shows it; the log is given in pieces, one of which ends within a line.
RUN = """
import pathlib, sys, time
from lorashard import progress, terminal
from lorashard.status import show_status
progress._REDRAW_S = terminal._DRAW_INTERVAL_S = 0.05
terminal.LiveBar = lambda screen: progress.LiveBar(screen, silent_s=0.0)
log = pathlib.Path(sys.argv[1]).open("w", buffering=1)
facts = {"phase": "load", "progress": {"done": 1, "total": 5, "unit": "units"}}
with terminal.LogMirror(pathlib.Path(sys.argv[1]), None, lambda bar: show_status(facts, bar)) as mirror:
    def pause():
        time.sleep(0.4)
    log.write("model: loaded\\n"); pause()
    facts = {"phase": "train", "step": 10, "max_steps": 40}; pause()
    log.write("step 10/40"); log.flush(); pause()
    log.write("  loss 1.5\\n"); pause()
    facts |= {"phase": "evaluate", "progress": {"done": 3, "total": 7, "unit": "batches"}}; pause()
    mirror.warn("SIGINT: saving"); pause()
    facts |= {"phase": "done"}
    log.write("adapter: saved\\n")
"""
LINES = ["model: loaded", "step 10/40  loss 1.5", "lorashard: SIGINT: saving", "adapter: saved"]


def read_screens(written: str) -> list[list[str]]:
    """Return what stands on a terminal's lines after each carriage return or line's end; of bars their first word."""
    lines, screens, column = [""], [], 0
    for piece in written.replace("\r\n", "\n").replace("\n", "\r\n").split("\r"):
        if piece.startswith("\n"):
            lines, piece = [*lines, ""], piece[1:]
        column = len(piece)
        lines[-1] = piece + lines[-1][column:]
        screens.append([line.rstrip() for line in lines])
    return screens


def test_a_terminal_shows_one_bar_under_whole_lines(tmp_path):
    """Catches a line glued to the bar, a bar left behind among the lines, and one bar under another."""
    terminal, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-c", RUN, str(tmp_path / "log")]
    script = subprocess.Popen(command, stdin=own, stdout=own, stderr=own)
    os.close(own)
    written = b""
    try:
        while piece := os.read(terminal, 65536):
            written += piece
    except OSError:  # how a terminal tells that nobody writes to it any more
        pass
    os.close(terminal)
    assert script.wait(timeout=60) == 0, written.decode()
    screens = read_screens(written.decode())
    assert [line for line in screens[-1] if line] == LINES
    bars = [[line for line in screen if "%|" in line] for screen in screens]
    assert all(len(found) <= 1 for found in bars)
    assert all(screen[-1] == found[0] for screen, found in zip(screens, bars, strict=True) if found)
    shown = [line for found in bars for line in found]
    assert any(line.startswith("loading:  20%|") for line in shown)
    assert any(line.startswith("training:  25%|") and "10/40" in line for line in shown)
    assert any("10/40" in line and "evaluating 3 of 7 batches" in line for line in shown)
    assert all(len(line) <= 100 for line in shown)


def test_a_pipe_shows_the_log_and_nothing_else(tmp_path):
    """Catches a bar, or its carriage returns, in what `| tee` keeps."""
    command = [sys.executable, "-c", RUN, str(tmp_path / "log")]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert ended.stdout == (tmp_path / "log").read_bytes() and b"\r" not in ended.stdout
    assert ended.stderr == b"lorashard: SIGINT: saving\n"


def test_a_reader_that_is_gone_stops_nothing(tmp_path):
    """`lorashard finetune 2>&1 | tee log` and Ctrl-C, which ends tee too: the line is lost, not the request to save."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", WARN], stderr=writing, stdout=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


def test_a_reader_that_does_not_read_keeps_nobody_waiting(tmp_path):
    """A pager or a stopped terminal: the launcher would wait for it at the end, deaf to signals, and keep its lock."""
    reading, writing = os.pipe()
    script = subprocess.Popen([sys.executable, "-c", MIRROR, str(tmp_path / "log")], stdout=writing)
    os.close(writing)
    assert script.wait(timeout=60) == 0
    os.close(reading)


def test_all_of_a_log_is_shown(tmp_path):
    """A copy in pieces that loses one."""
    command = [sys.executable, "-c", MIRROR, str(tmp_path / "log")]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE)
    time.sleep(0.5)  # it has to wait for its reader
    assert shown.communicate(timeout=60)[0] == b"x" * 2**20
