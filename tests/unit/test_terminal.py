"""What the launcher shows, where nobody looks: it must go on, hear signals, and end."""

from __future__ import annotations

import os
import subprocess
import sys
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
