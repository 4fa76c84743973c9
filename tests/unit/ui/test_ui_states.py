"""Whether a run waits, lives, has ended or has died, against real processes that own real locks."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from helpers.ui_runs import make_run, make_steps, owned, write_lines, write_status

from lorashard.runs.checkpoints import place_partial, publish
from lorashard_ui.reading.eta import describe_progress, estimate_rest, measure_pace, show_duration
from lorashard_ui.reading.states import find_state


def save_checkpoint(folder: Path, step: int) -> None:
    checkpoint = folder / f"checkpoint-{step}"
    place_partial(checkpoint).mkdir()
    (place_partial(checkpoint) / "adapter_model.safetensors").write_bytes(bytes(1000))
    publish(checkpoint, {})


def leave_exit(folder: Path, exit_code: int, message: str, at_s: float | None = None) -> None:
    """Do what the web UI's launcher of runs does when a run has ended."""
    ended = {"exit_code": exit_code, "time": at_s or time.time(), "failure": {"message": message}}
    (folder / "exit.json").write_text(json.dumps(ended))


def note_launch(folder: Path, pid: int, begin_s: float | None = None, waiter_pid: int = 1 << 30) -> None:
    """Do what it does when it starts one."""
    said = {"pid": pid, "begin_s": begin_s or time.time(), "waiter_pid": waiter_pid}
    (folder / ".launcher.json").write_text(json.dumps(said))


@pytest.mark.parametrize("phase", ["done", "failed", "stopped"])
def test_a_run_that_says_its_end_has_ended(tmp_path, phase):
    """An ended run of the command line, which leaves no exit code, is taken for dead."""
    state = find_state(make_run(tmp_path, phase=phase, error=None if phase == "done" else "because"))
    assert (state.name, state.error) == (phase, None if phase == "done" else "because")
    assert not state.is_live


@pytest.mark.parametrize(
    "phase, name",
    [
        ("queue", "queued"),
        ("start", "starting"),
        ("download", "starting"),
        ("tokenize", "starting"),
        ("load", "starting"),
        ("train", "running"),
        ("evaluate", "running"),
        ("save", "running"),
    ],
)
def test_a_run_that_lives_is_what_its_phase_says(tmp_path, phase, name):
    """A phase that nobody thought of makes a live run look dead, and its buttons go."""
    folder = make_run(tmp_path, phase=phase)
    with owned(folder):
        state = find_state(folder)
        assert (state.name, state.phase, state.error) == (name, phase, None) and state.is_live


def test_a_killed_run_is_dead_and_says_what_resume_does(tmp_path):
    """After a power cut status.json says `train` for ever; the person waits, or begins anew what could go on."""
    folder = make_run(tmp_path, phase="train", step=40)
    save_checkpoint(folder, 30)
    save_checkpoint(folder, 40)
    (folder / "checkpoint-40/adapter_model.safetensors").write_bytes(b"half")
    with owned(folder) as process:
        assert find_state(folder).name == "running"
        process.kill()
        process.wait()
        state = find_state(folder)
    assert state.name == "dead" and state.phase == "train"
    assert all(word in state.error for word in ("train", "step 40", "checkpoint-30"))


def test_a_dead_run_without_a_checkpoint_says_so(tmp_path):
    """The same sentence would promise a checkpoint that is not there."""
    assert "no complete checkpoint" in find_state(make_run(tmp_path, phase="load")).error


def test_a_restarted_run_is_not_what_the_one_before_has_said(tmp_path):
    """For some seconds the folder of a resumed run still says that it has failed."""
    folder = make_run(tmp_path, phase="failed", error="old", time=time.time() - 100)
    with owned(folder):
        state = find_state(folder)
        assert (state.name, state.phase, state.error) == ("starting", "start", None)


def test_a_run_that_was_just_asked_for_is_starting(tmp_path):
    """Python imports for seconds before the run owns its folder: it is shown as dead meanwhile, or as it was."""
    new = tmp_path / "new"
    new.mkdir()
    (new / "asked.yaml").write_text("dataset: rows.jsonl\n")
    assert find_state(new).name == "starting"
    assert find_state(new, time.time() + 1000).name == "dead"  # nothing came of it, and nobody lives
    for folder in (new, make_run(tmp_path, phase="stopped", time=time.time() - 5)):
        process = subprocess.Popen(["sleep", "60"])
        note_launch(folder, process.pid)
        assert (find_state(folder, time.time() + 1000).name, find_state(folder).phase) == ("starting", "start")
        (folder / ".stop").touch()
        assert find_state(folder).name == "stopping"
        process.kill()
        process.wait()
        assert find_state(folder).name == "dead"


