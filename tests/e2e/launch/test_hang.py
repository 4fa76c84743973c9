"""Ranks of `lorashard finetune` that are stopped, and ranks that only take long: who is named, and what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers import warm
from helpers.after_import import call_after_import
from helpers.cases import slow
from helpers.ranks import find_ranks
from helpers.tiny import build_base
from helpers.waiting import wait_until
from helpers.words import make_tokenizer

CPU_BUDGET_S = 80  # a real start, and ranks that wait for minutes in all
LORASHARD = [str(Path(sys.executable).with_name("lorashard"))]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "lorashard"]
TIMEOUT_S = 10  # a loaded machine holds a thread up for seconds
DEADLINE_S = 180
WORDS = ["<pad>", "</s>", "one", "two", "three", "four", "five"]
# Python runs it at the start of every process: ranks take their time in the phases that PAUSES names, rank by rank,
# until `hurry` is there or they were started again. Each writes down where all stood by the beats that it read last.
SITECUSTOMIZE = """
import json, os, sys, time

def find_rank():
    return os.environ.get("RANK", "0")

def mark(name, text=""):
    path = os.path.join(os.environ["MARKS"], name)
    with open(path + ".partial", "w") as file:
        file.write(text)
    os.replace(path + ".partial", path)

def pause(phase):
    pauses = json.loads(os.environ["PAUSES"]) if os.environ.get("LORASHARD_RESTARTS", "0") == "0" else {}
    seconds = pauses.get(f"{phase}_{find_rank()}", pauses.get(phase, 0))
    if seconds and not os.path.exists(os.path.join(os.environ["MARKS"], "hurry")):
        mark(f"{phase}_{find_rank()}")
        time.sleep(seconds)

def slow(phase, function):
    def paused(*args, **kwargs):
        pause(phase)
        return function(*args, **kwargs)
    return paused

def watch(module):
    import trl
    import lorashard.data.prepare as prepare
    from lorashard.runtime.heartbeat import Silences
    count = Silences.count
    if hasattr(count, "is_watched"):  # in the process that this one was forked from
        return
    def count_and_mark(self, words, elapsed_s):
        overdue = count(self, words, elapsed_s)
        beats = [json.loads(word or "{}") for word in words]
        mark(f"beats_{find_rank()}", json.dumps([[beat.get("phase"), beat.get("step")] for beat in beats]))
        return overdue
    count_and_mark.is_watched = True
    Silences.count = count_and_mark
    prepare._build = slow("tokenize", prepare._build)
    module.api.load = slow("load", module.api.load)
    trl.SFTTrainer.training_step = slow("train", trl.SFTTrainer.training_step)
    trl.SFTTrainer.prediction_step = slow("evaluate", trl.SFTTrainer.prediction_step)
