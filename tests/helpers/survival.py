"""Runs of `lorashard finetune` that are killed at chosen moments, and what their ranks have trained on."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from helpers import warm
from helpers.after_import import call_after_import
from helpers.finetune import LORASHARD, make_options, read_lines
from helpers.forked_ranks import wait_for_end
from helpers.ranks import find_ranks

# Imported by every process of a run: calls that change the disk take longer, so that a kill can come between them, and
# ranks write down the rows that they train on.
_SITE = """
import json, os, signal, sys, time

SLOW_S = float(os.environ.get("TEST_SLOW_S", "0"))

def slow(call):
    if hasattr(call, "is_slowed"):  # in the process that this one was forked from
        return call
    def slowed(*args, **kwargs):
        time.sleep(SLOW_S)
        return call(*args, **kwargs)
    slowed.is_slowed = True
    return slowed

if SLOW_S:
    for name in ("fsync", "rename", "replace", "unlink"):
        setattr(os, name, slow(getattr(os, name)))

def watch(module):
    train = module.CheckpointingTrainer.training_step
    if hasattr(train, "is_watched"):
        return
    def training_step(self, model, inputs, *args, **kwargs):
        masks = inputs.get("attention_mask", inputs["input_ids"] != 0)
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], masks)]
        with open(os.environ["TEST_ROWS"] + f"_{self.args.process_index}.jsonl", "a") as file:
            file.write(json.dumps({"step": self.state.global_step + 1, "rows": rows}) + chr(10))
        while self.state.global_step >= int(os.environ["TEST_LAST_STEP"]):
            time.sleep(0.1)
        if [self.state.global_step + 1, self.args.process_index] == json.loads(os.environ.get("TEST_STOP", "[]")):
            os.kill(os.getpid(), signal.SIGUSR1)
        return train(self, model, inputs, *args, **kwargs)
    training_step.is_watched = True
    module.CheckpointingTrainer.training_step = training_step
""" + call_after_import("lorashard.training.trainer", "watch")


def start(
    task: Path,
    out: str,
    slow_s: float = 0,
    stop: tuple[int, int] | None = None,
    last_step: int = sys.maxsize,
    is_real: bool = False,
    **options,
) -> subprocess.Popen:
    """Start a run in two ranks, unless told otherwise, with dropout and a checkpoint every other step.

    Args:
        slow_s: how much longer each change of the disk takes.
        stop: the step at which a rank is asked to stop, and the rank.
        last_step: after which the ranks wait to be killed, however slow the machine is.
        is_real: whether the interpreters of the launcher and of the ranks are started, and not forked.
    """
    site = task / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    environment = os.environ | {
        "HF_HOME": str(task / "hf"),
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "TEST_ROWS": str(task / f"{out}_rows"),
        "TEST_SLOW_S": str(slow_s),
        "TEST_LAST_STEP": str(last_step),
        "TEST_STOP": json.dumps(stop or []),
    }
    defaults = {
        "cpu": 2,
        "dataset": task / "few.jsonl",
        "lora_dropout": 0.1,
        "max_steps": 14,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "resume": "auto",
    }
    (task / "few.jsonl").write_text("".join((task / "rows.jsonl").read_text().splitlines(keepends=True)[:22]))
    command = [*LORASHARD, "finetune", *make_options(task, out, **defaults | options)]
    log = (task / f"{out}.log").open("a")
    with log:
        start = subprocess.Popen if is_real else warm.Popen
        return start(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def finish(process: subprocess.Popen, task: Path, out: str, timeout_s: float = 200) -> int:
    """Wait for a run's end; return its exit code. No process is left."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError((task / f"{out}.log").read_text()[-3000:]) from None
    finally:
        kill_all(process)


def train(task: Path, out: str, **options) -> Path:
    """Run to the end; return the run's folder."""
    code = finish(start(task, out, **options), task, out)
    assert code == 0, (task / f"{out}.log").read_text()[-3000:]
    return task / out


