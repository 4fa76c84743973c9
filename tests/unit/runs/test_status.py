"""status.json: where a run stands, as whoever looks at its folder reads it."""

from __future__ import annotations

import json
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lorashard.errors import ConfigError, RunStopped
from lorashard.runs.events import EventLog
from lorashard.runs.folder import Run
from lorashard.runs.status import Status, told_status
from lorashard.runtime.failures import Failure
from lorashard.training.callbacks import RunCallback
from lorashard.training.meter import RankMeter


def read(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_progress_is_written_once_a_second_and_no_more(tmp_path, monkeypatch):
    """A disk written to in each step, which a network drive makes slow; progress that comes with phases alone."""
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    written: list[str] = []
    files = SimpleNamespace(replace=lambda path, text: written.append(text))
    status = Status(tmp_path, {}, SimpleNamespace(files=files))
    status.enter("tokenize")
    for done in range(30):
        status.advance(done, 30, "rows")
        now_s[0] += 0.125
    found = [json.loads(text)["progress"] for text in written]
    assert [progress and progress["done"] for progress in found] == [None, 8, 16, 24]
    assert found[-1] == {"done": 24, "total": 30, "unit": "rows"}
    status.enter("load")
    assert json.loads(written[-1])["progress"] is None


def test_a_slow_disk_is_written_to_less_often(tmp_path, monkeypatch):
    """Steps that wait for a network drive: half a second in each, or a drive that is never written to again."""
    now_s = [100.0]
    write_s, written = 0.5, []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def replace(path: Path, text: str) -> None:
        written.append(now_s[0])
        now_s[0] += write_s

    status = Status(tmp_path, {}, SimpleNamespace(files=SimpleNamespace(replace=replace)))
    status.enter("train")
    for step in range(80):
        status.advance(step, 80, "steps")
        now_s[0] += 1
    assert written == [100.0, 130.5, 161.0]
    status.enter("save")  # a phase is told at once
    assert len(written) == 4


def test_an_end_tells_the_last_step_though_it_was_not_its_turn_to_be_written(tmp_path):
    """A run that has saved step 9 and is shown to have ended at step 5, or as its launcher saw it: at no step."""
    launcher = Status.begin(tmp_path)
    run = Run(tmp_path, 0, 2)
    for step in range(10):
        run.note_step(step, 20)
    assert read(tmp_path)["step"] == 0
    for status, phase, error in ((run.status, "stopped", "SIGTERM"), (launcher, "failed", "boom")):
        launcher.hear_ranks()
        status.end(phase, Failure(1, error, "crash"))
        said = read(tmp_path)
        assert (said["step"], said["max_steps"], said["phase"], said["error"]) == (9, 20, phase, error)


def test_ranks_go_on_with_what_the_launcher_has_said(tmp_path):
    """A start, a reason of a restart or a beginning that is forgotten as ranks begin; a queue left long ago."""
    launcher = Status.begin(tmp_path)
    launcher.enter("queue", queue={"place": 1, "waits_for": "GPU 0"})
    assert read(tmp_path)["queue"]["place"] == 1
    launcher.enter("start", world_size=2)
    Run(tmp_path, 0, 2).status.add(has_begun=True)
    launcher.record_restart(Failure(1, "it died", "killed", rank=1), 1, 2)
    rank = Run(tmp_path, 0, 2).status
    rank.enter("tokenize")
    status = read(tmp_path)
    [restart] = status["restarts"]
    assert (restart["number"], restart["max_restarts"], restart["failure"]["rank"]) == (1, 2, 1)
    assert status["has_begun"] and status["world_size"] == 2
    assert "queue" not in status and status["begin_s"] <= status["phase_begin_s"] <= status["time"]
    assert Status.begin(tmp_path) and read(tmp_path).keys().isdisjoint({"restarts", "has_begun", "world_size"})


@pytest.mark.parametrize(
    ("error", "phase", "words"),
    [
        (ConfigError("no such model"), "failed", "no such model"),
        (RunStopped("stopped by SIGTERM"), "stopped", "stopped by SIGTERM"),
        (KeyboardInterrupt(), "stopped", "stopped by SIGINT"),
        (OSError("boom"), "failed", "OSError: boom"),
    ],
)
def test_what_ends_a_run_before_its_ranks_is_told(tmp_path, error, phase, words):
    """A run that says for ever that it starts, or is shown at the step of the one before."""
    Run(tmp_path, 0, 2).status.enter("train", step=30)
    with pytest.raises(type(error)), told_status(tmp_path) as status:
        status.enter("download")
        raise error
    status = read(tmp_path)
    assert (status["phase"], status["error"], "step" in status) == (phase, words, False)


def test_what_a_rank_says_of_its_end_stays(tmp_path):
    """The step at which a rank saved, overwritten by the process around it, which knows less."""
    with pytest.raises(RunStopped), told_status(tmp_path):
        saved = Failure.of_error(RunStopped(signal="SIGTERM", step=3, checkpoint="checkpoint-3"))
        Status.carry_on(tmp_path, EventLog(tmp_path, 0, print)).end("stopped", saved)
        raise RunStopped("stopped")
    assert read(tmp_path)["failure"]["fields"]["step"] == 3


def test_the_heartbeat_is_told_the_step_that_is_being_done(tmp_path):
    """A rank that hangs in step 8 and is said to stand in the finished step 7, or to load in step 7."""
    status = Status(tmp_path, {"step": 7}, None)
    places = []
    for phase in ("tokenize", "train", "save"):
        status.enter(phase)
        places.append(status.place)
    assert places == [("tokenize", None), ("train", 8), ("save", 7)]
    assert not (tmp_path / "status.json").exists()  # other ranks than the first write nothing


def make_meter() -> RankMeter:
    names = ("bytes_at_rest", "host_bytes_at_rest", "slot_bytes", "peak_unsharded_bytes", "num_gathers")
    stats = SimpleNamespace(**dict.fromkeys((*names, "gathered_bytes", "copied_bytes"), 1), wait_s=0.5)
    return RankMeter(SimpleNamespace(stats=lambda: stats), 10)


def test_a_cpu_rank_tells_how_busy_it_is():
    """A percentage since the process began, or none."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    meter = make_meter()
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass
    line = meter.read()
    assert line["cpu_percent"] > 10 and abs(line["time"] - time.time()) < 5


@pytest.fixture
def gpu(monkeypatch) -> dict:
    """What a GPU's driver answers, by torch's names of the questions; an exception is raised."""
    answers = {"max_memory_allocated": 5, "mem_get_info": (3, 10), "utilization": 99, "temperature": 40}

    def answer(name: str):
        found = answers[name]() if callable(answers[name]) else answers[name]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in answers:
        monkeypatch.setattr(torch.cuda, name, partial(answer, name))
    return answers


def test_a_driver_that_does_not_answer_is_not_asked_again(monkeypatch, gpu):
    """A run that ends because a library or a right is missing, or that asks in vain at each logged step."""
    asked: list[float] = []
    gpu["utilization"] = lambda: asked.append(now_s[0]) or ModuleNotFoundError("nvidia-ml-py")
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    meter = make_meter()
    for now_s[0] in (100.0, 110.0):
        line = meter.read()
        found = line["device_total_bytes"], line["device_used_bytes"], line["temperature_c"]
        assert found == (10, 7, 40) and "utilization_percent" not in line
    assert asked == [100.0]


def test_a_driver_is_not_asked_in_each_of_many_short_steps(monkeypatch, gpu):
    """Milliseconds of each step, at logging_steps 1; or a temperature that never changes."""
    gpu["temperature"] = count(41).__next__
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    meter = make_meter()
    found = []
    for _ in range(8):
        line = meter.read()
        assert line["device_used_bytes"] == 7 and line["utilization_percent"] == 99
        found.append(line["temperature_c"])
        now_s[0] += 0.5
    assert found == [41, 41, 41, 41, 42, 42, 42, 42]


def test_the_peak_of_device_memory_is_that_of_training(monkeypatch, gpu, tmp_path):
    """Catches a plan that looks wrong by what loading or the probe took at once, before the first step."""
    gpu["max_memory_allocated"] = 80
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: gpu.update(max_memory_allocated=5))
    meter = make_meter()
    RunCallback(Run(tmp_path, 0, 1), meter).on_train_begin(None, SimpleNamespace(global_step=0, max_steps=1), None)
    assert meter.read()["device_peak_bytes"] == 5