def test_a_run_whose_exit_code_is_being_written_is_not_dead(tmp_path):
    """Between the end of a run's process and the note of how it ended, an error of the options looks like a crash."""
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "asked.yaml").write_text("dataset: rows.jsonl\n")
    note_launch(folder, 1 << 30, waiter_pid=os.getpid())
    assert find_state(folder).name == "starting"
    note_launch(folder, 1 << 30, waiter_pid=1 << 30)
    assert find_state(folder).name == "dead"


@pytest.mark.parametrize("phase", ["done", "failed", "stopped"])
def test_a_run_that_says_its_end_and_still_lives_is_stopping(tmp_path, phase):
    """Resume and delete are offered while its processes still hold the folder and the devices; or a lost rank's
    neighbor, which says first that its connection broke, is blamed until the launcher has looked."""
    folder = make_run(tmp_path, phase=phase, error="because", time=time.time() + 5)
    with owned(folder):
        state = find_state(folder)
        assert (state.name, state.phase, state.error) == ("stopping", phase, None) and state.is_live
        assert describe_progress(state, [], None).sentence.startswith("Ending")
    assert find_state(folder).name == phase


def test_a_process_that_has_been_given_the_number_of_a_run_is_not_it(tmp_path):
    """After a restart of the machine some other program has the number: the dead run is starting for ever."""
    folder = make_run(tmp_path, phase="train", time=1000.0)
    note_launch(folder, os.getpid(), begin_s=900.0)
    assert find_state(folder).name == "dead"


@pytest.mark.parametrize(
    "exit_code, name, word",
    [(2, "failed", "no such model"), (0, "done", None), (75, "stopped", "no such model"), (137, "dead", "SIGKILL")],
)
def test_an_exit_code_tells_how_a_run_ended_that_could_not_say_it(tmp_path, exit_code, name, word):
    """A mistake that the launcher finds before the run begins leaves no status at all."""
    folder = tmp_path / "new"
    (folder / "logs").mkdir(parents=True)
    (folder / "asked.yaml").write_text("dataset: rows.jsonl\n")
    leave_exit(folder, exit_code, "no such model")
    state = find_state(folder)
    assert state.name == name
    assert state.error is None if word is None else word in state.error


def test_the_newer_of_status_and_exit_code_counts(tmp_path):
    """A resumed run that fails at once is shown as stopped, as it was before; or a later one as failed, as it was."""
    now_s = time.time()
    folder = make_run(tmp_path, phase="stopped", error="stopped by SIGTERM", time=now_s - 50)
    note_launch(folder, 1 << 30, begin_s=now_s - 10)
    leave_exit(folder, 2, "a new mistake", now_s - 9)
    assert (find_state(folder).name, find_state(folder).error) == ("failed", "a new mistake")
    write_status(folder, {"phase": "done", "time": now_s})  # started later, on the command line
    assert find_state(folder).name == "done"
    write_status(folder, {"phase": "failed", "error": "its own words", "time": now_s - 9.5})
    assert find_state(folder).error == "its own words"
    write_status(folder, {"phase": "train", "time": now_s - 9.5})
    assert find_state(folder).name == "failed"


def test_a_run_that_was_asked_to_stop_is_stopping(tmp_path):
    """The button seems to do nothing until the step and the save are over; an older request stops no later run."""
    folder = make_run(tmp_path, phase="train")
    (folder / ".stop").touch()
    os.utime(folder / ".stop", (1, 1))
    with owned(folder):
        assert find_state(folder).name == "running"
        (folder / ".stop").touch()
        assert find_state(folder).name == "stopping"


def test_an_owner_of_another_machine_counts_as_alive(tmp_path):
    """On a shared disk without flock nobody can know; dead is what lets a person delete it."""
    folder = make_run(tmp_path, phase="train")
    (folder / ".lock.soft").write_text("123\nelsewhere\n")
    (folder / ".owner.json").write_text(json.dumps({"pid": 123, "host": "elsewhere", "begin_s": time.time()}))
    state = find_state(folder)
    assert state.name == "running" and state.owner.host == "elsewhere" and not state.owner.is_here


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"phase": 7, "time": "x", "step": "nan"}', "\x00\xff"])
def test_a_damaged_status_is_no_crash(tmp_path, text):
    """One bad file takes the table of all runs away."""
    folder = make_run(tmp_path)
    (folder / "status.json").write_text(text)
    state = find_state(folder)
    assert state.name == "dead" and describe_progress(state, [], None).sentence


