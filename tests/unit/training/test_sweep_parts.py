"""What a sweep decides and writes down: who is given up, sweep.json, and who was asked to stop or to save."""

from __future__ import annotations

import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

from lorashard.config.run_config import RunConfig
from lorashard.config.sweep import Job, SweepStop
from lorashard.engine.turns import Turns
from lorashard.errors import ConfigError
from lorashard.runs.sweep_file import SweepFile, explain_halving, select_jobs
from lorashard.runtime.signals import StopRequest
from lorashard.training.halving import Halving
from lorashard.training.sweep import HalvingCallback, JointStart, SweepStops

NAMES = ("a", "b", "c", "d")
HANDLED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def halve(values: dict[str, float], metric: str = "eval_loss", keep: float = 0.5) -> dict[str, int]:
    """Let jobs tell a value each at step 10; return who is given up then."""
    halving = Halving(SweepStop(metric=metric, keep=keep, every=10), tuple(values))
    decided = [halving.hear(name, 10, {metric: value}) for name, value in values.items()]
    assert not any(decided[:-1]), "decided before all have told"
    return decided[-1]


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ((4.0, 1.0, 3.0, 2.0), {}, "ac"),
        ((4.0, 1.0, 3.0, 2.0), {"metric": "eval_rewards/accuracies"}, "bd"),
        ((1.0, 1.0, 1.0, 1.0), {}, "cd"),
        ((math.nan, 2.0, math.inf, 1.0), {}, "ac"),
        ((math.nan, 2.0, -math.inf, 1.0), {"metric": "eval_rewards/accuracies"}, "ac"),
        ((math.nan, 2.0, 3.0, 1.0), {"keep": 0.9}, ""),
        ((math.nan, 2.0, 3.0, 1.0), {"keep": 0.01}, "abc"),
    ],
    ids=[
        "less is better",
        "more is better",
        "ties",
        "not a number",
        "not a number, of more",
        "rounded up",
        "one stays",
    ],
)
def test_the_best_go_on(values, options, expected):
    """Catches the better half given up, a tie that ranks may break apart, and a job without a loss that wins."""
    assert halve(dict(zip(NAMES, values, strict=True)), **options) == dict.fromkeys(expected, 10)


def test_only_evaluations_of_the_metric_at_its_steps_are_compared():
    """Catches a comparison between steps, and one by an evaluation that has not the metric."""
    halving = Halving(SweepStop(metric="eval_loss", keep=0.5, every=10), "ab")
    for step, metrics in [(5, {"eval_loss": 1.0}), (10, {"eval_accuracy": 1.0}), (15, {"eval_loss": 1.0})]:
        assert halving.hear("a", step, metrics) == halving.hear("b", step, metrics) == {}
    assert halving.hear("a", 20, {"eval_loss": 1.0}) == {}
    assert halving.hear("b", 20, {"eval_loss": 2.0}) == {"b": 20}
    assert halving.hear("a", 30, {"eval_loss": 1.0}) == {}, "the last one stays"


def test_a_job_that_is_over_is_not_waited_for():
    """Catches a comparison that never comes since a job has failed, and one that counts the job among the kept."""
    halving = Halving(SweepStop(metric="eval_loss", keep=0.5, every=10), NAMES)
    for name, value in [("b", 3.0), ("c", 1.0), ("d", 2.0)]:
        assert halving.hear(name, 10, {"eval_loss": value}) == {}
    assert halving.leave("a") == {"b": 10}, "two of three are kept"
    assert halving.leave("b") == {}
    assert halving.hear("c", 20, {"eval_loss": 2.0}) == {}
    assert halving.leave("d") == {}
    assert halving.leave("c") == {}


def test_a_resumed_sweep_makes_up_for_the_comparison_that_was_cut_short(tmp_path):
    """Catches losers that train on after a resume, since who had told its value before does not tell it again."""
    rule = SweepStop(metric="eval_loss", keep=0.5, every=10)
    HalvedSweep(tmp_path, rule).tell(10, a=1.0, b=2.0, c=3.0)
    resumed = HalvedSweep(tmp_path, rule, resume_from_checkpoint="auto")
    assert resumed.names == "abcd"
    resumed.resume(10, a=1.0, b=2.0, c=3.0)
    resumed.tell(10, d=0.0)
    rows = read_rows(tmp_path)
    assert [rows[name].get("halved_at") for name in NAMES] == [None, 10, 10, None]


