"""How far long work is: told where it is long, on one rank, once a while; nothing of what is short."""

from __future__ import annotations

import hashlib
import io
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lorashard.model import converted
from lorashard.model.sources import MemorySource
from lorashard.model.units import LAYER, FoundUnit, FoundWeight
from lorashard.runtime import progress
from lorashard.runtime.progress import ProgressLines, show_amount, told_progress, told_work
from lorashard.weights import fingerprint as identities
from lorashard.weights.fingerprint import BaseIdentity


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
    monkeypatch.setattr(progress, "_SILENT_S", 0.05)
    with told_work("measuring the speeds"):
        pass
    with told_work("on another rank", is_shown=False):
        time.sleep(0.1)
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    with told_work("measuring the speeds"):
        time.sleep(0.2)
        assert capsys.readouterr().err == "lorashard: measuring the speeds ...\n"


def test_amounts_are_for_people():
    """Catches 1610612736 in place of 1.5 GiB, on the console and in the web UI."""
    assert show_amount(3 * 2**29, None, "bytes") == "1.5 GiB"
    assert show_amount(2**20, 2**21, "bytes hashed") == "1.0 MiB of 2.0 MiB hashed"
    assert show_amount(1200, 4800, "rows") == "1,200 of 4,800 rows"


def test_hashing_tells_how_many_bytes_it_has_read(tmp_path: Path, monkeypatch):
    """Catches the silence of the first load of 140 GB, and a hash that is another one for being counted."""
    monkeypatch.setattr("lorashard.weights.fingerprint.find_cache_dir", lambda: tmp_path / "cache")
    contents = {"a.safetensors": b"a" * 2**20, "b.safetensors": b"b" * 10}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    told: list[tuple[int, int | None, str]] = []
    identity = BaseIdentity.of([tmp_path / name for name in contents], lambda *counts: told.append(counts))
    assert identity.files == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    total = sum(map(len, contents.values()))
    assert len(told) > 2 and told[-1] == (total, total, "bytes hashed")
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)


def test_who_waits_for_another_process_to_convert_hears_how_far_that_is(tmp_path: Path, monkeypatch):
    """Catches rank 0's bar standing still for minutes, since rank 1 came first and converts."""
    monkeypatch.setattr(converted, "find_cache_dir", lambda: tmp_path)
    weights = [FoundWeight(name, nn.Parameter(torch.ones(4), requires_grad=False)) for name in "ab"]
    units = [FoundUnit(f"layers.{number}", LAYER, [weight]) for number, weight in enumerate(weights)]
    write, has_begun, is_heard = converted._write, threading.Event(), threading.Event()

    def write_slowly(*given) -> None:
        write(*given)
        has_begun.set()
        assert is_heard.wait(30)

    def hear(*counts) -> None:
        told.append(counts)
        is_heard.set()

    def make(progress) -> None:
        made = converted.ConvertedUnits(units, MemorySource(), [])
        made.make(torch.device("cpu"), converted.FOR_FILE, progress)

    monkeypatch.setattr(converted, "_write", write_slowly)
    told: list[tuple[int, int | None, str]] = []
    first = threading.Thread(target=make, args=(lambda *counts: None,))
    first.start()
    assert has_begun.wait(30)
    make(hear)
    first.join()
    assert told[0] == (1, 2, "units converted")


def test_files_whose_hash_is_known_count_as_hashed(tmp_path: Path, monkeypatch):
    """Catches a bar that ends at 5 of 140 GB, since the other files were hashed before or named by the hub's cache."""
    monkeypatch.setattr(identities, "find_cache_dir", lambda: tmp_path / "cache")
    later_s = time.time() + 60
    monkeypatch.setattr(
        identities.time, "time", lambda: later_s
    )  # files that have just been written are not remembered
    blob = tmp_path / "blobs" / ("0" * 64)
    files = [tmp_path / "known.safetensors", tmp_path / "new.safetensors", blob]
    blob.parent.mkdir()
    for number, file in enumerate(files):
        file.write_bytes(b"x" * 1000 * (number + 1))
    identities.hash_file(files[0])
    assert (tmp_path / "cache" / "hashes.json").exists()
    told: list[tuple[int, int | None, str]] = []
    BaseIdentity.of(files, lambda *counts: told.append(counts))
    assert told[-1] == (6000, 6000, "bytes hashed")
