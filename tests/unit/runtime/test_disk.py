"""What a run writes while its disk is full: on a real one where a test may mount it, and on files with a size limit."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lorashard.runs.folder import Run
from lorashard.runtime.disk import PatientFiles, find_fault
from lorashard.runtime.failures import Failure


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`: a write ends short, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read_lines(path: Path) -> list[str]:
    text = path.read_text()
    assert text.endswith("\n"), "half a line"
    return text.splitlines()


def test_lines_wait_for_room_and_come_in_order(tmp_path):
    """A line lost, doubled, out of order or torn by the outage; a person told of it never, or at every line."""
    told: list[tuple[str, dict]] = []
    files = PatientFiles(lambda kind, **fields: told.append((kind, fields)))
    path = tmp_path / "metrics.jsonl"
    files.append(path, "0" * 30)
    with limited_files(100):
        for number in range(1, 6):
            files.append(path, str(number) * 30)
            assert len(read_lines(path)) == min(number + 1, 3)
        [(kind, fields)] = told
        assert (kind, fields["path"]) == ("disk_refused", str(path)) and "File too large" in fields["reason"]
    files.append(path, "6" * 30)
    assert read_lines(path) == [str(number) * 30 for number in range(7)]
    assert told[1:] == [("disk_accepted", {"num_lines": 4, "num_lost": 0})]
    with limited_files(100):
        files.append(path, "7" * 30)
    assert len(told) == 3, "the second outage was not told"


def test_a_file_is_replaced_or_left_as_it_was(tmp_path):
    """Half a status.json, which nobody can read; one that stays old when there is room; a partial file left there."""
    told: list[tuple[str, dict]] = []
    files = PatientFiles(lambda kind, **fields: told.append((kind, fields)))
    path = tmp_path / "status.json"
    files.replace(path, "old")
    with limited_files(50):
        files.replace(path, "a" * 60)
        files.replace(path, "b" * 60)
        assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["status.json"]
    files.flush()
    assert path.read_text() == "b" * 60 and len(told) == 2


def test_memory_for_lines_that_wait_is_bounded(tmp_path):
    """A disk that is full for weeks fills the memory too; lines that are dropped without a word."""
    told: list[tuple[str, dict]] = []
    files = PatientFiles(lambda kind, **fields: told.append((kind, fields)), most_lines=3)
    with limited_files(0):
        for number in range(5):
            files.append(tmp_path / "lines", str(number))
    files.flush()
    assert read_lines(tmp_path / "lines") == ["2", "3", "4"] and told[-1][1]["num_lost"] == 2


def test_half_a_line_that_a_kill_left_is_removed(tmp_path):
    """A new line glued to half an old one: two are lost, and readers fail."""
    path = tmp_path / "lines"
    for there, expected in ((b"whole\nhal", ["whole", "new"]), (b"hal", ["new"]), (b"x" * 99_999, ["new"])):
        path.write_bytes(there)
        PatientFiles(lambda kind, **fields: None).append(path, "new")
        assert read_lines(path) == expected


def test_an_end_that_cannot_be_written_is_said(tmp_path, capsys):
    """A launcher that crashes in place of saying why the run failed."""
    status = Run(tmp_path, 0, 1).status
    status.enter("train", step=7)
    with limited_files(10):
        status.end("failed", Failure(1, "boom", "crash"))
    said = capsys.readouterr().err
    assert "status.json" in said and "File too large" in said
    assert json.loads((tmp_path / "status.json").read_text())["phase"] == "train"


def test_a_disks_refusal_is_known_whoever_tells_it():
    """A user's full disk reported as a crash of a library; a crash of a library reported as a full disk."""
    full = "No space left on device (os error 28)"
    assert find_fault(OSError(28, "x")) == find_fault(SafetensorError(f"I/O error: {full}")) == 28
    assert find_fault(Exception(full)) == 28
    assert find_fault(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")) == errno.EIO
    assert find_fault(RuntimeError("Connection closed")) is None
    assert find_fault(FileNotFoundError(2, "x")) is None and find_fault(Exception("No such file (os error 2)")) is None
    assert find_fault(ValueError("28")) is None


PRINT = """
import os, sys, resource, warnings
width = 5000 if sys.argv[1] == "much" else 0
from lorashard.runtime.output import outlive_full_disks
outlive_full_disks(is_result_elsewhere=sys.argv[1] != "result")
import logging
logging.basicConfig()
print("before")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for number in range(20):
    print(f"output {number}:".ljust(width), flush=True)
    print("progress", file=sys.stderr, end="\\r", flush=True)
warnings.warn("beware")
logging.warning("beware")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("after", flush=True)
"""


def start_printing(log: Path, kind: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PRINT, kind]
    with log.open("ab") as file:
        read, write = os.pipe()
        environment = os.environ | {"LORASHARD_TERMINAL_FD": str(write)}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, pass_fds=[write], text=True)
    os.close(write)
    process.terminal = os.fdopen(read)
    return process


def test_output_that_a_full_disk_does_not_take_goes_to_the_launchers_terminal(tmp_path):
    """A progress bar that ends the training; a warning of the full disk that nobody sees, as it goes to that disk."""
    process = start_printing(tmp_path / "log", "log")
    with process.terminal as terminal:
        shown = terminal.read()
    assert process.wait(60) == 0
    text = (tmp_path / "log").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and " bytes of output" in text
    for number in range(20):
        assert (text + shown).count(f"output {number}:\n") == 1
    assert "progress" in shown and "UserWarning: beware" in shown


def test_a_result_that_cannot_be_written_is_an_error(tmp_path):
    """`lorashard verify --json > FILE` that says all is well and leaves half a file."""
    process = start_printing(tmp_path / "log", "result")
    with process.terminal as terminal:
        assert "OSError" in terminal.read()
    assert process.wait(60) != 0


def test_a_terminal_that_nobody_reads_does_not_stop_the_run(tmp_path):
    """A pipe that is full: the rank would wait in a print for ever."""
    process = start_printing(tmp_path / "log", "much")
    with process.terminal:
        assert process.wait(60) == 0
    assert (tmp_path / "log").read_text().endswith("after\n")