class HalvedSweep:
    """A start of a sweep, as far as halving goes: the jobs that it trains, and what they tell."""

    def __init__(self, folder: Path, rule: SweepStop, **options: object) -> None:
        jobs = select_jobs(make_config(folder, **options))
        self.names = "".join(job.name for job in jobs)
        self.ended: list[str] = []
        self.file = SweepFile(folder, jobs, rule, writes=True, resumes=bool(options))
        halving = Halving(rule, self.names, self.file.decided_step)
        stops = SweepStops(StopRequest())
        give_up = partial(stops.give_up, file=self.file)
        self._callbacks = {}
        for name in self.names:
            trainer: Any = SimpleNamespace(stop_here=partial(self.ended.append, name))
            self._callbacks[name] = HalvingCallback(
                name, halving, stops.add(name, folder / name), give_up, None, trainer
            )

    def tell(self, step: int, **values: float) -> None:
        """Let jobs evaluate."""
        for name, value in values.items():
            state = TrainerState(global_step=step, max_steps=40)
            self._callbacks[name].on_evaluate(None, state, None, metrics={"eval_loss": value})

    def resume(self, step: int, **values: float) -> None:
        """Let jobs begin from checkpoints that have logged an evaluation."""
        for name, value in values.items():
            state = TrainerState(global_step=step, max_steps=40, log_history=[{"step": step, "eval_loss": value}])
            self._callbacks[name].on_train_begin(None, state, None)


def test_a_sweep_that_is_killed_after_a_comparison_keeps_to_it(tmp_path):
    """Catches a loser that trains on since the kill came before it had ended, survivors that are halved again by the
    values that their checkpoints tell once more, and another sweep that leaves comparisons out because of this one."""
    rule = SweepStop(metric="eval_loss", keep=0.5, every=10)
    killed = HalvedSweep(tmp_path, rule)
    killed.tell(10, a=1.0, c=3.0, b=2.0, d=4.0)
    assert killed.ended == ["d"], "c waits for its turn"
    killed.file.enter("d", "halved")  # and c is killed
    resumed = HalvedSweep(tmp_path, rule, resume_from_checkpoint="auto")
    assert resumed.names == "ab"
    resumed.resume(10, a=1.0, b=2.0)
    rows = read_rows(tmp_path)
    assert [rows[name].get("halved_at") for name in NAMES] == [None, None, 10, 10]
    assert [rows[name]["state"] for name in NAMES] == ["waiting", "waiting", "halved", "halved"]
    assert "step 10" in rows["c"]["why"]
    resumed.tell(20, b=1.0, a=2.0)
    assert resumed.ended == ["a"]
    last = HalvedSweep(tmp_path, rule, resume_from_checkpoint="auto")
    assert last.names == "b" and last.file.decided_step == 20
    other = SweepFile(tmp_path, make_jobs(tmp_path, "other"), rule, writes=True, resumes=False)
    assert other.decided_step == 0 and list(read_rows(tmp_path)) == ["other"], "another sweep, in the same folder"


# -- sweep.json --------------------------------------------------------------------------------------------------------


def make_jobs(folder: Path, *names: str) -> tuple[Job, ...]:
    config = RunConfig(model="base", dataset="rows", output_dir=str(folder))
    return tuple(Job(name, {"lora_r": 4}, config) for name in names)


def make_config(folder: Path, **options: object) -> RunConfig:
    """Return the options of a sweep of four jobs."""
    jobs = [{"name": name, "lora_r": 4} for name in NAMES]
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": str(folder), "max_steps": 20}
    return RunConfig(**values | options, sweep={"jobs": jobs})


def read_rows(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((folder / "sweep.json").read_text())["jobs"]}


