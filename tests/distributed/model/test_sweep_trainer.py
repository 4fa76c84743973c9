"""Several of TRL's trainers on one base: each adapter is the one that its trainer makes alone."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.bases import save_base
from helpers.forked_ranks import run_ranks
from helpers.tiny import find_differences
from helpers.words import make_tokenizer
from peft import LoraConfig, PeftModel
from transformers import Trainer, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import lorashard
from lorashard.engine.turns import Turns
from lorashard.errors import ConfigError, ShardError, TrainingError
from lorashard.runtime.dist import HostGroup
from lorashard.training.jobs import run_jobs
from lorashard.training.one_run import free

SEEDS = {"a": 3, "b": 4}
STEPS = {"a": 4, "b": 3}
ACCUMULATED = {"a": 2, "b": 3}  # so that one steps while the other accumulates


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(tmp_path_factory.mktemp("base") / "llama", "llama", torch.float32, num_hidden_layers=5)


def make_adapters() -> dict[str, LoraConfig]:
    common: dict[str, Any] = dict(task_type="CAUSAL_LM", target_modules="all-linear")
    return {"a": LoraConfig(r=4, lora_dropout=0.1, **common), "b": LoraConfig(r=8, use_dora=True, **common)}


def make_rows(kind: str, shift: int) -> datasets.Dataset:
    """Return rows of uneven lengths."""
    rows: list[dict[str, str]] = []
    for n in range(16):
        prompt, good, bad = f"w{5 + n + shift} w6", " w7 w8" + " w9" * (n % 4), " w20" + f" w{30 + n}" * (n % 3)
        rows.append({"prompt": prompt, "chosen": good, "rejected": bad} if kind == "dpo" else {"text": prompt + good})
    return datasets.Dataset.from_list(rows)


def build_trainer(kind: str, name: str, model: PeftModel, folder: Path, **options: Any) -> Trainer:
    """Return a job's trainer, which accumulates microbatches and evaluates while it trains.

    Args:
        options: further ones of its arguments.
    """
    config_class: Any = DPOConfig if kind == "dpo" else SFTConfig
    trainer_class: Any = DPOTrainer if kind == "dpo" else SFTTrainer
    args = config_class(
        output_dir=str(folder / name),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS[name],
        per_device_train_batch_size=1 if name == "a" else 2,
        gradient_accumulation_steps=ACCUMULATED[name],
        learning_rate=1e-2 / SEEDS[name],
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        seed=SEEDS[name],
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    shift = SEEDS[name]
    return trainer_class(
        model=model,
        args=args,
        train_dataset=make_rows(kind, shift),
        eval_dataset=make_rows(kind, shift).select(range(4)),
        processing_class=make_tokenizer(),
    )


def take(trainer: Trainer) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the adapter, and the losses that were logged."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    logged = [line[key] for line in trainer.state.log_history for key in ("loss", "eval_loss") if key in line]
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}, logged


def compare(rank: int, base: str, kind: str, folder: Path) -> dict[str, Any]:
    """Return the names of tensors that differ by job, and the losses together and alone."""
    options: dict[str, Any] = dict(placement="shard", dtype="float32", resident_layers=0)
    torch.manual_seed(7)
    models = lorashard.load(base, adapters=make_adapters(), **options)
    trainers = {name: build_trainer(kind, name, model, folder) for name, model in models.items()}
    outputs = lorashard.SweepTrainer(trainers).train()
    found = {}
    for name, adapter in make_adapters().items():
        assert outputs[name].global_step == STEPS[name]
        torch.manual_seed(7)
        alone = build_trainer(kind, name, lorashard.load(base, adapter, **options), folder)
        set_seed(SEEDS[name])
        alone.train()
        (tensors, losses), (expected, expected_losses) = take(trainers[name]), take(alone)
        found[name] = find_differences(tensors, expected), losses, expected_losses
    return found


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_each_adapter_is_the_one_that_its_trainer_makes_alone(base, kind, tmp_path):
    """Catches gradients reduced in the wrong microbatch (accelerate keeps one state for all trainers of a process),
    rows drawn from another job's random numbers, and a reference that another trainer switches on or off."""
    for found in run_ranks(compare, 2, base, kind, tmp_path):
        assert found.keys() == SEEDS.keys()
        for name, (differences, losses, expected) in found.items():
            assert differences == [] and losses == expected and len(losses) >= STEPS[name] + 1


