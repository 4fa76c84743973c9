"""Alerts: what is wrong, of which rank, and what to do; and nothing where all is well."""

import errno
import json
import math
import os
import shutil
import signal
import time

import psutil
import pytest
import torch
from helpers.ui_runs import make_rank_lines, make_run, make_steps, owned, write_lines
from helpers.waiting import wait_until

from lorashard.errors import ConfigError, RunStopped, TrainingError
from lorashard.runs.checkpoints import place_partial, publish
from lorashard.runs.events import EventLog
from lorashard.runs.status import Status
from lorashard.runtime.failures import Failure
from lorashard_ui.reading.runs import Runs

NOW = time.time()


def find(tmp_path, kind=None, later_s=0.0):
    found = Runs(tmp_path).get("one").alerts(time.time() + later_s)
    return [alert for alert in found if kind in (None, alert.kind)]


def make_live(tmp_path, name="one", age_s=1.0, **options):
    """Write a run that trains: its last lines are so old."""
    begin_s = time.time() - age_s - 20 * 2.0
    folder = make_run(tmp_path, name, steps=0, num_ranks=0, **{"phase": "train", "step": 20} | options)
    write_lines(folder / "metrics.jsonl", make_steps(range(1, 21), begin_s=begin_s), mode="w")
    for rank in range(2):
        write_lines(folder / f"ranks/rank_{rank}.jsonl", make_rank_lines(range(1, 21), begin_s=begin_s))
    for path in folder.rglob("*.jsonl"):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def fail(folder, failure):
    """Have the run end as its launcher ends it."""
    Status.carry_on(folder, EventLog(folder, None, print)).end("failed", failure)


def test_a_healthy_run_has_no_alerts(tmp_path):
    """One that always shows something is soon not looked at any more."""
    folder = make_live(tmp_path)
    with owned(folder):
        assert find(tmp_path) == []
    make_run(tmp_path, "two")
    assert Runs(tmp_path).get("two").alerts() == []


def test_a_lost_rank_is_named_with_the_way_back(tmp_path):
    """`The run failed` sends the person through eight logs."""
    folder = make_run(tmp_path)
    fail(folder, Failure(1, "rank 1 was killed by SIGKILL", "killed", rank=1))
    place_partial(folder / "checkpoint-5").mkdir()
    publish(folder / "checkpoint-5", {})
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.severity, alert.rank, alert.step) == ("failed", "error", 1, 10)
    assert "SIGKILL" in alert.sentence and "checkpoint-5" in alert.sentence
    assert [row.state for row in Runs(tmp_path).get("one").ranks()] == ["stopped", "failed"]


@pytest.mark.parametrize(
    "error, advice",
    [
        (OSError(errno.ENOSPC, "x"), "Free some room"),
        (torch.OutOfMemoryError("x"), "per_device_train_batch_size"),
        (TrainingError("x"), "Look at"),
        (ValueError("x"), "the launcher's log"),
    ],
)
def test_a_failure_is_told_with_what_to_do(tmp_path, error, advice):
    """The same advice for a full disk and for data that cannot be learned from sends the person to the wrong place."""
    fail(make_run(tmp_path), Failure.of_error(error))
    assert advice in find(tmp_path)[0].sentence


@pytest.mark.parametrize(
    "state, error, expected",
    [
        ("stopped", RunStopped(signal="SIGUSR1", step=7, checkpoint="/runs/one/checkpoint-7"), "saved in checkpoint-7"),
        ("stopped", RunStopped("nothing to save", signal="SIGTERM", fix="resume with --resume auto"), "press Resume"),
        ("failed", TrainingError("loss nan", fix="resume without (--on_nonfinite skip --resume auto)"), "a clone"),
        ("failed", ConfigError("no room", fix="give --global_batch_size 8"), "give global_batch_size 8"),
    ],
)
def test_an_end_is_told_in_words_of_the_page(tmp_path, state, error, expected):
    """Beside a button `Resume` stands `go on with --resume auto`, and what no button can do."""
    folder = make_run(tmp_path)
    Status.carry_on(folder, EventLog(folder, None, print)).end(state, Failure.of_error(error))
    (alert,) = find(tmp_path, state)
    assert expected in alert.sentence and "--" not in alert.sentence