def test_sweep_json_has_a_line_for_each_job(tmp_path):
    """Catches a file that a reader cannot take line by line, a NaN that is no JSON, and a value that is forgotten."""
    file = SweepFile(tmp_path, make_jobs(tmp_path, "a", "b"), None, writes=True, resumes=True)
    lines = (tmp_path / "sweep.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["name"] for line in lines[1:-1]] == ["a", "b"]
    assert read_rows(tmp_path)["b"] == {
        "name": "b", "options": {"lora_r": 4}, "state": "waiting", "step": 0, "max_steps": None, "value": None,
        "why": "",
    }  # fmt: skip
    file.enter("a", "running")
    file.note("a", 4, 10, {"eval_loss": 1.5, "loss": 1.0})
    file.note("a", 5, 10, {"loss": 1.0})
    file.note("b", 5, 10, {"eval_loss": math.nan})
    file.enter("b", "failed", "the loss is nan")
    rows = read_rows(tmp_path)
    assert [rows["a"][key] for key in ("state", "step", "max_steps", "value")] == ["running", 5, 10, 1.5]
    assert [rows["b"][key] for key in ("state", "step", "value", "why")] == ["failed", 5, None, "the loss is nan"]
    assert file.is_alive("a") and not file.is_alive("b")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"], "it is replaced in one go"


def test_a_rank_that_does_not_write_leaves_the_file_alone(tmp_path):
    """Catches ranks that overwrite each other's states."""
    SweepFile(tmp_path, make_jobs(tmp_path, "a"), None, writes=False, resumes=True).enter("a", "done")
    assert list(tmp_path.iterdir()) == []


def test_what_has_ended_stays_so(tmp_path):
    """Catches a loser whose row is gone after a resume, or that trains again; a finished job that is deleted to start
    afresh; and a sweep of finished jobs that cannot be trained further."""

    def select(**options: object) -> str:
        return "".join(job.name for job in select_jobs(make_config(tmp_path, **options)))

    stop = SweepStop(metric="eval_rewards/margins", keep=0.5, every=10)
    assert select(resume_from_checkpoint="auto") == "abcd"
    file = SweepFile(tmp_path, make_jobs(tmp_path, *NAMES), stop, writes=True, resumes=True)
    file.note("a", 10, 20, {"eval_rewards/margins": 0.5, "eval_loss": 3.0})
    file.give_up({"a": 10})
    file.enter("a", "halved")
    file.enter("b", "stopped")
    file.note("c", 20, 20, {})
    file.enter("c", "done")
    assert select() == "abcd" and select(resume_from_checkpoint="auto") == "bd"
    assert select(resume_from_checkpoint=True, max_steps=30) == "bcd"
    SweepFile(tmp_path, make_jobs(tmp_path, "b", "d"), stop, writes=True, resumes=True)
    rows = read_rows(tmp_path)
    assert (rows["a"]["state"], rows["a"]["value"], rows["a"]["why"]) == ("halved", 0.5, explain_halving(10))
    assert [rows[name]["state"] for name in "bcd"] == ["waiting", "done", "waiting"]
    for name in "bd":
        file.note(name, 20, 20, {})
        file.enter(name, "done")
    assert select(resume_from_checkpoint=True) == "bcd"


# -- what jobs are asked -----------------------------------------------------------------------------------------------


def test_one_job_is_asked_by_its_file_and_all_by_the_sweep(tmp_path):
    """Catches a file that stops all jobs, one that stops a resumed job at once, and a save that reaches one job."""
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in HANDLED}
    request.install()
    try:
        stops = SweepStops(request)
        first, second = stops.add("a", tmp_path / "a"), stops.add("b", tmp_path / "b")
        (tmp_path / "a").mkdir()
        assert first.signal_name is None
        (tmp_path / "a" / "stop").touch()
        assert first.signal_name is not None and second.signal_name is None
        first.forget_file()
        first.forget_file()
        assert first.signal_name is None and not (tmp_path / "a" / "stop").exists()
        second.halved_at = 10
        assert second.signal_name is not None and first.signal_name is None
        os.kill(os.getpid(), signal.SIGUSR2)
        assert [first.take_save(), second.take_save(), first.take_save(), second.take_save()] == [True] * 2 + [
            False
        ] * 2
        os.kill(os.getpid(), signal.SIGUSR1)
        assert first.signal_name == second.signal_name == "SIGUSR1"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- how jobs begin ----------------------------------------------------------------------------------------------------


def test_jobs_begin_together_or_not_at_all():
    """Catches a job that begins, over an earlier run, while another may still be refused or killed, and one that is
    waited for though it has ended."""
    turns, said = Turns(torch.device("cpu")), []
    start = JointStart("abc", turns, lambda ready: said.append("".join(sorted(ready))))

    def work(name: str) -> None:
        if name == "b":
            start.leave(name)
            raise ConfigError("refused")
        said.append(name)
        start.wait(name)
        said.append(name)

    errors = turns.run([partial(work, name) for name in "abc"], (ConfigError,))
    assert [type(error) for error in errors] == [type(None), ConfigError, type(None)]
    assert said == ["a", "c", "ac", "a", "c"]
    alone = JointStart("a", None, lambda ready: said.extend(ready))
    alone.wait("a")
    assert said[5:] == ["a"]
