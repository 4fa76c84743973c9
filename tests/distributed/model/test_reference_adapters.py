"""TRL's references on a sharded base: a second adapter that TRL adds by itself, or the base with adapters off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base, find_differences
from helpers.words import make_tokenizer
from peft import PeftModel
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

import lorashard

STEPS = 2


def make_rows(kind: str) -> datasets.Dataset:
    """Return prompts with answers, of uneven lengths."""
    rows = []
    for n in range(12):
        prompt, good, bad = f"w{5 + n} w6", " w7 w8" + " w9" * (n % 4), " w20" + f" w{30 + n}" * (n % 3)
        answers = {"chosen": good, "rejected": bad} if kind == "dpo" else {"completion": good, "label": n % 3 > 0}
        rows.append({"prompt": prompt, **answers})
    return datasets.Dataset.from_list(rows)


def train(kind: str, model: PeftModel, folder: Path, has_second: bool) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Train a few steps and return what was logged, and both adapters."""
    config_class: Any = DPOConfig if kind == "dpo" else KTOConfig
    trainer_class: Any = DPOTrainer if kind == "dpo" else KTOTrainer
    args = config_class(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trainer_class(model=model, args=args, train_dataset=make_rows(kind), processing_class=make_tokenizer())
    assert "ref" in model.peft_config  # added by TRL
    if not has_second:
        model.delete_adapter("ref")
    trainer.train()
    kept = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen", "kl")
    logged = [{key: line[key] for key in kept if key in line} for line in trainer.state.log_history[:-1]]
    adapters = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" in name}
    return logged, adapters


@pytest.mark.parametrize("kind", ["dpo", slow("kto")])
def test_a_reference_is_a_second_adapter_or_the_base_alone(kind, tmp_path):
    """Catches a "ref" that lands on another device, trains, or is not used, and adapters that stay on, or off."""

    def body(rank):
        found = {}
        for has_second in (True, False):
            results = []
            for is_sharded in (False, True):
                model = add_lora(build_base(num_hidden_layers=2))
                if is_sharded:
                    model = lorashard.shard(model, "shard", resident_layers=0)
                results.append(train(kind, model, tmp_path, has_second))
            (plain, expected), (sharded, adapters) = results
            found[has_second] = (find_differences(adapters, expected), sharded == plain, sharded)
        return found

    for found in run_ranks(body, 2):
        for differences, is_same, steps in found.values():
            assert differences == [] and is_same and len(steps) == STEPS
        # The adapter's lora_B is not zero, so its copy and the base are two references.
        assert found[True][2] != found[False][2]
