"""The best checkpoint and early stopping: as in transformers, on any placement, for no gather but the evaluations'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import warm
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import VOCAB_SIZE, build_base
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import lorashard
from lorashard.config.run_config import RunConfig

CPU_BUDGET_S = 100  # forked runs that evaluate and save at each step
LORASHARD = [str(Path(sys.executable).with_name("lorashard"))]
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
# With these the best evaluation is neither the first nor the last.
LEARNING_RATES = {"lora": 0.03, "dora": 0.03, "modules_to_save": 0.01}
STEPS, EVAL_STEPS, PATIENCE = 20, 2, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_base(num_hidden_layers=2, max_position_embeddings=256).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCAB_SIZE)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return folder


def make_rows(seed: int, num_rows: int) -> list[list[int]]:
    """Return rows in which a word is followed by the next one, most of the time: few of them are soon overlearned."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(2, 40, (num_rows,), generator=generator)
    noise = torch.randint(2, VOCAB_SIZE, (num_rows, 12), generator=generator)
    is_noise = torch.rand((num_rows, 12), generator=generator) < 0.3
    return torch.where(is_noise, noise, starts[:, None] + torch.arange(12)).tolist()


class _Forwards(TrainerCallback):
    """Runs two forwards, and nothing else, where another run evaluates two batches on each rank."""

    def __init__(self, model):
        self._model = model

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVAL_STEPS == 0:
            self._model.eval()
            with torch.no_grad():
                for _ in range(2):
                    self._model(input_ids=torch.tensor([[1, 2, 3]]))
            self._model.train()


def train(rank: int, base: Path, out: Path, placement: str | None, kind: str = "lora", **options) -> dict:
    """Train on this rank; `placement` None is plain PEFT without lorashard."""
    lora = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **KINDS[kind]})
    torch.manual_seed(0)
    if placement is None:
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    else:
        model = lorashard.load(str(base), lora, placement, dtype=torch.float32)
    evaluation = {"eval_strategy": "steps", "eval_steps": EVAL_STEPS, "per_device_eval_batch_size": 2}
    best = {"save_strategy": "steps", "save_steps": EVAL_STEPS, "load_best_model_at_end": True}
    arguments = SFTConfig(
        **{
            "output_dir": str(out),
            "use_cpu": True,
            "bf16": False,
            "max_steps": STEPS,
            "learning_rate": LEARNING_RATES[kind],
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "ddp_find_unused_parameters": False,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            **evaluation,
            **best,
            **options,
        }
    )
    rows = {
        name: Dataset.from_dict({"input_ids": ids, "labels": ids})
        for name, ids in {"train_dataset": make_rows(1, 8), "eval_dataset": make_rows(2, 6)}.items()
    }
    stopping = [EarlyStoppingCallback(PATIENCE)] if arguments.load_best_model_at_end else [_Forwards(model)]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    trainer = SFTTrainer(model, arguments, processing_class=tokenizer, callbacks=stopping, **rows)
    trainer.train()
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    result = {
        "last_step": trainer.state.global_step,
        "best_step": trainer.state.best_global_step,
        "eval_losses": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
        "gathers": lorashard.stats(model).num_gathers if placement else 0,
    }
    if trainer.state.best_model_checkpoint is not None:
        best_tensors = load_file(Path(trainer.state.best_model_checkpoint, "adapter_model.safetensors"))
        result["is_best"] = all(torch.equal(saved[name], best_tensors[name]) for name in saved.keys() | best_tensors)
    return result


@pytest.mark.parametrize(
    ("kind", "placements"),
    [("lora", ["shard"]), *(slow(kind, ["shard", "host", "file", "replicate"]) for kind in KINDS)],
)
def test_the_best_checkpoint_and_the_stop_are_those_of_plain_trl(base, tmp_path, kind, placements):
    """An evaluation that gives another loss under a placement chooses another checkpoint, and nobody sees it."""

    def body(rank):
        return [train(rank, base, tmp_path / str(placement), placement, kind) for placement in (None, *placements)]

    for plain, *others in run_ranks(body, 2):
        assert plain["is_best"] and EVAL_STEPS < plain["best_step"] < plain["last_step"] < STEPS, plain
        for other in others:
            assert other | {"gathers": 0} == plain


