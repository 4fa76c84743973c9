"""Losses and gradients that are not finite: the rows that are named, the step that is left out, the run that ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import warm
from helpers.forked_ranks import run_ranks
from helpers.tiny import find_differences
from helpers.word_task import build, make_texts, make_words, write_model, write_rows
from peft import get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    get_cosine_schedule_with_warmup,
)
from trl import SFTTrainer

from lorashard.errors import TrainingError
from lorashard.runs.events import read_events

LORASHARD = [str(Path(sys.executable).with_name("lorashard")), "finetune"]
# Of 2 ranks' 7 batches of 2 rows the last ones are filled; of 4 steps of 2 microbatches the last is short.
NUM_ROWS = 26


DEADLINE_S = 300


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with the model, and rows that are all well."""
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl", make_texts(NUM_ROWS))
    return folder


class Taken(TrainerCallback):
    """Notes for each step which rows the trainer has trained on, by their text, and which it would name."""

    def __init__(self, trainer: Trainer) -> None:
        self.true: list[list[str]] = []
        self.named: list[list[list[str]]] = []
        self._trainer = trainer
        self._step: list[str] = []
        train = trainer.training_step

        def training_step(model, inputs, *args, **kwargs):
            ids = inputs["input_ids"]
            self._step.append([trainer.processing_class.decode(row, skip_special_tokens=True) for row in ids])
            return train(model, inputs, *args, **kwargs)

        trainer.training_step = training_step
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.true.append(self._step)
        self.named.append(self._trainer.name_step_rows())
        self._step = []


def train_and_name(rank: int, task: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return for each run, step and microbatch the texts that were trained on, and the places that would be named."""
    multiprocessing.current_process().daemon = False  # so that loaders may have workers
    found = {}
    for name, options in runs.items():
        resume = options.pop("resume", None)
        trainer = build(task, **{"dataset": task / "rows.jsonl", "output_dir": task / name} | options)
        taken = Taken(trainer)
        trainer.train(resume_from_checkpoint=resume and str(task / resume))
        found[name] = taken.true, taken.named
    return found


def find_places(path: Path) -> dict[str, str]:
    """Return each row's place by the text that is trained on."""
    places = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("{"):
            row = json.loads(line)
            text = row["prompt"] + row["chosen"] if "prompt" in row else row["text"]
            places[text] = f"{path.name} line {number}"
    return places


def check_names(name: str, found: tuple[list, list], places: dict[str, str], num_steps: int) -> None:
    true, named = found
    assert len(true) == num_steps, name
    for step, (trained, told) in enumerate(zip(true, named, strict=True), 1):
        # DPO's batch holds the rejected answers too.
        expected = [list(dict.fromkeys(places[text] for text in texts if text in places)) for texts in trained]
        assert told == expected and all(told), f"{name}, step {step}"


ACCUMULATED = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rows_named_are_those_trained_on(task, num_ranks):
    """Loaders draw ahead, the next epoch's order comes with an epoch's last batch, and a resume draws from the start.

    Names that are those of another batch send the person to rows that are well.
    """
    runs = {
        "whole": ACCUMULATED | {"save_steps": 1, "save_strategy": "steps"},
        "resumed": ACCUMULATED | {"resume": "whole/checkpoint-2"},
        "resumed in the second epoch": ACCUMULATED | {"resume": f"whole/checkpoint-{8 // num_ranks + 2}"},
    }
    found = run_ranks(train_and_name, num_ranks, task, runs)
    steps = {2: (8, 6, 2), 1: (14, 12, 4)}[num_ranks]
    for name, num_steps in zip(runs, steps, strict=True):
        for rank in found:
            check_names(name, rank[name], find_places(task / "rows.jsonl"), num_steps)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 1])
