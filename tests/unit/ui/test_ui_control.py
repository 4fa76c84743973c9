"""Runs that the web UI starts, stops, saves, resumes and deletes: real processes, most of which stand in for a run."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers.small_demo import DEMO, copy_small_demo
from helpers.waiting import wait_until

from lorashard.errors import ConfigError
from lorashard.runs.lock import find_owner, find_process, lock_run
from lorashard_ui.reading.runs import Runs
from lorashard_ui.running.control import (
    delete_merged,
    delete_run,
    explain_no_resume,
    resume_run,
    save_run,
    start_run,
    stop_run,
)
from lorashard_ui.running.jobs import Jobs

# Says which signals it got, and goes on.
DEAF = """
import signal, sys, time
from pathlib import Path
from lorashard.runs.lock import lock_run
heard = Path(sys.argv[1], "heard")
def note(number, frame):
    with heard.open("a") as file:  # never empty for a moment
        file.write(signal.Signals(number).name + " ")
for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    if number != signal.SIGUSR2 or "no-save" not in sys.argv:
        signal.signal(number, note)
with lock_run(Path(sys.argv[1])):
    while True:
        time.sleep(0.05)
"""


def make_yaml(max_steps: int = 2, cpu: int = 1, demo: Path = DEMO, **options: object) -> str:
    values = {
        "model_name_or_path": str(demo / "base"),
        "dataset": str(demo / "train.jsonl"),
        "dtype": "float32",
        "cpu": cpu,
        "max_steps": max_steps,
        "max_train_samples": 64,
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "heartbeat_timeout": 0,
    }
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in (values | options).items())


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    return copy_small_demo(tmp_path_factory.mktemp("small") / "demo")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of runs, of which none is left alive."""
    monkeypatch.setenv("LORASHARD_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    yield tmp_path / "runs"
    for file in tmp_path.glob("runs/*/.launcher.json"):
        record = json.loads(file.read_text())
        launcher = find_process(record["pid"], record["begin_s"])
        for process in (*launcher.children(recursive=True), launcher) if launcher else ():
            process.kill()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Have a shell script stand in for each Python that is started to run lorashard: `stand_in("exec sleep 60")`."""

    def stand_in(script: str) -> None:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\ncase "$*" in *detached.py*) exec {sys.executable} "$@";; esac\n{script}\n')
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))

    return stand_in


@pytest.fixture
def be_run(root):
    """Start a process that owns a run's folder and notes the signals it gets."""
    processes: list[subprocess.Popen] = []

    def be_run(name: str, *words: str, phase: str = "train") -> subprocess.Popen:
        folder = root / name
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(json.dumps({"phase": phase}))
        processes.append(subprocess.Popen([sys.executable, "-c", DEAF, str(folder), *words]))
        wait_until(lambda: (owner := find_owner(folder)) and owner.pid == processes[-1].pid)
        return processes[-1]

    yield be_run
    for process in processes:
        process.kill()
        process.wait()


def read_exit(root: Path, name: str) -> int | None:
    try:
        return json.loads((root / name / "exit.json").read_text())["exit_code"]
    except FileNotFoundError:
        return None


def read_log(root: Path, name: str) -> str:
    return (root / name / "logs" / "launcher.log").read_text(errors="replace")


def count_steps(root: Path, name: str) -> int:
    try:
        return (root / name / "metrics.jsonl").read_text().count('"loss"')
    except FileNotFoundError:
        return 0


def heard(root: Path, name: str) -> str:
    try:
        return (root / name / "heard").read_text()
    except FileNotFoundError:
        return ""


def refuse(*_: object) -> None:
    raise AssertionError("a process was started")


def test_a_run_outlives_a_killed_server(root, demo, forks):
    """A run that dies with its server, or whose end nobody is told after its restart; and pages that do not understand
    what a run writes."""
    script = (
        "import psutil, sys, time; from pathlib import Path; from lorashard_ui.running.control import start_run; "
        "start_run(Path(sys.argv[1]), 'first', sys.argv[2]); "
        "print('left', *psutil.Process().children(), flush=True); time.sleep(100)"
    )
    text = make_yaml(demo=demo, output_dir="/nowhere", save_strategy="steps", save_steps=1)
    words = [sys.executable, "-c", script, str(root), text]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    record = root / "first" / ".launcher.json"
    wait_until(record.exists)
    launcher = psutil.Process(json.loads(record.read_text())["pid"])
    wait_until(lambda: os.getsid(launcher.pid) == launcher.pid)  # as soon as it is started, not when it is forked
    launcher.suspend()  # a run of two steps is soon over
    assert server.stdout is not None and server.stdout.readline() == "left\n"  # no zombie
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    assert launcher.pid != os.getsid(0)
    with pytest.raises(ConfigError, match="first"):
        start_run(root, "first", make_yaml())
    with pytest.raises(ConfigError, match="stop it"):
        delete_run(root, "first")
    launcher.resume()
    wait_until(lambda: read_exit(root, "first") is not None, lambda: read_log(root, "first"))
    assert read_exit(root, "first") == 0, read_log(root, "first")
    assert (root / "first" / "adapter_model.safetensors").is_file() and count_steps(root, "first") == 2

    reader = Runs(root).get("first")
    summary = reader.summary()
    assert (summary.state, summary.phase, summary.step, summary.max_steps) == ("done", "done", 2, 2)
    assert summary.num_ranks == 1 and summary.tokens_per_s > 1 and 0 < summary.loss < 20
    assert "step 2" in reader.progress().sentence and reader.series(["loss"])["loss"][0] == [1, 2]
    assert [alert for alert in reader.alerts() if alert.severity == "error"] == []
    (row,) = reader.ranks()
    assert row.rank == 0 and row.memory_bytes > 1 << 20 and 0 <= row.wait_share <= 1
    assert [(point.step, point.problem) for point in reader.checkpoints()] == [(2, None), (1, None)]
    assert reader.log(0) != ""
    with pytest.raises(ConfigError):
        resume_run(root, "first")
    delete_run(root, "first")
    assert [path.name for path in root.iterdir()] == [".starting.lock"]


def test_what_cannot_run_is_said_and_leaves_nothing(root, monkeypatch):
    """A mistake in a field that is found an hour later, in a log; its name taken by a run that never was."""
    monkeypatch.setattr(subprocess, "Popen", refuse)
    for config, said in {
        make_yaml(lora_ranks=8): "lora_ranks",
        make_yaml(max_steps="many"): "max_steps",
        "model_name_or_path: [": "asked.yaml",
        "dataset: d.jsonl": "model_name_or_path",
    }.items():
        with pytest.raises(ConfigError, match=said) as refusal:
            start_run(root, "new", config)
        assert str(root) not in str(refusal.value) and not (root / "new").exists()
    for name in ("../out", "", ".hidden", "a/b"):
        with pytest.raises(ConfigError, match="name of a"):
            start_run(root, name, make_yaml())


def test_of_two_tabs_that_resume_a_run_one_does(root, stand_in):
    """Two launchers of one folder, of which one fails and leaves its exit code as that of the other's run."""
    folder = root / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(make_yaml())
    stand_in(f"echo started >> {root}/started; exec sleep 60")
    refusals = []

    def resume() -> None:
        try:
            resume_run(root, "run")
        except ConfigError as error:
            refusals.append(str(error))

    tabs = [threading.Thread(target=resume) for _ in range(3)]
    for tab in tabs:
        tab.start()
    for tab in tabs:
        tab.join()
    assert (root / "started").read_text().splitlines() == ["started"]
    assert len(refusals) == 2 and all("is starting" in refusal for refusal in refusals)


def test_of_two_starts_without_a_name_both_begin(root, stand_in):
    """Two tabs are suggested the same name, which nobody chose: one would be told that it is taken, or would start in
    the other's folder."""
    stand_in("exec sleep 60")
    found: list[str] = []
    tabs = [
        threading.Thread(target=lambda: found.append(start_run(root, "base-train", make_yaml(), is_suggested=True)))
        for _ in range(3)
    ]
    for tab in tabs:
        tab.start()
    for tab in tabs:
        tab.join()
    assert sorted(found) == ["base-train", "base-train-2", "base-train-3"]
    assert sorted(path.name for path in root.iterdir()) == sorted(found)


def test_what_the_launcher_refuses_at_once_is_said(root, stand_in):
    """A run that is listed as failed where a sentence would do."""
    failure = json.dumps({"message": "", "fields": ConfigError("needs GPUs", option="gpus").to_json()})
    stand_in(f"echo '{failure}' > $LORASHARD_FAILURE_FILE; exit 2")
    with pytest.raises(ConfigError) as refusal:
        start_run(root, "new", make_yaml())
    assert (refusal.value.option, refusal.value.problem) == ("gpus", "needs GPUs")
    assert not (root / "new").exists()


def test_a_stop_is_sent_once_however_often_it_is_asked(root, be_run):
    """Two tabs that both press stop: for a launcher the second SIGTERM is the end without a save."""
    be_run("live")
    with pytest.raises(ConfigError, match="is alive"):
        resume_run(root, "live")
    for _ in range(3):
        stop_run(root, "live")
    wait_until(lambda: heard(root, "live"))
    assert set(heard(root, "live").split()) == {"SIGUSR1"} and (root / "live" / ".stop").exists()


def test_a_run_that_does_not_hear_is_killed(root, be_run):
    """Stop now, and a run that goes on for ever."""
    process = be_run("live")
    stop_run(root, "live", now=True, patience_s=0.5)
    assert process.wait(20) == -signal.SIGKILL
    assert heard(root, "live").split() == ["SIGQUIT"]
    with pytest.raises(ConfigError, match="live"):
        stop_run(root, "live")


def test_a_save_is_asked_of_those_alone_that_can(root, be_run):
    """SIGUSR2 ends a process that does not handle it."""
    be_run("live")
    save_run(root, "live")
    wait_until(lambda: heard(root, "live") == "SIGUSR2 ")
    process = be_run("old", "no-save")
    with pytest.raises(ConfigError, match="cannot save"):
        save_run(root, "old")
    be_run("waiting", phase="queue")
    with pytest.raises(ConfigError, match="phase queue"):
        save_run(root, "waiting")
    assert process.poll() is None and heard(root, "waiting") == ""


def test_signals_go_to_no_other_process(root, monkeypatch):
    """A process of another machine, or one that was given a dead run's number, that is killed."""
    monkeypatch.setattr(psutil.Process, "send_signal", refuse)
    monkeypatch.setattr(os, "kill", refuse)
    folder = root / "run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    left = {"pid": os.getpid(), "host": platform.node(), "begin_s": time.time()}
    (folder / ".owner.json").write_text(json.dumps(left))
    (folder / ".launcher.json").write_text(json.dumps(left | {"begin_s": 1.0}))
    with pytest.raises(ConfigError, match="not run"):  # nobody has the lock, and we began later
        stop_run(root, "run")
    with lock_run(folder):
        (folder / ".owner.json").write_text(json.dumps(left | {"host": "node-7"}))
        for ask in (stop_run, save_run):
            with pytest.raises(ConfigError, match="node-7"):
                ask(root, "run")
        with pytest.raises(ConfigError, match="is alive.*node-7"):
            delete_run(root, "run")
        reason = explain_no_resume(root, "run")
        assert reason is not None and "node-7" in reason


def test_a_run_that_cannot_be_resumed_says_why(root, tmp_path):
    """A button that does nothing, or a run that starts and fails in a log."""

    def explain(name: str) -> str:
        reason = explain_no_resume(root, name)
        assert reason is not None
        return reason

    folder = root / "run"
    folder.mkdir(parents=True)
    assert "name of a" in explain("../run") and "no run" in explain("run")
    (folder / "status.json").write_text('{"phase": "train"}')
    assert "asked.yaml or config.yaml" in explain("run")
    (folder / "config.yaml").write_text(make_yaml(lora_ranks=8))
    assert "lora_ranks" in explain("run")
    (folder / "config.yaml").write_text(make_yaml(model_name_or_path=str(tmp_path / "gone")))
    assert "model_name_or_path" in explain("run") and str(tmp_path / "gone") in explain("run")
    (folder / "config.yaml").write_text(make_yaml(dataset="gone.jsonl"))
    assert "dataset: gone.jsonl" in explain("run")
    (folder / "config.yaml").write_text(make_yaml(overwrite_output_dir=True))
    assert explain_no_resume(root, "run") is None  # it begins anew
    (folder / "adapter_config.json").touch()
    assert "complete checkpoint" in explain("run")


def test_a_merged_model_is_deleted_and_nothing_else(root, stand_in):
    """A run, a base that was put beside the runs, or a model that a job or a run still reads, gone by one click."""
    models = ("merged", "in-use", "trained", "base", "run")
    for name in (*models, "mine"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    for name in models:
        (root / name / "model.safetensors").write_text("")
    (root / "run" / "adapter_config.json").write_text("{}")
    (root / "run" / "asked.yaml").write_text(f"model_name_or_path: {root / 'trained'}\n")
    stand_in("exec sleep 60")
    jobs = Jobs(root)
    for name in ("merged", "in-use", "trained"):
        jobs.cancel(jobs.start("merge", "run", [sys.executable, "-c", "", str(root / name)]))
    job = jobs.start("verify", "run", [sys.executable, "-c", "", "--merged", str(root / "in-use")])
    refused = {"run": "no merged", "mine": "no merged", "../runs": "name of a", "in-use": "a job uses"}
    for name, said in (refused | {"base": "was not merged here", "trained": "'run' has trained as its base"}).items():
        with pytest.raises(ConfigError, match=said):
            delete_merged(root, name)
    jobs.cancel(job)
    delete_merged(root, "merged")
    assert not (root / "merged").exists() and not list(root.glob(".deleted*"))
    assert all((root / name).exists() for name in (*models[1:], "mine"))


def test_only_a_runs_own_folder_is_deleted(root, tmp_path):
    """Data of the person that a click removes: through a link, or because it lies beside the runs."""
    data = tmp_path / "data"
    (data / "inside").mkdir(parents=True)
    root.mkdir()
    (root / "link").symlink_to(data)
    (root / "notes").mkdir()
    (root / "run").mkdir()
    (root / "run" / "status.json").touch()
    (root / "run" / "data").symlink_to(data)
    (root / ".deleted-abc").mkdir()
    for name, said in {"link": "found a link", "notes": "no run called", "gone": "no run called"}.items():
        with pytest.raises(ConfigError, match=said):
            delete_run(root, name)
    delete_run(root, "run")
    assert (data / "inside").is_dir() and sorted(os.listdir(root)) == [".starting.lock", "link", "notes"]


@pytest.mark.slow
def test_a_queued_run_waits_starts_and_can_be_stopped(root, demo, forks):
    """Two runs on the same cores; a run that waits and that nobody can stop, or that is taken for dead."""

    def read_status(name: str) -> dict:
        try:
            return json.loads((root / name / "status.json").read_text())
        except FileNotFoundError:
            return {}

    start_run(root, "first", make_yaml(max_steps=100_000, demo=demo))
    wait_until(lambda: count_steps(root, "first"), lambda: read_log(root, "first"))
    for name in ("second", "third"):
        start_run(root, name, make_yaml(max_steps=1, queue=True, demo=demo))
        wait_until(lambda name=name: "queue" in read_status(name), lambda name=name: read_log(root, name))
    assert "the run first" in read_status("second")["queue"]["waits_for"]
    assert read_status("third")["queue"]["place"] == 2 and find_owner(root / "third") is not None
    with pytest.raises(ConfigError, match="nothing to save"):
        save_run(root, "third")
    stop_run(root, "second")
    wait_until(lambda: read_exit(root, "second") is not None, lambda: read_log(root, "second"))
    assert read_exit(root, "second") == 75 and read_status("second")["phase"] == "stopped"
    assert explain_no_resume(root, "second") is None
    wait_until(lambda: read_status("third")["queue"]["place"] == 1)
    os.kill(json.loads((root / "first" / ".owner.json").read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: read_exit(root, "third") is not None, lambda: read_log(root, "third"))
    assert read_exit(root, "third") == 0, read_log(root, "third")
    assert read_exit(root, "first") == 128 + signal.SIGKILL