def train_alone_again(rank: int, base: str, folder: Path) -> None:
    models = lorashard.load(base, adapters=make_adapters(), placement="host", dtype="float32")
    trainers = {name: build_trainer("sft", name, model, folder) for name, model in models.items()}
    lorashard.SweepTrainer(trainers).train()
    trainer, before = trainers["b"], take(trainers["b"])[0]
    trainer.args.max_steps = 2 * STEPS["b"]
    trainer.train()
    assert trainer.state.global_step == 2 * STEPS["b"] and find_differences(take(trainer)[0], before)
    optimizer = weakref.ref(trainer.optimizer.optimizer)
    free(trainer)
    assert optimizer() is None


def test_a_trainer_goes_on_alone_and_is_freed(base, tmp_path):
    """Catches a trainer that waits for turns after its sweep, and optimizer states that an ended job keeps from the
    others."""
    run_ranks(train_alone_again, 1, base, tmp_path)


def test_trainers_that_share_no_base_are_refused(base, tmp_path):
    """Catches jobs that would wait for each other on two engines, and one model that two trainers train."""
    options: dict[str, Any] = dict(placement="host", dtype="float32", device=torch.device("cpu"))
    first, second = (lorashard.load(base, adapters=make_adapters(), **options) for _ in range(2))
    with pytest.raises(ConfigError, match="torch_compile"):
        lorashard.load(base, adapters=make_adapters(), torch_compile={"backend": "eager"}, **options)
    single = lorashard.load(base, make_adapters()["a"], **options)
    for models, said in [
        ({"a": first["a"], "b": second["b"]}, "2 trainers of 2 models on 2 bases"),
        ({"a": first["a"], "b": first["a"]}, "2 trainers of 1 models on 1 bases"),
        ({}, "0 trainers of 0 models on 0 bases"),
        ({"a": single}, "call its train"),
    ]:
        trainers = {name: build_trainer("sft", name, model, tmp_path) for name, model in models.items()}
        with pytest.raises(ConfigError, match=said):
            lorashard.SweepTrainer(trainers)


def test_a_trainer_that_looks_for_its_batch_size_is_refused(base, tmp_path):
    """Catches a job that begins again in the middle of a step, out of memory, while the others wait for it there."""
    models = lorashard.load(base, adapters=make_adapters(), placement="host", dtype="float32")
    trainers = {name: build_trainer("sft", name, model, tmp_path) for name, model in models.items()}
    lorashard.SweepTrainer(trainers)
    trainers["b"] = build_trainer("sft", "b", models["b"], tmp_path, auto_find_batch_size=True)
    with pytest.raises(ConfigError, match="arguments of b: auto_find_batch_size.*per_device_train_batch_size"):
        lorashard.SweepTrainer(trainers)


def lose_jobs(rank: int, lost: tuple[str, str]) -> tuple[str, list[str]]:
    """End a job early on a rank alone, or another on each; return what is said, and which steps were done."""
    turns, done = Turns(torch.device("cpu"), shares_visits=False), []

    def work(name: str) -> None:
        for step in range(3):
            turns.backward(torch.ones((), requires_grad=True) * 2)
            done.append(f"{name}{step}")
            if name == lost[rank]:
                raise TrainingError("enough")

    group = HostGroup.of_all()
    both_fail = run_jobs(turns, {name: partial(fail, name) for name in "ab"}, group)
    assert [type(error) for error in both_fail.values()] == [TrainingError] * 2
    with pytest.raises(ShardError) as caught:
        run_jobs(turns, {name: partial(work, name) for name in "ab"}, group)
    return str(caught.value), done


def fail(name: str) -> None:
    raise TrainingError(name)


@pytest.mark.parametrize("lost", [("a", "b"), ("", "a"), ("b", "")])
def test_a_rank_that_loses_a_job_alone_does_nothing_more_of_others(lost):
    """Catches gradients that are added to another job's: on a base that is whole on each rank nothing else compares
    the ranks before a step's sums."""
    found = run_ranks(lose_jobs, 2, lost)
    for name, (said, done) in zip(lost, found, strict=True):
        assert "the ranks have diverged" in said and ("fails: enough" in said) == bool(name)
        assert not name or done[-1] == f"{name}0"