def test_a_checkpoint_that_was_passed_over_is_told(tmp_path):
    """A resume goes back hundreds of steps, and nobody knows why."""
    folder = make_run(tmp_path)
    EventLog(folder, 0, print).emit("checkpoint_skipped", step=7, checkpoint="checkpoint-7", problem="it is damaged")
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.step) == ("checkpoint", 7) and "checkpoint-7" in alert.sentence


def test_a_run_that_was_stopped_is_no_error(tmp_path):
    """What the person did themselves needs no alarm; nor is any rank to blame."""
    make_run(tmp_path, phase="stopped", error="stopped by SIGTERM at step 10, rank 0 ...")
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.severity, alert.rank) == ("stopped", "info", None)
    assert [row.state for row in Runs(tmp_path).get("one").ranks()] == ["stopped", "stopped"]


def test_a_dead_run_is_an_error(tmp_path):
    """It looks like one that is just slow."""
    make_run(tmp_path, phase="train")
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.severity) == ("dead", "error")


def note(folder, rank, **fields):
    """Have a rank record values of step 7."""
    EventLog(folder, rank, print).emit("nonfinite", step=7, is_skipped=True, **fields)


def test_nan_is_told_with_the_rank_and_its_rows(tmp_path):
    """Every rank notes its own losses, those that are fine too: the wrong one is blamed."""
    folder = make_run(tmp_path)
    note(folder, 0, losses=["1.5"], rows=[["row 4"]], grad_norm=math.nan)
    note(folder, 1, losses=["2.0", "nan"], rows=[["row 5"], ["row 6", "row 7"]], grad_norm=math.nan)
    write_lines(folder / "metrics.jsonl", [{"step": 11, "time": NOW, "loss": 1.0, "skipped_steps": 1}])
    first, second = find(tmp_path)
    assert (first.kind, first.severity, first.rank, first.step) == ("nan", "error", 1, 7)
    assert all(word in first.sentence for word in ("nan", "step 7", "row 6, row 7:")) and "row 5" not in first.sentence
    assert (second.severity, second.rank) == ("warning", None) and "1 step was" in second.sentence


def test_an_infinite_norm_over_finite_losses_blames_no_rank(tmp_path):
    """The norm is the same on all ranks."""
    folder = make_run(tmp_path)
    for rank in range(2):
        note(folder, rank, losses=["1.5"], rows=[["row 4"]], grad_norm=math.inf)
    (alert,) = find(tmp_path)
    assert alert.rank is None and "inf at step 7" in alert.sentence


def test_nan_in_the_metrics_alone_is_told_once(tmp_path):
    """Runs that log NaN go on: transformers hides it otherwise. A line for each step would bury all else."""
    folder = make_run(tmp_path)
    rows = [row | {"loss": "nan"} for row in make_steps(range(11, 40))]
    write_lines(folder / "metrics.jsonl", rows)
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.step) == ("nan", 39)
    assert "26 earlier steps" in alert.sentence and "37, 38, 39" in alert.sentence


def test_restarts_are_told_with_their_reasons(tmp_path):
    """A run that starts again each hour looks well at any moment."""
    folder = make_run(tmp_path)
    status = Status.carry_on(folder, EventLog(folder, None, print))
    status.record_restart(Failure(1, "SIGSEGV", "killed", rank=2), 1, 3)
    status.record_restart(Failure(1, "boom", "crash", rank=0), 2, 3)
    status.end("done")
    assert [(alert.kind, alert.rank) for alert in find(tmp_path)] == [("restart", 2), ("restart", 0)]
    assert all(word in find(tmp_path)[0].sentence for word in ("1 of 3", "SIGSEGV", "rank 2"))
    said = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(said | {"restarts": ["1 of 3: boom"]}))  # of an earlier version
    assert "boom" in find(tmp_path)[0].sentence


