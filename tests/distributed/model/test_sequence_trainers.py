"""TRL's trainers, unmodified, on rows that ranks share: their curves are those of one rank with whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from helpers.bases import save_base
from helpers.forked_ranks import run_ranks
from helpers.words import make_tokenizer
from peft import LoraConfig, PeftModel
from torch.utils.data import DataLoader
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

import lorashard

TOLERANCE = 1e-5
TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig),
    "packed sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
}
COMPARED = (
    "loss",
    "grad_norm",
    "num_tokens",
    "entropy",
    "mean_token_accuracy",
    "rewards/margins",
    "logps/chosen",
    "eval_loss",
    "eval_entropy",
    "eval_mean_token_accuracy",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(tmp_path_factory.mktemp("base") / "llama", "llama", torch.float32, num_hidden_layers=3)


def make_rows(kind: str) -> datasets.Dataset:
    """Return rows of uneven lengths."""
    rows: list[dict[str, Any]] = []
    for n in range(12):
        prompt, good, bad = f"w{5 + n} w6", " w7 w8" + " w9" * (n % 4), " w20" + f" w{30 + n}" * (n % 3)
        if kind == "dpo":
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
        elif kind == "kto":
            rows.append({"prompt": prompt, "completion": good if n % 2 else bad, "label": bool(n % 2)})
        else:
            rows.append({"prompt": prompt, "completion": good})
    return datasets.Dataset.from_list(rows)


def load(base: str, size: int) -> PeftModel:
    torch.manual_seed(7)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return lorashard.load(base, lora, "shard", dtype="float32", sequence_parallel_size=size)


def train(rank: int, base: str, kind: str, size: int, num_rows: int, folder: Path) -> dict[str, list[float]]:
    """Return what a trainer logs, by name."""
    trainer_class, config_class = TRAINERS[kind]
    model = load(base, size)
    args = config_class(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=3,
        per_device_train_batch_size=num_rows,
        per_device_eval_batch_size=num_rows,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **({"packing": True, "max_length": 16, "packing_strategy": "bfd"} if kind == "packed sft" else {}),
    )
    rows = make_rows(kind)
    trainer = trainer_class(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows.select(range(5)),  # the last batch is part-filled
        processing_class=make_tokenizer(),
    )
    trainer.train()
    history = trainer.state.log_history
    return {name: [line[name] for line in history if name in line] for name in COMPARED}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "packed sft", "dpo", "kto"])
def test_curves_are_those_of_one_rank(kind, base, tmp_path):
    """Catches loaders that give a group's ranks other rows, and losses that count rows or tokens twice."""
    [alone] = run_ranks(train, 1, base, kind, 1, 2, tmp_path / "alone")
    for shared in run_ranks(train, 2, base, kind, 2, 2, tmp_path / "shared"):
        assert shared.keys() == alone.keys() and len(alone["loss"]) == 3 and len(alone["eval_loss"]) >= 1
        for name, values in alone.items():
            assert shared[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name


def test_groups_share_the_batch(base, tmp_path):
    """Catches ranks that count as data-parallel where they share a row: 2 groups of 2 ranks train and evaluate as 2."""
    [alone, _] = run_ranks(train, 2, base, "sft", 1, 2, tmp_path / "alone")
    for shared in run_ranks(train, 4, base, "sft", 2, 2, tmp_path / "shared"):
        for name, values in alone.items():
            assert shared[name] == pytest.approx(values, rel=TOLERANCE), name


def gather_rows(rank: int, base: str) -> tuple[list[int], list[str]]:
    model = load(base, 2)
    accelerator = Accelerator(cpu=True)
    numbers, words = [], []
    for batch in accelerator.prepare(DataLoader(range(5), batch_size=2)):
        numbers += accelerator.gather_for_metrics(batch).tolist()
        words += accelerator.gather_for_metrics([str(number) for number in batch.tolist()])
    del model
    return numbers, words


def test_gathered_metrics_are_of_each_row_once(base):
    """Catches copies that a group's ranks have of a row's values, and rows that are cut off in their place."""
    for numbers, words in run_ranks(gather_rows, 4, base):
        assert numbers == [*range(5)] and words == ["0", "1", "2", "3", "4"]
