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
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorashard.launch import launcher as launch
from lorashard.runs.status import Status

WARN = """
import sys
from lorashard.runtime.output import warn
warn("first")
warn("second")
print("went on", file=sys.stdout, flush=True)
"""
MIRROR = """
import pathlib, sys
from lorashard.launch.log_mirror import LogMirror
log = pathlib.Path(sys.argv[1])
with LogMirror(log, None):
    log.write_text("x" * 2**20)
"""
# A run of 40 steps as its launcher shows it; the log is given in pieces, one of which ends within a line.
RUN = """
import pathlib, sys, time
from lorashard.launch import log_mirror as terminal
from lorashard.runs.status import show_status
clock = time.monotonic
time.monotonic = lambda: 20 * clock()  # bars come sooner, and more often
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
# A rank that has the terminal itself, as under torchrun: its bar is on stdout, what it warns of on stderr.
RANK = """
import itertools, logging, sys, time
from lorashard.runtime import progress
from lorashard.runtime.output import say, warn
strict = logging.getLogger("strict")
strict.addHandler(logging.StreamHandler())
strict.handlers[0].setLevel("ERROR")
strict.propagate = False
own = logging.getLogger("own")
own.addHandler(logging.StreamHandler())
own.handlers[0].setFormatter(logging.Formatter("own: %(message)s"))
own.propagate = False
last = logging.getLogger("last")  # as torch's has it: a handler whose stream is always today's stderr
last.addHandler(logging._StderrHandler("WARNING"))
last.propagate = False
time.monotonic = itertools.count().__next__  # each time the bar is shown it is time to draw it
bar = progress.LiveBar(sys.stdout, silent_s=0.0)
def show(step):
    bar.show("training", step, 40, "steps")
show(10)
warn("a warning")
show(11)
say(0, "a word")
logging.getLogger("lorashard.model").warning("a logged line")
own.warning("with a format")
last.warning("a last resort")
strict.warning("not shown")
show(12)
progress.write_line("step 12", sys.stdout)
bar.close()
logging.getLogger("lorashard.model").warning("after the bar")
assert own.handlers[0].emit.__func__ is logging.StreamHandler.emit
"""
RANK_LINES = [
    "lorashard: a warning",
    "lorashard: a word",
    "a logged line",
    "own: with a format",
    "a last resort",
    "step 12",
    "after the bar",
]
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


def run_on_terminal(*words: str) -> tuple[list[list[str]], list[list[str]]]:
    """Run a script on a terminal; return its screens, and the bars on each: one at most, and the last line."""
    terminal, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    script = subprocess.Popen([sys.executable, "-c", *words], stdin=own, stdout=own, stderr=own)
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
    bars = [[line for line in screen if "%|" in line] for screen in screens]
    assert all(len(found) <= 1 for found in bars)
    assert all(screen[-1] == found[0] for screen, found in zip(screens, bars, strict=True) if found)
    return screens, bars


def test_a_terminal_shows_one_bar_under_whole_lines(tmp_path):
    """Catches a line glued to the bar, a bar left behind among the lines, and one bar under another."""
    screens, bars = run_on_terminal(RUN, str(tmp_path / "log"))
    assert [line for line in screens[-1] if line] == LINES
    shown = [line for found in bars for line in found]
    assert any(line.startswith("loading:  20%|") for line in shown)
    assert any(line.startswith("training:  25%|") and "10/40" in line for line in shown)
    assert any("10/40" in line and "evaluating 3 of 7 batches" in line for line in shown)
    assert all(len(line) <= 100 for line in shown)


def test_what_a_rank_warns_of_stands_above_its_own_bar():
    """Catches a warning glued to the bar, where rank 0 has the terminal; a logger's level or format that is lost."""
    screens, bars = run_on_terminal(RANK)
    assert [line for line in screens[-1] if line] == RANK_LINES
    assert any("12/40" in line for found in bars for line in found)


@pytest.mark.parametrize("is_off", (False, True))
def test_the_launcher_says_that_it_draws_and_keeps_quiet_of_a_file_that_it_cannot_read(
    tmp_path: Path, monkeypatch, capsys, is_off
):
    """Catches progress that is told twice, on lines and on the bar, and a warning twice a second, across the bar."""
    drawn: list = []
    monkeypatch.setenv(launch.RESTARTS_VARIABLE, "0")
    monkeypatch.setattr(launch, "is_terminal", lambda stream: True)
    monkeypatch.setattr(launch, "run_ranks", lambda *args, draw, **options: drawn.append(draw))
    monkeypatch.setattr(launch, "show_status", lambda said, bar: bar.append(said["phase"]))
    status = Status.begin(tmp_path)
    config = SimpleNamespace(output_dir=str(tmp_path), trainer_options={"disable_tqdm": is_off}, max_restarts=0)
    assert launch.run_with_restarts(config, [], 2, tmp_path, launch.Signals(), status) == 0  # type: ignore[arg-type]
    assert launch.read_status(tmp_path)["has_bar"] is not is_off
    (draw,) = drawn
    if draw is None:
        assert is_off
        return
    shown: list[str] = []
    draw(shown)
    (tmp_path / "status.json").write_text("{")
    draw(shown)
    assert shown == ["start"] and capsys.readouterr().err == ""


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
