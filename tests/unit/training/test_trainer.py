"""The trainer's checkpoints where a disk refuses one, or a run is asked to stop; one rank, a model of one weight."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import lorashard.training.trainer
from lorashard.errors import RunStopped
from lorashard.runs.checkpoints import list_checkpoints, publish, read_manifest
from lorashard.runs.events import describe_event
from lorashard.training.nonfinite import NonfiniteRule
from lorashard.training.trainer import CheckpointingTrainer, RunHooks, make_checkpointing


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


def make_trainer(
    out: Path, told: list[str], asked: str | None = None, saves: Sequence[bool] = (), **options
) -> CheckpointingTrainer:
    """Return a trainer of four rows, which is asked for a checkpoint in the steps of which `saves` says so."""
    saves = list(saves)
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(4)]
    rule = NonfiniteRule(False, lambda rows, num_rows: list(map(str, rows)), told.append, lambda kind, **fields: None)
    arguments = TrainingArguments(
        str(out), use_cpu=True, per_device_train_batch_size=1, report_to=[], disable_tqdm=True,
        logging_strategy="no", **{"save_strategy": "steps", "save_steps": 1} | options,
    )  # fmt: skip

    def emit(kind: str, **fields: Any) -> None:
        told.extend(filter(None, [describe_event(kind, fields)]))

    stop = SimpleNamespace(signal_name=asked, take_save=lambda: saves.pop(0) if saves else False)
    return make_checkpointing(Trainer)(
        hooks=RunHooks(stop, {}, rule, None, None, told.append, emit, lambda phase, step: None),
        model=Line(),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
    )


def test_the_best_is_one_that_is_on_the_disk(tmp_path, monkeypatch):
    """A best adapter whose save failed, which later ones must be better than, and which is not there at the end."""
    told: list[str] = []
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True}
    trainer = make_trainer(tmp_path, told, max_steps=3, metric_for_best_model="quality", **best)
    qualities = iter((1.0, 3.0, 2.0) + (0.0,) * 9)
    monkeypatch.setattr(trainer, "evaluate", lambda **_: {"eval_quality": next(qualities)})

    def refuse_the_second(checkpoint: Path, facts: dict) -> None:
        if checkpoint.name == "checkpoint-2":
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(checkpoint, facts)

    monkeypatch.setattr(lorashard.training.trainer, "publish", refuse_the_second)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-1"]
    assert [line for line in told if "checkpoint-2 was not written" in line and "No space left" in line]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch):
    """A folder that somebody reads over a network file system, which is not empty when it is to go."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(lorashard.training.trainer, "rotate", refuse)
    told: list[str] = []
    make_trainer(tmp_path, told, max_steps=2, save_total_limit=1).train()
    assert len(list_checkpoints(tmp_path)) == 2
    assert len(told) == 2 and all("were not deleted" in line for line in told)


@pytest.mark.parametrize("asked", [None, "SIGTERM"])
def test_a_checkpoint_that_a_stop_asks_for_can_be_gone_on_from(tmp_path, asked):
    """`save_only_model` leaves the optimizer out: the run that is told to go on from there would start afresh."""
    trainer = make_trainer(tmp_path, [], asked, max_steps=3, save_only_model=True)
    if asked:
        with pytest.raises(RunStopped, match="SIGTERM.*step 1"):
            trainer.train()
    else:
        trainer.train()
    (newest, *_) = list_checkpoints(tmp_path)
    assert (newest / "optimizer.pt").exists() == read_manifest(newest).facts["is_resumable"] == bool(asked)


def list_steps(out: Path) -> list[int]:
    return sorted(read_manifest(checkpoint).step for checkpoint in list_checkpoints(out))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_strategy": "no"}, [2, 4]),  # 4 is an epoch's end
        ({"save_strategy": "no", "save_total_limit": 1}, [4]),
        ({"save_steps": 2}, [2, 4, 6]),
        ({"save_strategy": "epoch"}, [2, 4, 6]),
    ],
)
def test_a_checkpoint_is_saved_when_asked_for_and_once(tmp_path, monkeypatch, options, steps):
    """A request that `save_strategy: no` forgets, that rotation does not know, or that writes a checkpoint twice."""
    written: list[str] = []
    monkeypatch.setattr(
        lorashard.training.trainer, "publish", lambda path, facts: (written.append(path.name), publish(path, facts))
    )
    told: list[str] = []
    make_trainer(tmp_path, told, saves=[False, True, False, True], max_steps=6, **options).train()
    assert list_steps(tmp_path) == steps
    assert len(set(written)) == len(written) == len(set(steps) | {2, 4})
    assert [line for line in told if "checkpoint-2 was asked for (SIGUSR2)" in line] and len(told) == 2


def test_a_checkpoint_that_a_person_asks_for_can_be_gone_on_from(tmp_path):
    """`save_only_model` leaves the optimizer out of what the run saves by itself, and of no more."""
    make_trainer(tmp_path, [], saves=[False, True], max_steps=3, save_only_model=True).train()
    facts = {read_manifest(path).step: read_manifest(path).facts["is_resumable"] for path in list_checkpoints(tmp_path)}
    assert facts == {1: False, 2: True, 3: False}
