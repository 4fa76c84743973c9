"""The record of the GPU's benchmark: what a call measures, what it leaves to the next, and what ends a row."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from helpers.paths import ROOT
from helpers.waiting import wait_until


@pytest.fixture
def gpu_record(monkeypatch):
    """benchmarks/gpu_record.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_record

    return gpu_record


@pytest.fixture
def open_record(gpu_record, tmp_path):
    """Open the record as a call does: `open_record()`, or on a machine with other versions."""

    def open_record(torch: str = "2.13.0"):
        machine = {"device": "NVIDIA H200", "versions": {"torch": torch}}
        return gpu_record.Record(tmp_path / "record.json", machine, {"commit": "abc"}, lambda rows: {"rows": len(rows)})

    return open_record


class FakeGpu:
    """Takes for each row the seconds that it is told, less if it is ended before."""

    def __init__(self, seconds: dict[str, float], path: Path) -> None:
        self.now_s = 0.0
        self.seconds = seconds
        self.measured: list[str] = []
        self._path = path

    def measure(self, row, most_s: float) -> dict:
        on_disk = json.loads(self._path.read_text())["rows"] if self._path.exists() else {}
        assert set(self.measured) <= on_disk.keys(), "a row that was measured is not in the file yet"
        self.measured.append(row.name)
        self.now_s += min(self.seconds[row.name], most_s)
        if self.seconds[row.name] > most_s:
            return {"error": f"took longer than {most_s:.0f} s"}
        return {"error": "OutOfMemoryError"} if row.name == "large" else {"batches": {}}


def test_a_call_measures_what_fits_and_the_next_one_the_rest(gpu_record, open_record, tmp_path):
    """Catches a row that is measured twice or begun without time, and a failure that is tried again forever."""
    rows = [gpu_record.Row(name, 100) for name in ("first", "large", "hanging", "fourth")]
    gpu = FakeGpu({"first": 40, "large": 10, "hanging": 1000, "fourth": 30}, tmp_path / "record.json")

    def call(seconds: float, chosen: list) -> list[str]:
        gpu.measured.clear()
        record = open_record()
        pending = [row for row in chosen if not record.is_measured(row)]
        end_s = gpu.now_s + seconds + gpu_record.GRACE_S
        return [row.name for row in gpu_record.measure_rows(pending, record, gpu.measure, end_s, lambda: gpu.now_s)]

    assert call(145, rows) == ["hanging", "fourth"] and gpu.measured == ["first", "large"]
    assert call(110, rows) == ["fourth"] and gpu.measured == ["hanging"]
    assert call(150, rows) == [] and gpu.measured == ["fourth"]
    assert call(1000, rows) == [] and gpu.measured == []
    record = open_record()
    found = {name: row.get("error") for name, row in record.rows.items()}
    assert found == {"first": None, "large": "OutOfMemoryError", "hanging": "took longer than 100 s", "fourth": None}
    assert [record.expect_s(row) for row in rows] == [pytest.approx(52), 100, 100, pytest.approx(39)]


def test_a_row_that_a_call_had_to_end_is_not_measured(gpu_record, open_record, tmp_path):
    """Catches a call's own end told as a contender's: the row is begun since it took less before, and takes longer."""
    row = gpu_record.Row("row", 100)
    gpu = FakeGpu({"row": 10}, tmp_path / "record.json")
    assert gpu_record.measure_rows([row], open_record(), gpu.measure, 200, lambda: gpu.now_s) == []
    gpu.seconds["row"], end_s = 50, gpu.now_s + 30 + gpu_record.GRACE_S
    assert gpu_record.measure_rows([row], open_record(), gpu.measure, end_s, lambda: gpu.now_s) == [row]
    assert gpu.measured == ["row", "row"] and gpu.now_s == 40 and "error" not in open_record().rows["row"]


def test_a_row_is_measured_again_where_anything_that_it_depends_on_differs(gpu_record, open_record, monkeypatch):
    """Catches figures of other code, versions or settings taken for those of these."""
    row = gpu_record.Row("row", 100, {"batches": ((1, 16),)})
    peer = gpu_record.Row("peer", 100, is_own=False)
    record = open_record()
    for each in (row, peer):
        assert record.find_differences(each) is None
        record.put(each, {}, 1.0)
    assert open_record().is_measured(row) and open_record().is_measured(peer)
    assert open_record("2.11.0").find_differences(row) == ["versions"]
    assert record.find_differences(gpu_record.Row("row", 100, {"batches": ((1, 32),)})) == ["settings"]
    monkeypatch.setattr(gpu_record, "hash_code", lambda has_lorashard: str(has_lorashard))
    assert record.find_differences(row) == ["code"]


def test_lorashards_code_decides_only_its_own_rows(gpu_record, monkeypatch, tmp_path):
    """Catches peers that are measured anew with each commit, and lorashard's rows that are not."""
    for name in ("benchmarks/gpu_jobs.py", "lorashard/engine/unit.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    for name in ("common", "contenders", "gpu_finetune", "gpu_jobs", "random_base"):
        (tmp_path / "benchmarks" / f"{name}.py").write_text("")
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    hashes = []
    for name in (None, "lorashard/engine/unit.py", "benchmarks/gpu_jobs.py"):
        if name:
            (tmp_path / name).write_text("changed = True")
        hashes.append((gpu_record.hash_code(True), gpu_record.hash_code(False)))
    own, peers = zip(*hashes, strict=True)
    assert len(set(own)) == 3 and peers[0] == peers[1] != peers[2]


def test_a_process_that_hangs_is_ended_with_all_that_it_started(gpu_record, tmp_path):
    """Catches a call that waits forever, and ranks that hold the GPU's memory when the next row begins."""
    import common

    child = f"trap '' TERM; echo $$ > {tmp_path}/pid; sleep 100; sleep 100"
    command = ["sh", "-c", 'trap "" TERM; sh -c "$0" & wait; sleep 100', child]
    assert common.run_process(command, 1, "cpu", 3.0, grace_s=0.1) == "took longer than 3 s"
    pid = int((tmp_path / "pid").read_text())

    def is_over() -> bool:
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    wait_until(is_over)
    assert common.run_process(["sh", "-c", "exit 3"], 1, "cpu", 60) == "ended with exit code 3"
