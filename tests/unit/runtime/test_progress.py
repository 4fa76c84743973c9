"""How far long work is: told where it is long, on one rank, once a while; nothing of what is short."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch import nn

from lorashard.model import converted
from lorashard.model.sources import MemorySource
from lorashard.model.units import LAYER, FoundUnit, FoundWeight
from lorashard.runtime import progress
from lorashard.runtime.progress import PROGRESS_FILE_VARIABLE, ProgressLines, show_amount, told_progress, told_work
from lorashard.weights.fingerprint import BaseIdentity, hash_file


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    return now_s


def test_lines_come_late_and_ever_less_often(clock):
    """Catches a log that is filled by a line for each row, and hours of silence."""
    told: list[str] = []
    lines = ProgressLines(told.append)
    for second in range(600):
        clock[0] = 100.0 + second
        lines.show("loading", second, 600, "units")
    assert told[0] == "loading: 2 of 600 units" and len(told) < 16
    assert "loading: 599 of 600 units" > told[-1] > "loading: 540 of 600 units"
    lines.show("tokenizing", 1, None, "rows")  # of other work, which has just begun
    clock[0] += 100
    lines.show("tokenizing", 0, None, "")  # a phase without a count
    assert not told[-1].startswith("tokenizing")


def test_short_work_and_other_ranks_are_silent(clock):
    """Catches a line on each of 8 ranks, and of what is over in a blink."""
    for seconds, is_shown, expected in ((1, True, ""), (3, False, ""), (3, True, "lorashard: hashing: 1.5 GiB of")):
        stream = io.StringIO()
        with told_progress("hashing", is_shown, stream=stream) as tell:
            tell(0, 2 * 2**30, "bytes hashed")
            clock[0] += seconds
            tell(3 * 2**29, 2 * 2**30, "bytes hashed")
        assert stream.getvalue().startswith(expected) and bool(stream.getvalue()) == bool(expected)
        assert "\r" not in stream.getvalue()


def test_work_that_does_not_count_is_named_while_it_lasts(monkeypatch, capsys):
    """Catches a probe that takes ten seconds in silence, and a line after the end of a short one."""
    with told_work("a short probe"), told_work("another rank's", is_shown=False, silent_s=0):
        pass
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with told_work("probing", silent_s=0.01):
        deadline_s = time.monotonic() + 30
        while not told.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert told.getvalue() == "lorashard: probing ...\n" and capsys.readouterr().err == ""


def test_amounts_are_for_people():
    """Catches 1610612736 in place of 1.5 GiB, on the console and in the web UI."""
    assert show_amount(3 * 2**29, None, "bytes") == "1.5 GiB"
    assert show_amount(2**20, 2**21, "bytes hashed") == "1.0 MiB of 2.0 MiB hashed"
    assert show_amount(1200, 4800, "rows") == "1,200 of 4,800 rows"


def test_who_waits_for_another_process_to_convert_hears_how_far_that_is(tmp_path: Path, monkeypatch):
    """Catches rank 0's bar standing still for minutes, since rank 1 came first and converts."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    weights = [FoundWeight(name, nn.Parameter(torch.ones(4), requires_grad=False)) for name in "ab"]
    units = [FoundUnit(f"layers.{number}", LAYER, [weight]) for number, weight in enumerate(weights)]
    has_begun, is_heard = threading.Event(), threading.Event()

    def hold_up(*_) -> None:  # after its first unit
        has_begun.set()
        assert is_heard.wait(30)

    def hear(*counts) -> None:
        told.append(counts)
        is_heard.set()

    def make(progress) -> None:
        made = converted.ConvertedUnits(units, MemorySource(), [])
        made.make(torch.device("cpu"), converted.FOR_FILE, progress)

    told: list[tuple[int, int | None, str]] = []
    first = threading.Thread(target=make, args=(hold_up,))
    first.start()
    assert has_begun.wait(30)
    make(hear)
    first.join()
    assert told[0] == (1, 2, "units converted")


def test_hashing_tells_how_many_bytes_are_done(tmp_path: Path, monkeypatch):
    """Catches the silence of the first load of 140 GB, and a hash that is another one for being counted.

    Files that were hashed before, or are named by the hub's cache, count as hashed: the bar would end at 5 of 140 GB.
    """
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    later_s = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later_s)  # files that have just been written are not remembered
    blob = tmp_path / "blobs" / ("0" * 64)
    blob.parent.mkdir()
    contents = {tmp_path / "known": b"k" * 1000, tmp_path / "new": b"n" * 2**20, blob: b"b" * 3000}
    for file, content in contents.items():
        file.write_bytes(content)
    hash_file(tmp_path / "known")
    assert (tmp_path / "lorashard" / "hashes.json").exists()
    told: list[tuple[int, int | None, str]] = []
    identity = BaseIdentity.of(list(contents), lambda *counts: told.append(counts))
    hashes = {file.name: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
    assert identity.files == hashes | {blob.name: blob.name}
    total = 2**20 + 4000
    assert len(told) > 4 and told[-1] == (total, total, "bytes hashed")
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)


def test_progress_is_written_for_the_program_that_asked(tmp_path, monkeypatch):
    """Catches a web UI that has to read sentences, a rank that writes though it is silent, and a full disk that stops
    the work."""
    file = tmp_path / "progress.json"
    monkeypatch.setenv(PROGRESS_FILE_VARIABLE, str(file))
    with told_progress("merging", is_shown=False) as progress:
        progress(1, 12, "units")
    assert not file.exists()
    with told_progress("merging") as progress:
        progress(3, 12, "units")
    assert json.loads(file.read_text()) == {"what": "merging", "done": 3, "total": 12, "unit": "units"}
    monkeypatch.setenv(PROGRESS_FILE_VARIABLE, str(tmp_path / "gone" / "progress.json"))
    with told_progress("merging") as progress:
        progress(4, 12, "units")
