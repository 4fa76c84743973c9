"""Ranks that die and are started again without a person, and what is never started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.cases import slow
from helpers.finetune import LORASHARD, make_options
from helpers.launches import Launch, keep_launches, wait_for_steps

from lorashard.config.run_config import RunConfig
from lorashard.launch.elastic import Signals
from lorashard.launch.launcher import go_on, prepare_logs_dir, run_with_restarts
from lorashard.runs.checkpoints import delete, place_partial, publish
from lorashard.runs.events import read_events
from lorashard.runs.folder import Run
from lorashard.runs.lock import lock_run
from lorashard.runs.status import Status, told_status

CPU_BUDGET_S = 150  # a real run of two ranks, started twice, and ranks that are scripts
# Each attempt writes which it is into its log, and lives until it is killed, or ends as the word says.
RANK = r"""
import os, sys, time
from pathlib import Path
from lorashard.errors import ConfigError, RunStopped, TrainingError
from lorashard.runtime.failures import record_failure
from lorashard.runtime.signals import StopRequest, find_restarts
folder, word, _ = sys.argv[1:]
rank, restarts = os.environ["RANK"], find_restarts(os.environ)
print(f"attempt {restarts} of rank {rank}", flush=True)
stop = StopRequest()
stop.install(is_lorashard=True)
Path(folder, f"pid_{rank}_{restarts}").write_text(str(os.getpid()))
while not all(Path(folder, f"pid_{r}_{restarts}").exists() for r in (0, 1)):
    time.sleep(0.02)
found = {"mistake": (ConfigError("bad rows"), 2), "numbers": (TrainingError("a loss is NaN"), 1),
         "stopped": (RunStopped("nothing is lost", signal="SIGUSR1"), 75)}
if word in found:
    record_failure(*found[word], is_plain=True)
    sys.exit(found[word][1])
if word == "hang" and restarts == 0 and rank == "1":
    record_failure(TrainingError("rank 0 gives no sign of life"), 1, is_plain=True, silent_rank=0)
    sys.exit(1)
if word == "raise" and rank == "1":
    raise ValueError("boom")
if word == "stop":
    while not stop.signal_name:
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
if word == "kill" and restarts < 2 or word == "sleep":
    time.sleep(600)
"""
MAX_RESTARTS = 2


def launch_ranks(command: list[str], folder: Path) -> int:
    options = {"model": "m", "dataset": "d", "output_dir": str(folder / "run"), "max_restarts": MAX_RESTARTS}
    with lock_run(folder / "run"), told_status(folder / "run") as status:
        config = RunConfig(**options)
        return run_with_restarts(config, command, 2, prepare_logs_dir(config, [config]), Signals(can_save=True), status)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Launch]]:
    yield from keep_launches(tmp_path, RANK, launch_ranks)


def read_status(launch: Launch) -> dict:
    return json.loads(launch.read("run/status.json"))


def count_attempts(launch: Launch) -> int:
    return len(list(launch.folder.glob("pid_0_*")))


def test_a_rank_that_dies_twice_is_started_twice(start: Callable[[str], Launch]):
    """A run of a night that ends at its first dead rank, or loses the log that tells why."""
    launch = start("kill")
    for attempt in range(2):
        os.kill(launch.wait_for_ranks(f"_{attempt}")[attempt], signal.SIGKILL)
    code, stdout, stderr = launch.finish()

    assert code == 0
    lines = stderr.splitlines()
    for number, line in enumerate(lines):
        assert line.startswith(f"lorashard: error: rank {number} was killed by SIGKILL")
        assert line.endswith(f"again ({number + 1} of 2)")
    assert len(lines) == 2
    restarts = read_status(launch)["restarts"]
    assert [(restart["number"], restart["max_restarts"]) for restart in restarts] == [(1, 2), (2, 2)]
    assert [restart["failure"]["rank"] for restart in restarts] == [0, 1]
    assert {restart["failure"]["cause"] for restart in restarts} == {"killed"}
    kinds = [event["kind"] for event in read_events(launch.folder / "run")]
    assert kinds == ["restart", "restart"]
    log = launch.read("run/logs/rank_0.log").splitlines()
    assert [line for line in log if "attempt" in line] == [f"attempt {n} of rank 0" for n in range(3)]
    assert stdout.splitlines() == [f"attempt {n} of rank 0" for n in range(3)]


@pytest.mark.slow
def test_restarts_that_are_used_up_end_the_run(start: Callable[[str], Launch]):
    """A crash that is repeated for ever."""
    launch = start("raise")
    code, _, stderr = launch.finish()

    assert code == 1 and count_attempts(launch) == MAX_RESTARTS + 1
    assert stderr.splitlines()[-1].endswith("used up (2)")
    assert "ValueError: boom" in stderr.splitlines()[-1]
    status = read_status(launch)
    assert status["phase"] == "failed" and len(status["restarts"]) == MAX_RESTARTS


@pytest.mark.slow
def test_a_hang_is_started_again(start: Callable[[str], Launch]):
    """A hung rank, found and named, whose run nevertheless waits for a person."""
    launch = start("hang")
    code, _, stderr = launch.finish()

    assert code == 0 and count_attempts(launch) == 2
    assert "rank 0 gives" in stderr and stderr.endswith("(1 of 2)\n") and len(stderr.splitlines()) == 1


@pytest.mark.parametrize(("word", "code"), [("mistake", 2), slow("numbers", 1), slow("stopped", 75)])
def test_what_would_only_be_repeated_is_not_started_again(start: Callable[[str], Launch], word: str, code: int):
    """A user's mistake, or numbers that no training comes back from, that cost a GPU night."""
    launch = start(word)
    found_code, _, stderr = launch.finish()

    assert found_code == code and count_attempts(launch) == 1
    assert "again (" not in stderr and "restarts" not in read_status(launch)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["stop", "sleep"])