def test_the_rows_named_are_those_trained_on_in_any_order(task, num_ranks):
    """What draws rows in another way, makes others of them, or leaves some out shifts the names."""
    texts = make_texts(NUM_ROWS)
    rows = [json.dumps({"text": text}) for text in texts]
    (task / "broken.jsonl").write_text("\n".join(["text", *rows[:9], '{"text": ""}', *rows[9:]]) + "\n")
    pairs = [
        {"prompt": text, "chosen": f" {other}", "rejected": " w1"}
        for text, other in zip(texts, texts[::-1], strict=True)
    ]
    write_rows(task / "pairs.jsonl", pairs)
    runs: dict[str, dict[str, Any]] = {
        "filled": {"num_train_epochs": 2, "global_batch_size": 8},
        "left out": ACCUMULATED | {"dataloader_drop_last": "true"},
        "unshuffled": {"max_steps": 3, "shuffle_dataset": "false"},
        "by length": {"max_steps": 9, "train_sampling_strategy": "group_by_length"},
        "in order": {"max_steps": 9, "train_sampling_strategy": "sequential"},
        "by workers": ACCUMULATED | {"dataloader_num_workers": 2},
        "broken": {"max_steps": 9, "dataset": task / "broken.jsonl", "on_bad_row": "skip"},
        "dpo": {"max_steps": 9, "method": "dpo", "dataset": task / "pairs.jsonl"},
    }
    steps = {2: (8, 6, 3, 9, 9, 8, 9, 9), 1: (8, 14, 3, 9, 9, 14, 9, 9)}[num_ranks]
    found = run_ranks(train_and_name, num_ranks, task, runs)
    for (name, options), num_steps in zip(runs.items(), steps, strict=True):
        for rank in found:
            check_names(name, rank[name], find_places(options.get("dataset", task / "rows.jsonl")), num_steps)


POISONED = (7, 21)


@pytest.fixture(scope="module")
def poisoned(task) -> Path:
    """Rows of which two hold a word whose embedding is infinite."""
    write_rows(task / "poisoned.jsonl", make_texts(NUM_ROWS, POISONED))
    return task / "poisoned.jsonl"


class Steps(TrainerCallback):
    """Notes each step's batches, loss and learning rate, and whether the optimizer changed anything."""

    def __init__(self, trainer: Trainer) -> None:
        self.is_changed: list[bool] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.batches: list[list[tuple[dict, Any]]] = []
        self._trainer = trainer
        self._batches: list[tuple[dict, Any]] = []
        self._loss = 0.0
        self._before: dict[str, Any] = {}
        train = trainer.training_step

        def training_step(model, inputs, num_items_in_batch=None):
            self._batches.append((dict(inputs), num_items_in_batch))
            loss = train(model, inputs, num_items_in_batch)
            self._loss += loss.item()
            return loss

        trainer.training_step = training_step
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._before = copy_state(self._trainer)

    def on_optimizer_step(self, args, state, control, **kwargs):
        after = copy_state(self._trainer)
        self.is_changed.append(bool(find_differences(after, self._before)))
        self.rates.append(self._trainer.optimizer.param_groups[0]["lr"])
        self.losses.append(self._loss)
        self.batches.append(self._batches)
        self._batches, self._loss = [], 0.0


