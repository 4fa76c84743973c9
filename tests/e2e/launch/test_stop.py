"""A run that is asked to stop: by whom, at which moment, and what it has saved then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers import warm
from helpers.cases import slow
from helpers.finetune import LORASHARD, TORCHRUN, make_options
from helpers.launches import DEADLINE_S, Launch, keep_launches, wait_for_steps
from helpers.waiting import wait_until

from lorashard.launch.elastic import Signals, run_ranks
from lorashard.runs.checkpoints import list_checkpoints, verify

CPU_BUDGET_S = 120  # a real start, and ranks that are scripts
# Saves, and says so, when it is asked to stop: "asked" before it is there, "early" before it can take it.
RANK = r"""
import os, sys, time
from pathlib import Path
from lorashard.errors import RunStopped
from lorashard.runtime.failures import record_failure
from lorashard.runtime.signals import StopRequest
folder, word, _ = sys.argv[1:]
rank = os.environ["RANK"]
if word == "early":
    Path(folder, f"pid_{rank}").write_text(str(os.getpid()))
    time.sleep(2)
stop = StopRequest()
stop.install(is_lorashard=True)
Path(folder, f"pid_{rank}").write_text(str(os.getpid()))
while not stop.signal_name or word == "stubborn":
    time.sleep(0.02)
if word == "crash" and rank == "1":
    raise ValueError("the disk is gone")
if word == "crash":
    time.sleep(600)
Path(folder, f"saved_{rank}").touch()
while not Path(folder, "saved_0").exists() or not Path(folder, "saved_1").exists():
    time.sleep(0.02)
try:
    stop.check()
except RunStopped as error:
    record_failure(error, exit_code=75, is_plain=True)
    sys.exit(75)
"""


def launch_ranks(command: list[str], folder: Path) -> int:
    signals = Signals(can_save=True)
    if "asked" in command:
        with signals.watched():
            os.kill(os.getpid(), signal.SIGTERM)
    failure = run_ranks(command, 2, folder, grace_s=1, signals=signals)
    if failure:
        failure.report()
    return failure.exit_code if failure else 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Launch]]:
    yield from keep_launches(tmp_path, RANK, launch_ranks)


def find_saved(launch: Launch) -> list[str]:
    return sorted(path.name for path in launch.folder.glob("saved_*"))


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGTERM, "save"),
        slow(signal.SIGINT, "save"),
        slow(signal.SIGUSR1, "early"),
        slow(signal.SIGTERM, "asked"),
    ],
)
def test_a_request_is_passed_on_and_waited_for(start: Callable[[str], Launch], number: signal.Signals, word: str):
    """A warning or a Ctrl-C that costs the steps since the last checkpoint, or comes too early and kills."""
    launch = start(word)
    if word != "asked":
        launch.wait_for_ranks()
        launch.send(number)
    code, _, stderr = launch.finish()

    assert code == 75 and find_saved(launch) == ["saved_0", "saved_1"]
    first, second = stderr.splitlines()
    assert first.startswith(f"lorashard: {number.name}: saving at ") and "stops at once" in first
    assert second.startswith(f"lorashard: stopped by {number.name}: ")


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGINT, signal.SIGINT], 130),
        slow([signal.SIGTERM, signal.SIGTERM], 143),
        slow([signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], 130),
    ],
)
def test_a_second_request_stops_at_once(start: Callable[[str], Launch], numbers: list[signal.Signals], code: int):
    """A run that hangs while it saves and that Ctrl-C cannot end; a scheduler that repeats itself and ends the save."""
    launch = start("stubborn")
    launch.wait_for_ranks()
    for number in numbers:
        assert launch.process.is_alive()
        launch.send(number)
        wait_until(lambda: launch.read("stderr"))
        time.sleep(1)  # two that are the same and come at once are one
    found_code, _, stderr = launch.finish()

    assert found_code == code and find_saved(launch) == []
    (last,) = stderr.splitlines()[1:]
    assert last.startswith(f"lorashard: stopped by {numbers[-1].name}")


@pytest.mark.parametrize("number", [signal.SIGKILL, slow(signal.SIGTERM)])
def test_a_rank_whose_peer_died_does_not_save(start: Callable[[str], Launch], number: signal.Signals):
    """A rank that waits for an agreement with a dead one, until it is killed."""
    launch = start("save")
    pid = launch.wait_for_ranks()[1]
    os.kill(pid, number)
    code, _, stderr = launch.finish()

    assert code == 1 and f"rank 1 was killed by {number.name}" in stderr
    assert find_saved(launch) == []


@pytest.mark.slow
def test_a_rank_that_dies_while_it_stops_is_a_failure(start: Callable[[str], Launch]):
    """A run reported as saved whose save never was."""
    launch = start("crash")
    launch.wait_for_ranks()
    launch.send(signal.SIGTERM)
    code, _, stderr = launch.finish()

    assert code == 1 and "ValueError: the disk" in stderr.splitlines()[1]


@pytest.fixture
def start_run(task: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a run that goes on until it is stopped; all of it is killed if the test leaves it behind."""
    processes: list[subprocess.Popen[str]] = []

    def start_run(command: list[str], out: str, is_real: bool = False) -> subprocess.Popen[str]:
        words = make_options(task, out, max_steps=100_000, save_strategy="steps", save_steps=50_000)
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"HF_HOME": str(task / "hf"), "ACCELERATE_USE_CPU": "true"}
        pipe = subprocess.PIPE
        words = [*command, "finetune", *words, "--cpu", "2"]
        start = subprocess.Popen if is_real else warm.Popen
        processes.append(start(words, env=env, stdout=pipe, stderr=pipe, text=True))
        return processes[-1]

    yield start_run
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.communicate()