def test_a_run_that_was_asked_to_stop_is_not_started_again(start: Callable[[str], Launch], word: str):
    """A Ctrl-C that is answered with new ranks."""
    launch = start(word)
    launch.wait_for_ranks("_0")
    launch.send(signal.SIGQUIT if word == "sleep" else signal.SIGTERM)
    code, _, _ = launch.finish()

    assert code == (128 + signal.SIGQUIT if word == "sleep" else 1) and count_attempts(launch) == 1


def test_a_restart_goes_on_with_its_own_checkpoints_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A restart that goes on with the run that it was to overwrite, or forgets the checkpoint that it began from."""
    run, elsewhere = tmp_path / "run", str(tmp_path / "elsewhere" / "checkpoint-9")
    make_checkpoint(run / "checkpoint-5")  # another run's
    options = {"model": "m", "dataset": "d", "output_dir": str(run)}
    overwriting = RunConfig(**options, overwrite_output_dir=True)
    begun = RunConfig(**options, resume_from_checkpoint=elsewhere)

    Status.begin(run)
    Run(run, 0, 1).status.enter("tokenize")
    assert go_on(overwriting) == overwriting
    delete(run / "checkpoint-5")  # as a run does that overwrites
    Run(run, 0, 1).begin("", None)
    for config in (overwriting, RunConfig(**options), RunConfig(**options, resume_from_checkpoint=True)):
        went_on = go_on(config)
        assert (went_on.resume_from_checkpoint, went_on.overwrite_output_dir) == ("auto", False)
    assert go_on(begun).resume_from_checkpoint == elsewhere
    make_checkpoint(run / "checkpoint-5")
    assert go_on(begun).resume_from_checkpoint == "auto"

    Run(run, 0, 1).status.enter("tokenize")  # the restart dies before it has begun
    assert go_on(begun).resume_from_checkpoint == "auto"
    Status.begin(run)
    Run(run, 0, 1).status.enter("tokenize")  # another run, in the same folder
    assert go_on(begun).resume_from_checkpoint == elsewhere


def make_checkpoint(folder: Path) -> None:
    partial = place_partial(folder)
    partial.mkdir(parents=True)
    (partial / "trainer_state.json").write_text("{}")
    publish(folder, {})


@pytest.mark.slow
def test_a_run_goes_on_by_itself_after_a_kill(task: Path):
    """A restart that begins anew, refuses its own folder or its own lock, or overwrites what it was to go on with."""
    steps = 200
    options = make_options(task, "run", max_steps=steps, save_strategy="steps", save_steps=40, save_total_limit=2)
    words = [*LORASHARD, "finetune", *options, "--cpu", "2", "--max_restarts", "1", "--overwrite_output_dir"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"HF_HOME": str(task / "hf")}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            wait_for_steps(task / "run", process, 45)
            os.kill(json.loads((task / "run" / "status.json").read_text())["pid"], signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=500)
        finally:
            process.kill()  # its ranks die with it

    assert process.returncode == 0, stdout + stderr
    status = json.loads((task / "run" / "status.json").read_text())
    assert (status["phase"], status["step"], len(status["restarts"])) == ("done", steps, 1)
    assert "rank 0 was killed by SIGKILL" in stderr and "again (1 of 1)" in stderr
    lines = [json.loads(line) for line in (task / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