def test_evaluating_and_choosing_costs_the_gathers_of_the_forwards_alone(base, tmp_path):
    """A best adapter that is read back through the base, or a pass too many in each evaluation."""

    def body(rank):
        chosen = train(rank, base, tmp_path / "chosen", "shard")
        steps = {"max_steps": chosen["last_step"], "load_best_model_at_end": False, "save_strategy": "no"}
        forwards = train(rank, base, tmp_path / "forwards", "shard", eval_strategy="no", **steps)
        return chosen["gathers"], forwards["gathers"], len(chosen["eval_losses"])

    for gathers, expected, num_evaluations in run_ranks(body, 2):
        assert gathers == expected > 0 and num_evaluations > 2


@pytest.fixture(scope="module")
def task(base) -> Path:
    for name, rows in {"train": make_rows(1, 8), "eval": make_rows(2, 6)}.items():
        lines = [json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in rows]
        (base / f"{name}.jsonl").write_text("\n".join(lines))
    return base


def make_options(task: Path, out: Path, **options) -> dict[str, str]:
    values = {
        "model": task,
        "dataset": task / "train.jsonl",
        "eval_dataset": task / "eval.jsonl",
        "output_dir": out,
        "dtype": "float32",
        "placement": "shard",
        "max_steps": STEPS,
        "learning_rate": 0.03,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "lora_r": 4,
        "eval_strategy": "steps",
        "eval_steps": EVAL_STEPS,
        "save_steps": EVAL_STEPS,
        "load_best_model_at_end": True,
    }
    return {name: str(value) for name, value in (values | options).items() if value is not None}


def run_finetune(options: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"HF_HOME": str(folder / "hf")}
    return warm.run([*LORASHARD, "finetune", *words], env=env, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
def test_a_run_stops_early_and_ends_with_its_best_adapter(task, tmp_path):
    """A run folder whose adapter is the last step's, though the status says that the best was loaded."""
    out = tmp_path / "out"
    options = make_options(task, out, cpu=2, early_stopping_patience=PATIENCE, sample_prompts="[w2 w3 w4]")
    result = run_finetune(options, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
    best = min(losses, key=losses.__getitem__)
    last = json.loads((out / "status.json").read_text())["step"]
    assert last == best + PATIENCE * EVAL_STEPS < STEPS and last == max(losses)
    saved, chosen, latest = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (out, out / f"checkpoint-{best}", out / f"checkpoint-{last}")
    )
    assert all(torch.equal(saved[name], chosen[name]) for name in saved.keys() | chosen)
    assert any(not torch.equal(saved[name], latest[name]) for name in saved)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == sorted(losses)


def test_a_refusal_is_one_line_and_exit_code_2(tmp_path):
    """A mistake that each rank finds for itself costs a start of all ranks."""
    options = make_options(tmp_path, tmp_path / "out", cpu=2, early_stopping_patience=1, eval_strategy="no")
    result = run_finetune(options, tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "load_best_model_at_end" in result.stderr and not (tmp_path / "out").exists()


def test_checkpoints_follow_the_evaluations_where_the_best_is_wanted(tmp_path):
    """transformers saves every 500 steps by default, so that load_best_model_at_end alone would be refused."""
    options = {"model": "m", "dataset": "d", "eval_dataset": "e", "load_best_model_at_end": True}
    built = SFTConfig(output_dir=str(tmp_path), use_cpu=True, **RunConfig(**options, dtype="float32").trainer_options)
    assert (built.eval_strategy, built.save_strategy, built.metric_for_best_model) == ("epoch", "epoch", "loss")
    assert RunConfig(**options, save_strategy="best").trainer_options["save_strategy"] == "best"
    assert "save_strategy" not in RunConfig(model="m", dataset="d", eval_dataset="e").trainer_options