def copy_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return copies of the adapter's tensors and the optimizer's."""
    tensors = copy_trained(trainer.model)
    for number, state in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {name}": value.clone() for name, value in state.items()}
    return tensors


def copy_trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def replay(trainer: Trainer, batches: list[list[tuple[dict, Any]]]) -> None:
    """Train on all steps but those whose loss is not finite, which move the learning rate on and do nothing else."""
    model, arguments = trainer.model.train(), trainer.args
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = optimizer_class(parameters, **options, weight_decay=arguments.weight_decay)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, len(batches))
    for step in batches:
        losses = [trainer.compute_loss(model, inputs, num_items_in_batch=number) for inputs, number in step]
        if all(loss.isfinite() for loss in losses):
            for loss in losses:
                loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, arguments.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()


SKIPPING = {
    "on_nonfinite": "skip",
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.1,
    "logging_steps": 3,
}


def skip(rank: int, task: Path, options: dict[str, Any]) -> dict[str, Any]:
    told: list[str] = []
    noted: list[dict] = []
    trainer = build(task, told, noted, **SKIPPING | options)
    initial = copy_trained(trainer.model)
    steps = Steps(trainer)
    trainer.train()
    assert all(tensor.isfinite().all() for tensor in copy_state(trainer).values())
    differences = []
    if trainer.args.world_size == 1:
        plain = get_peft_model(
            AutoModelForCausalLM.from_pretrained(task / "model"), trainer.model.peft_config["default"]
        )
        plain.load_state_dict(initial, strict=False)
        replay(SFTTrainer(plain, trainer.args, train_dataset=trainer.train_dataset), steps.batches)
        differences = find_differences(copy_trained(plain), copy_trained(trainer.model))
    return {
        "told": told,
        "noted": noted,
        "is_changed": steps.is_changed,
        "rates": steps.rates,
        "losses": steps.losses,
        "logged": [line for line in trainer.state.log_history if "loss" in line],
        "differences": differences,
    }


@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_is_skipped_changes_nothing(task, poisoned, num_ranks):
    """Weight decay and moments move on zero gradients; the schedule goes on; a mean that counts the step lies.

    On one rank the run ends with the bits of plain PEFT trained by hand, without these steps.
    """
    found = run_ranks(skip, num_ranks, task, {"dataset": poisoned, "output_dir": task / f"skip{num_ranks}"})
    places = {f"poisoned.jsonl line {number + 1}" for number in POISONED}
    for rank in found:
        assert rank["told"] == found[0]["told"]
        numbers = [int(re.match(r"step (\d+): the loss", line)[1]) for line in rank["told"]]
        assert numbers == [step for step, is_changed in enumerate(rank["is_changed"], 1) if not is_changed]
        assert len(numbers) >= len(POISONED) and len(numbers) < len(rank["is_changed"])
        assert [line["step"] for line in rank["noted"]] == numbers
        assert len(set(rank["rates"])) == len(rank["rates"])
        assert rank["differences"] == []
    for step, line in enumerate(found[0]["told"]):
        bad = [rank for rank in range(num_ranks) if "nan" in found[rank]["noted"][step]["losses"]]
        assert bad == [int(rank) for rank in re.findall(r"rank (\d): loss nan over", line)]
        assert any(place in line for place in places)
    assert places == {place for place in places for line in found[0]["told"] if f"{place}" in line}
    for line in found[0]["logged"]:
        window = range(line["step"] - 3, line["step"])
        counted = [step for step in window if found[0]["is_changed"][step]]
        losses = [sum(rank["losses"][step] for rank in found) / num_ranks for step in counted]
        assert line["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert line.get("skipped_steps", 0) == 3 - len(counted)


def spoil(trainer: Trainer, name: str) -> None:
    """Make a gradient infinite in step 2, which DDP gives to all ranks, or each loss."""
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)
    compute_loss = trainer.compute_loss
    if name == "norm":
        weight.register_hook(lambda gradient: gradient * (torch.inf if trainer.state.global_step == 1 else 1))
    if name == "inf":
        trainer.compute_loss = lambda *args, **kwargs: compute_loss(*args, **kwargs) - torch.inf


def end_badly(rank: int, task: Path) -> dict[str, str]:
    """Return what ends each of several runs that cannot go on."""
    said = {}
    for name, rows, options in (
        ("norm", "rows.jsonl", {"gradient_accumulation_steps": 3}),
        ("inf", "rows.jsonl", {}),
        ("all", "all.jsonl", {"on_nonfinite": "skip"}),
        ("packed", "all.jsonl", {"packing": "true", "max_length": 16}),
    ):
        trainer = build(task, dataset=task / rows, output_dir=task / name, max_steps=4, max_grad_norm=0, **options)
        if rank == 0:
            spoil(trainer, name)
        before = copy_trained(trainer.model)
        with pytest.raises(TrainingError) as error:
            trainer.train()
        said[name] = str(error.value)
        assert trainer.state.global_step == {"norm": 1, "all": 4}.get(name, 0), name
        assert all(tensor.isfinite().all() for tensor in copy_trained(trainer.model).values())
        is_same = not find_differences(before, copy_trained(trainer.model))
        assert is_same == (name != "norm"), name
    return said


@pytest.mark.slow
def test_a_run_that_cannot_go_on_says_why(task):
    """An infinite gradient with finite losses, a loss of -inf, nothing but steps left out, rows that were packed.

    The last weights must be those before the step; ranks that say different things leave the person with one of them.
    """
    write_rows(task / "all.jsonl", make_texts(NUM_ROWS, range(NUM_ROWS)))
    said = run_ranks(end_badly, 2, task)
    assert said[0] == said[1]
    row = r"rows.jsonl line \d+"
    norm, inf, everything, packed = said[0].values()
    assert re.match(f"step 2: .*norm is (inf|nan).*; rank 0: {row}", norm)
    assert len(re.findall(row, norm)) == 2 * 3 * 2 and "rank 1: rows.jsonl line" in norm
    assert re.match(f"step 1: the loss .*; rank 0: loss -inf over {row}, {row}; ", inf)
    assert "rank 1" not in inf and "--on_nonfinite skip --resume auto" in inf
    assert "4 steps" in everything
    assert re.search(r"rank 1: loss nan over packed sequence \d+ \('w\d+ ", packed)


def train_with_scaler(rank: int, task: Path) -> tuple[list[bool], list[str]]:
    told: list[str] = []
    trainer = build(task, told, dataset=task / "poisoned.jsonl", **SKIPPING | {"output_dir": task / "scaled"})
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28)
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
    steps = Steps(trainer)
    trainer.train()
    assert all(tensor.isfinite().all() for tensor in copy_state(trainer).values())
    return steps.is_changed, told


@pytest.mark.slow
def test_a_loss_scaler_may_try_scales(task, poisoned):
    """Under fp16 the scaler meets infinite gradients by design; a loss that is not finite is a fault there too."""
    is_changed, told = run_ranks(train_with_scaler, 1, task)[0]
    unchanged = {step for step, is_step_changed in enumerate(is_changed, 1) if not is_step_changed}
    named = {int(re.match(r"step (\d+): the loss", line)[1]) for line in told}
    assert named and named < unchanged, "the scaler's own steps are no fault"
    assert is_changed[-1], "the scaler never found its scale"


def test_a_run_stops_in_one_line_and_goes_on_without_the_step(task, poisoned):
    """A person who is shown a traceback of two ranks, or none, or must begin anew, has lost the run."""
    options = {"model": task / "model", "dataset": poisoned, "output_dir": task / "cli", "cpu": 2, "max_steps": 9}
    words = make_words(**options | {"save_strategy": "steps", "save_steps": 2, "shuffle_dataset": "true"})
    environment = os.environ | {"HF_HOME": str(task / "hf")}
    stopped = warm.run([*LORASHARD, *words], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert stopped.returncode == 1 and "Traceback" not in stopped.stdout + stopped.stderr
    lines = [line for line in stopped.stderr.splitlines() if "not finite" in line]
    assert len(lines) == 1 and re.match(r"lorashard: error: step \d+: .*rank \d: loss nan", lines[0])
    assert any(f"poisoned.jsonl line {number + 1}" in lines[0] for number in POISONED)
    status = json.loads((task / "cli" / "status.json").read_text())
    assert status["phase"] == "failed" and "not finite" in status["error"]
    words += ["--on_nonfinite", "skip", "--resume", "auto"]
    result = warm.run([*LORASHARD, *words], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    metrics = [json.loads(line) for line in (task / "cli" / "metrics.jsonl").read_text().splitlines()]
    step = int(re.search(r"step (\d+)", lines[0])[1])
    assert {line["step"]: line["loss"] for line in metrics if line.get("skipped_steps")}[step] == "nan"
    told = [line for line in result.stdout.splitlines() if f"step {step}: " in line and "not finite" in line]
    assert len(told) == 1 and "on_nonfinite: skip" in told[0]
    for rank in range(2):
        noted = [event for event in read_events(task / "cli") if (event["kind"], event["rank"]) == ("nonfinite", rank)]
        assert step in [event["step"] for event in noted]