def test_a_stall_is_told_with_the_rank_that_is_behind(tmp_path):
    """A run that hangs shows its last loss for ever."""
    folder = make_live(tmp_path, age_s=300, time=time.time() - 300)
    write_lines(folder / "ranks/rank_0.jsonl", make_rank_lines([21], begin_s=time.time() - 300 - 42))
    with owned(folder, since_s=1000.0):
        (alert,) = find(tmp_path)
        assert (alert.kind, alert.severity, alert.rank) == ("stall", "warning", 1)
        assert all(word in alert.sentence for word in ("5 min", "2 s", "train", "step 20", "rank 1 (step 20)"))
        assert [row.state for row in Runs(tmp_path).get("one").ranks()] == ["running", "behind"]


@pytest.mark.parametrize("phase, age_s", [("train", 20), ("evaluate", 100), ("download", 250), ("queue", 9999)])
def test_a_pause_that_is_usual_is_no_stall(tmp_path, phase, age_s):
    """An evaluation or a large file says nothing for a while, a queue for days."""
    folder = make_live(tmp_path, age_s=age_s, phase=phase, time=time.time() - age_s)
    with owned(folder, since_s=1000.0):
        assert find(tmp_path, "stall") == []


def test_a_start_that_has_just_begun_is_no_stall(tmp_path):
    """A run that was resumed an hour after its stop is said to have been silent for that hour."""
    folder = make_live(tmp_path, age_s=3600, phase="start", time=time.time() - 3600)
    with owned(folder):
        assert find(tmp_path, "stall") == []


def test_steps_that_take_long_stall_later(tmp_path):
    """A run that logs once in ten minutes is taken for a stalled one all the time."""
    begin_s = time.time() - 900
    folder = make_run(tmp_path, steps=0, num_ranks=0, phase="train", step=3, time=begin_s)
    write_lines(folder / "metrics.jsonl", make_steps(range(1, 4), begin_s=begin_s - 1800, pace_s=600), mode="w")
    os.utime(folder / "metrics.jsonl", (begin_s, begin_s))
    with owned(folder, since_s=1000.0):
        assert find(tmp_path, "stall") == []


def test_a_stopped_process_is_found_out(tmp_path):
    """Ctrl-Z in a terminal somewhere: no log says so."""
    folder = make_live(tmp_path)
    with owned(folder) as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        assert find(tmp_path, "stall") == []
        (alert,) = find(tmp_path, "stall", later_s=300)
        assert f"kill -CONT {process.pid}" in alert.sentence


def test_a_disk_without_room_for_two_checkpoints_is_told(tmp_path, monkeypatch):
    """A save that fails at night costs the night."""
    folder = make_live(tmp_path)
    place_partial(folder / "checkpoint-5").mkdir()
    (place_partial(folder / "checkpoint-5") / "optimizer.pt").write_bytes(bytes(1 << 20))
    publish(folder / "checkpoint-5", {})
    usage = shutil.disk_usage(folder)
    with owned(folder):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100 << 20))
        (alert,) = find(tmp_path)
        assert alert.kind == "disk" and "100.0 MiB" in alert.sentence and "1.0 MiB" in alert.sentence
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=300 << 20))
        assert find(tmp_path) == []
        os.truncate(folder / "checkpoint-5/optimizer.pt", 200 << 20)  # a second one beside it does not fit
        assert "disk" in [alert.kind for alert in find(tmp_path)]


def test_a_disk_that_refuses_is_told_until_it_takes_again(tmp_path):
    """The run says so in a log that nobody reads; or the alert stays when all is well again."""
    folder = make_run(tmp_path)
    events = EventLog(folder, 1, print)
    events.emit("disk_refused", path="/x/rank_1.jsonl", reason="No space left on device")
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.rank) == ("disk", 1) and "/x/rank_1.jsonl" in alert.sentence
    events.emit("disk_accepted", num_lines=3, num_lost=0)
    assert find(tmp_path) == []
    events.emit("checkpoint_failed", step=4, checkpoint="checkpoint-4", problem="No space left on device")
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.step) == ("disk", 4) and "checkpoint-4" in alert.sentence
    events.emit("checkpoint_saved", step=8, checkpoint="checkpoint-8")
    assert find(tmp_path) == []