def test_the_pace_leaves_out_evaluations_and_one_long_pause():
    """A mean over the last steps counts a pause of an hour as if each step would have it."""
    rows = make_steps(range(1, 21), pace_s=2.0)
    late = make_steps(range(21, 31), begin_s=5000.0, pace_s=2.0)
    evaluation = [{"step": 20, "time": 4500.0, "eval_loss": 1.0}]
    assert measure_pace(rows + evaluation + late) == pytest.approx(2.0)
    assert measure_pace(rows + late) == pytest.approx(2.0)
    assert measure_pace(make_steps(range(10, 110, 10), pace_s=3.0)) == pytest.approx(3.0)  # logged each tenth step
    assert measure_pace([]) is None and measure_pace(rows[:1]) is None


def test_the_pace_of_an_earlier_start_does_not_count():
    """After a resume on more ranks the old pace would be shown for a long time."""
    rows = make_steps(range(1, 100), begin_s=0.0, pace_s=9.0) + make_steps(range(100, 110), begin_s=5000.0, pace_s=1.0)
    assert measure_pace(rows, begin_s=5000.0) == pytest.approx(1.0)


def test_the_rest_is_that_of_the_steps_to_come(tmp_path):
    """An ended run that still counts down, or a live one that counts from its begin."""
    folder = make_run(tmp_path, steps=10, phase="train", max_steps=100)
    rows = make_steps(range(1, 11), pace_s=2.0)
    with owned(folder):
        state = find_state(folder)
        assert estimate_rest(state, rows, now_s=rows[-1]["time"]) == pytest.approx(180)
        assert estimate_rest(state, rows, now_s=rows[-1]["time"] + 1) == pytest.approx(179)
    assert estimate_rest(find_state(folder), rows) is None


def test_a_phase_tells_how_far_it_is(tmp_path):
    """A download of an hour looks like a run that hangs."""
    said = {"done": 3 << 30, "total": 12 << 30, "unit": "bytes"}
    folder = make_run(tmp_path, phase="download", progress=said, phase_begin_s=1000.0, step=None, max_steps=None)
    write_lines(folder / "metrics.jsonl", [], mode="w")
    with owned(folder):
        progress = describe_progress(find_state(folder), [], None, now_s=1060.0)
    assert (progress.phase, progress.fraction, progress.unit) == ("download", 0.25, "bytes")
    assert progress.eta_s == pytest.approx(180)
    assert progress.sentence == "Downloading the model: 3.0 GiB of 12.0 GiB, about 3 min left"


def test_a_phase_of_unknown_length_has_no_fraction(tmp_path):
    """A division by nothing, or a bar that is full at once."""
    folder = make_run(tmp_path, phase="tokenize", progress={"done": 500, "total": None, "unit": "rows"}, step=None)
    with owned(folder):
        progress = describe_progress(find_state(folder), [], None)
    assert progress.fraction is None and progress.eta_s is None
    assert progress.sentence.startswith("Tokenizing the data: 500 rows")


def test_a_run_of_an_older_release_has_its_progress(tmp_path):
    """Before status.json told of phases' progress and of the begin, it told the steps."""
    folder = make_run(tmp_path, steps=25, phase="train")
    (folder / "versions.json").write_text("{}")
    with owned(folder):
        state = find_state(folder)
        progress = describe_progress(state, make_steps(range(1, 26)), 150.0)
    assert progress.fraction == 0.25 and progress.sentence == "Training: step 25 of 100, about 2 min left"
    assert state.begin_s is not None


def test_a_queued_run_says_what_it_waits_for(tmp_path):
    """The person cannot tell a queue that moves from one that is stuck."""
    why = "GPU 0 is held by the run first"
    folder = make_run(tmp_path, phase="queue", queue={"place": 2, "waits_for": why}, step=None, steps=0)
    with owned(folder):
        progress = describe_progress(find_state(folder), [], None)
    assert "place 2" in progress.sentence and why in progress.sentence


def test_durations_read_as_people_say_them():
    """`5400 s` is right and tells nobody anything."""
    shown = [show_duration(seconds) for seconds in (0.4, 45, 600, 12_000, 180_000)]
    assert shown == ["0 s", "45 s", "10 min", "3 h 20 min", "2 d 2 h"]