def check_refusal(task: Path, run: Path, owner: int) -> None:
    """Another run may not have the folder, though it says that it overwrites it."""
    words = [*LORASHARD, "finetune", *make_options(task, run.name), "--cpu", "2", "--overwrite_output_dir"]
    second = warm.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert second.returncode == 2 and len(second.stderr.splitlines()) == 1, second.stderr
    assert f"(process {owner} on" in second.stderr


@pytest.mark.parametrize("is_real", [False, slow(True)])
def test_a_run_that_is_stopped_leaves_a_checkpoint_of_its_last_step(task: Path, start_run: Callable, is_real: bool):
    """The exit code of a success or a crash, a checkpoint that nothing can go on from, a status that says it runs."""
    run = task / f"run_{is_real}"
    process = start_run(LORASHARD, run.name, is_real)
    wait_for_steps(run, process)
    check_refusal(task, run, process.pid)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 75, stdout + stderr
    status = json.loads((run / "status.json").read_text())
    [checkpoint] = list_checkpoints(run)
    verify(checkpoint)
    assert checkpoint.name == f"checkpoint-{status['step']}"
    assert status["phase"] == "stopped"
    fields = status["failure"]["fields"]
    assert (fields["signal"], fields["step"], Path(fields["checkpoint"]).name) == (
        "SIGTERM",
        status["step"],
        checkpoint.name,
    )
    assert stderr.splitlines()[-1].removeprefix("lorashard: ") == status["error"]


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_ranks_of_torchrun_save_when_it_is_asked_to_end(task: Path, start_run: Callable, number: signal.Signals):
    """A cluster's torchrun, whose ranks know of a request only by what it sends them."""
    run = task / f"torchrun_{number.name}"
    process = start_run([*TORCHRUN, "-m", "lorashard"], run.name)
    wait_for_steps(run, process)
    check_refusal(task, run, json.loads((run / "status.json").read_text())["pid"])
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)

    status = json.loads((run / "status.json").read_text())
    assert status["phase"] == "stopped" and status["failure"]["fields"]["signal"] == number.name, stdout + stderr
    verify(list_checkpoints(run)[0])


@pytest.mark.slow
def test_a_request_before_the_first_rank_ends_the_run(task: Path, tmp_path: Path):
    """A scheduler's warning during the first seconds, taken for a crash."""
    code = f"""
import lorashard.launch.launcher, os, signal, sys
from lorashard.cli import main
lorashard.launch.launcher._check_model = lambda *_: os.kill(os.getpid(), signal.SIGUSR1)
sys.exit(main(["finetune", "--cpu", "2", "--model", "{task}/model", "--dataset", "{task}/rows.jsonl",
    "--output_dir", "{tmp_path}/run"]))
"""
    result = warm.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 75, result.stderr
    assert result.stderr.startswith("lorashard: stopped by SIGUSR1") and len(result.stderr.splitlines()) == 1
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["phase"] == "stopped" and status["error"] in result.stderr