def test_an_earlier_run_in_the_folder_is_not_told_of(tmp_path):
    """A new run, or one that was resumed before a step that was not finite, with the alerts of what it left behind."""
    folder = make_run(tmp_path)
    note(folder, 0, losses=["nan"], rows=[["row 4"]], grad_norm=math.nan)
    events = EventLog(folder, 0, print)
    assert [alert.kind for alert in find(tmp_path)] == ["nan"]
    events.emit("start", begin_s=time.time(), resumed_step=9, world_size=2)
    assert [alert.kind for alert in find(tmp_path)] == ["nan"]
    events.emit("start", begin_s=time.time(), resumed_step=6, world_size=2)
    assert find(tmp_path) == []


def test_a_damaged_checkpoint_is_told(tmp_path):
    """It is found out when it is needed."""
    folder = make_run(tmp_path)
    for step in (5, 9):
        place_partial(folder / f"checkpoint-{step}").mkdir()
        (place_partial(folder / f"checkpoint-{step}") / "optimizer.pt").write_bytes(bytes(100))
        publish(folder / f"checkpoint-{step}", {})
    (folder / "checkpoint-9/optimizer.pt").write_bytes(bytes(50))
    (alert,) = find(tmp_path)
    assert (alert.kind, alert.step) == ("checkpoint", 9)
    assert all(word in alert.sentence for word in ("100 bytes", "found 50", "checkpoint-5"))


def test_memory_above_the_plan_and_a_device_that_is_full_are_told(tmp_path):
    """The next longer batch ends the run; on CPU the plan says nothing of a process's memory."""
    folder = make_live(tmp_path)
    (folder / "plan.json").write_text(json.dumps({"rows": [{"peak_bytes": 10 << 30}], "chosen": 0}))
    with owned(folder):
        assert find(tmp_path) == []
        more = {"device_peak_bytes": 12 << 30, "device_used_bytes": 79 << 30, "device_total_bytes": 80 << 30}
        write_lines(folder / "ranks/rank_1.jsonl", make_rank_lines([21], begin_s=time.time() - 42, **more))
        above, full = find(tmp_path)
    assert (above.kind, above.rank, full.kind, full.rank) == ("memory", 1, "memory", 1)
    assert "12.0 GiB" in above.sentence and "2.0 GiB" in above.sentence
    assert "1.0 GiB of 80.0 GiB" in full.sentence


def test_the_slow_rank_is_the_one_that_does_not_wait(tmp_path):
    """The rank with the longest waits looks like the culprit; it is the one that the others wait for."""
    folder = make_live(tmp_path)
    for rank, wait_s in enumerate([1.0, 0.1, 0.9]):
        lines = make_rank_lines(range(1, 21), wait_s, begin_s=time.time() - 41, gathered_bytes=5, temperature_c=95)
        write_lines(folder / f"ranks/rank_{rank}.jsonl", lines, mode="w")
    with owned(folder):
        (alert,) = find(tmp_path, "slow")
        assert (alert.rank, alert.severity) == (1, "info") and "temperature 95 C" in alert.sentence
        assert [alert.rank for alert in find(tmp_path, "temperature")] == [0, 1, 2]
        (folder / "config.yaml").write_text("placement: file\n")
        assert find(tmp_path, "slow") == []


def test_the_worst_comes_first_and_shows_no_token(tmp_path):
    """An error that is below ten notes is not seen; a token in it is seen by all."""
    folder = make_run(tmp_path)
    failure = Failure(1, "401 for hf_abcdefghijklmnop", "crash", rank=0)
    Status.carry_on(folder, EventLog(folder, None, print)).record_restart(failure, 1, 1)
    fail(folder, failure)
    first, second = find(tmp_path)
    assert (first.kind, second.kind) == ("failed", "restart") and "abcdef" not in first.sentence