""" + call_after_import("lorashard.training.one_run", "watch")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a tiny model, its tokenizer, rows, and what makes ranks slow."""
    folder = tmp_path_factory.mktemp("task")
    make_tokenizer(WORDS).save_pretrained(folder / "model")
    build_base(num_hidden_layers=2, vocab_size=len(WORDS), eos_token_id=1).save_pretrained(folder / "model")
    rows = [{"text": " ".join(WORDS[2 + (i * j) % 5] for j in range(3 + i % 3))} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return folder


class Training:
    """A launcher with two ranks on the CPU; `is_real` where it and they start as a person's do, not by a fork."""

    def __init__(
        self, launcher: list[str], task: Path, out: Path, pauses: dict[str, float], is_real: bool = False, **options
    ) -> None:
        values = {
            "model": task / "model",
            "dataset": task / "rows.jsonl",
            "output_dir": out / "run",
            "dtype": "float32",
            "max_steps": 10,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "save_strategy": "no",
            "placement": "shard",
            "heartbeat_timeout": TIMEOUT_S,
            "cpu": 2,
        }
        words = [word for key, value in (values | options).items() for word in (f"--{key}", str(value))]
        self.marks = out / "marks"
        self.marks.mkdir()
        self.run = out / "run"
        paths = [str(task / "site"), os.environ.get("PYTHONPATH", "")]
        ours = {
            "HF_HOME": str(out / "hf"),  # no run finds the rows that another has tokenized
            "ACCELERATE_USE_CPU": "true",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PAUSES": json.dumps(pauses),
            "MARKS": str(self.marks),
        }
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | ours
        self._log = (out / "log").open("w+")
        start = subprocess.Popen if is_real else warm.Popen
        self.process = start(
            [*launcher, "finetune", *words], env=env, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self.launcher = psutil.Process(self.process.pid)
        self._started: dict[int, psutil.Process] = {}

    def wait_for(self, phase: str) -> list[psutil.Process]:
        """Return the processes of ranks 0 and 1, once one takes its time in `phase` and both know where both are."""
        wait_until(lambda: self._is_in(phase) or self.process.poll() is not None, deadline_s=DEADLINE_S)
        assert self.process.poll() is None, self.read_log()
        ranks = find_ranks(self.process.pid)
        return [ranks[0], ranks[1]]

    def _is_in(self, phase: str) -> bool:
        files = [self.marks / f"beats_{rank}" for rank in (0, 1)]
        if not list(self.marks.glob(f"{phase}_?")) or not all(file.exists() for file in files):
            return False
        found = [place for file in files for place in json.loads(file.read_text())]
        return all(name == phase and (step is not None or phase == "tokenize") for name, step in found)

    def find_processes(self) -> list[psutil.Process]:
        """Return what the launcher has started and is alive, whoever its parent is now."""
        with suppress(psutil.NoSuchProcess):
            self._started |= {child.pid: child for child in self.launcher.children(recursive=True)}
        return [p for p in self._started.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def finish(self, timeout_s: float = DEADLINE_S) -> int:
        """Return the exit code, after checking that no process is left."""
        code = self.process.wait(timeout_s)
        assert self.find_processes() == []
        return code

    def read_status(self) -> dict:
        return json.loads((self.run / "status.json").read_text())

    def read_log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def end(self) -> None:
        for process in [*self.find_processes(), self.process]:
            process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def start(task: Path, tmp_path: Path) -> Iterator[Callable[..., Training]]:
    trainings: list[Training] = []

    def start(launcher: list[str], pauses: dict[str, float], **options) -> Training:
        if options.get("eval_strategy"):
            options["eval_dataset"] = task / "rows.jsonl"
        trainings.append(Training(launcher, task, tmp_path, pauses, **options))
        return trainings[-1]

    yield start
    for training in trainings:
        training.end()


@pytest.mark.parametrize(
    ("phase", "is_real", "place"),
    [
        slow("tokenize", False, "'tokenize', at "),
        ("train", False, "'train' of step 1, at "),
        slow("train", True, "'train' of step 1, at "),
    ],
)
def test_a_stopped_rank_is_named_with_its_place(
    start: Callable[..., Training], phase: str, is_real: bool, place: str
) -> None:
    """Catches a run that waits for ever for a rank that is stopped, and one that ends without saying for whom.

    While tokens are made there are no collectives: a rank waits for the other at a lock. In training and in evaluation
    the other waits in a collective of gloo.
    """
    training = start(LORASHARD, {phase: 600}, is_real=is_real, eval_strategy="steps", eval_steps=1)
    rank = training.wait_for(phase)[1]
    rank.suspend()

    code = training.finish()
    error = training.read_log().partition("lorashard: error: ")[2].splitlines()[0]
    assert code == 1
    assert error.startswith("rank 1 ") and f"pid {rank.pid})" in error
    assert f" {TIMEOUT_S} s: " in error and "stopped" in error and place in error
    status = training.read_status()
    assert (status["phase"], status["failure"]["cause"], status["failure"]["rank"]) == ("failed", "hang", 1)


@pytest.mark.slow
def test_torchruns_ranks_watch_one_another_too(start: Callable[..., Training]) -> None:
    """Catches a watch that hangs on lorashard's own launcher."""
    training = start(TORCHRUN, {"train": 600})
    ranks = training.wait_for("train")
    ranks[1].suspend()

    wait_until(lambda: not ranks[0].is_running() or ranks[0].status() == psutil.STATUS_ZOMBIE)
    error = training.read_status()["error"]
    assert f"pid {ranks[1].pid})" in error and training.read_log().count(error) == 1
    assert training.finish() == 1
    assert training.read_log().count(error) == 2  # torchrun's summary


@pytest.mark.slow
def test_ranks_are_started_again_where_one_has_hung(start: Callable[..., Training]) -> None:
    """Catches a hang that counts as something said plainly, such as a user's mistake, which is not tried again."""
    training = start(LORASHARD, {"train": 600}, max_restarts=1)
    training.wait_for("train")[1].suspend()

    assert training.finish(2 * DEADLINE_S) == 0, training.read_log()
    status = training.read_status()
    [restart] = status["restarts"]
    assert status["phase"] == "done" and (restart["failure"]["cause"], restart["failure"]["rank"]) == ("hang", 1)


@pytest.mark.slow
def test_a_run_that_was_suspended_goes_on(start: Callable[..., Training]) -> None:
    """Catches a run that ends itself after Ctrl-Z, which stops the launcher, or once a scheduler stops all."""
    training = start(LORASHARD, {"train": 0.3}, max_steps=200)
    ranks = training.wait_for("train")
    training.launcher.suspend()
    time.sleep(TIMEOUT_S * 1.5)
    training.launcher.resume()
    time.sleep(TIMEOUT_S / 4)
    status = training.read_status()
    assert status["phase"] == "train" and training.process.poll() is None
    for process in (everything := [training.launcher, *ranks]):
        process.suspend()
    time.sleep(TIMEOUT_S * 1.5)
    for process in reversed(everything):
        process.resume()
    wait_until(
        lambda: training.process.poll() is not None or training.read_status()["step"] > status["step"] + 5,
        deadline_s=DEADLINE_S,
    )
    assert training.process.poll() is None, training.read_log()
    (training.marks / "hurry").touch()

    assert training.finish(2 * DEADLINE_S) == 0, training.read_log()
    assert training.read_status()["phase"] == "done"


def test_long_work_is_no_silence(start: Callable[..., Training]) -> None:
    """Catches an alarm while one rank tokenizes, loads or evaluates for longer than the time, and the other waits."""
    long_s = TIMEOUT_S * 1.5
    pauses = {"tokenize": long_s, "load_1": long_s, "evaluate_0": long_s}
    training = start(LORASHARD, pauses, max_steps=1, eval_strategy="steps", eval_steps=1, max_eval_samples=4)

    assert training.finish() == 0, training.read_log()
    marks = {mark.name for mark in training.marks.iterdir()}
    assert {"load_1", "evaluate_0"} < marks
    assert len([name for name in marks if name.startswith("tokenize_")]) == 1


def test_a_collective_that_ends_by_its_timeout_tells_where_ranks_stood(start: Callable[..., Training]) -> None:
    """Catches a rank whose main thread hangs, and beats on, that nobody can tell from one that waits for it."""
    training = start(LORASHARD, {"train_1": 600}, ddp_timeout=15)

    assert training.finish() == 1
    log = (training.run / "logs" / "rank_0.log").read_text()
    found = next(line for line in log.splitlines() if line.startswith("rank 1: 'train' of step 1, at "))
    assert "sitecustomize.py" in found