def refuse(task: Path, out: str, **options) -> str:
    """Start a run that is to be refused; return its one line on stderr, and see that the folder is as it was."""
    log = task / f"{out}.log"
    log.unlink(missing_ok=True)
    before = hash_files(task / out)
    code = finish(start(task, out, **options), task, out)
    said = log.read_text()
    assert code == 2, said
    assert hash_files(task / out) == before, said
    lines = [line for line in said.splitlines() if "error: " in line]
    assert len(lines) == 1 and "Traceback" not in said, said
    return lines[0]


def hash_files(folder: Path) -> dict[str, str]:
    """Return what a run's folder holds, but for where the run stands."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("status.json", "events.jsonl", ".lock") and path.parent.name != "logs"
    }


def kill_when(process: subprocess.Popen, is_time: Callable[[], bool], whom: str, timeout_s: float = 200) -> bool:
    """Kill a run when `is_time`; return whether it came to that before the run's end.

    Args:
        whom: `launcher`, `all`, or the number of a rank; the others are then gone before this returns.
    """
    deadline_s = time.monotonic() + timeout_s
    is_of_rank = whom not in ("launcher", "all")
    # What a moment looks for may be left of an earlier start: the rank to kill comes later then.
    while not is_time() or (is_of_rank and int(whom) not in find_ranks(process.pid)):
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline_s, "the moment to kill never came"
        time.sleep(0.005)
    ranks = {rank: found.pid for rank, found in find_ranks(process.pid).items()}
    victims = [process.pid] if whom == "launcher" else [process.pid, *ranks.values()]
    if is_of_rank:
        victims = [ranks[int(whom)]]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(180)
    for pid in ranks.values():
        wait_for_end(pid, 180)
    return True


def kill_all(process: subprocess.Popen) -> None:
    """End what is left of a run."""
    for pid in [*(rank.pid for rank in find_ranks(process.pid).values()), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)


def survive(task: Path, out: str, moments: list[tuple[Callable[[], bool], str]], **options) -> Path:
    """Start a run again and again with the same words, killed at each of `moments`, and at last to its end."""
    for is_time, whom in moments:
        process = start(task, out, last_step=getattr(is_time, "last_step", sys.maxsize), **options)
        try:
            is_killed = kill_when(process, is_time, whom)
        finally:
            kill_all(process)
        assert is_killed, (task / f"{out}.log").read_text()[-3000:]
    return train(task, out, **options)


def count_steps(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_text().count('"loss"')
    except FileNotFoundError:
        return 0


class AfterSteps:
    """The moment at most a fifth of a second after a step was logged; `last_step` is the last that may be begun."""

    def __init__(self, folder: Path, num_steps: int, random_: random.Random) -> None:
        self.last_step = num_steps + 1
        self._folder = folder
        self._num_steps = num_steps
        self._wait_s = random_.random() / 5
        self._seen_s: float | None = None

    def __call__(self) -> bool:
        if self._seen_s is None and count_steps(self._folder) >= self._num_steps:
            self._seen_s = time.monotonic()
        return self._seen_s is not None and time.monotonic() >= self._seen_s + self._wait_s


def sees(folder: Path, pattern: str) -> Callable[[], bool]:
    """Return the moment at which a file is there."""
    return lambda: any(folder.glob(pattern))


def read_phase(folder: Path) -> str:
    try:
        return json.loads((folder / "status.json").read_text())["phase"]
    except (OSError, ValueError):
        return ""


def read_evaluations(folder: Path) -> dict[int, float]:
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "eval_loss" in line]
    return {line["step"]: line["eval_loss"] for line in lines}


def read_rows(task: Path, out: str, num_ranks: int) -> dict[int, list[list[int]]]:
    """Return the rows of each step, of all ranks, in no order."""
    steps: dict[int, list[list[int]]] = {}
    for rank in range(num_ranks):
        for line in read_lines(task / f"{out}_rows_{rank}.jsonl"):
            steps.setdefault(line["step"], []).extend(line["rows"])
    return {step: sorted(rows) for step, rows in sorted(steps.items())}


def is_same_adapter(found: Path, expected: Path) -> bool:
    """Tell whether two adapters are equal bit for bit."""
    tensors, others = (load_file(folder / "adapter_model.safetensors") for folder in (found, expected))
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
