"""Layer-major accumulation under sharding, in the hands of a trainer that knows nothing of it."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from helpers.forked_ranks import run_ranks
from helpers.tiny import (
    VOCAB_SIZE,
    build_model,
    make_batch,
)
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import lorashard
from lorashard.model.stacks import find_decoder_stack

CHECKPOINTING = ("off", "non-reentrant", "reentrant")


def shard(model: PeftModel, rows: int | None = None) -> PeftModel:
    return lorashard.shard(model, layer_microbatch_size=rows)


def make_packed_batch() -> dict[str, torch.Tensor]:
    tokens = make_batch(rows=1, tokens=20)["input_ids"][0].tolist()
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return collate([{"input_ids": tokens, "seq_lengths": [3, 7, 1, 5, 4]}])


def find_worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a part of each tensor's largest value."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


def train(folder: str, rows: int | None, options: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run TRL's unmodified trainer; return the losses that it logs and the adapter that it leaves."""
    model = shard(build_model(), rows)
    is_forward: list[bool] = []
    mlp = find_decoder_stack(model)[1][0].mlp
    mlp.register_forward_pre_hook(lambda *args: is_forward.append(torch._C._current_graph_task_id() == -1))
    words = {"<pad>": 0} | {str(i): i for i in range(1, VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="<pad>", eos_token="1")
    data = Dataset.from_list([{"input_ids": make_batch(i, 1, 5 + i % 6)["input_ids"][0].tolist()} for i in range(32)])
    arguments = SFTConfig(
        folder,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        logging_steps=1,
        optim="sgd",  # Adam would blow the least difference up where a gradient is nearly zero
        learning_rate=1.0,
        per_device_train_batch_size=4,
        ddp_find_unused_parameters=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    assert sum(is_forward) >= 2 * 4 if rows == 1 else sum(is_forward) == 2
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def check_trainer(rank: int, folder: str) -> dict[str, float]:
    worst = {}
    for options in (
        {"max_length": 32},
        {"max_length": None, "padding_free": True},
        {"max_length": 32, "packing": True},
    ):
        (plain_losses, plain), (losses, split) = (train(folder, rows, options) for rows in (None, 1))
        assert len(losses) == 2 and losses == pytest.approx(plain_losses, rel=1e-5)
        worst[str(options)] = find_worst(split, plain)
    return worst


def test_an_unmodified_trainer_trains_the_same_adapter(tmp_path):
    """TRL's batches, padded, padding-free and packed, with what else its trainer hands down to the layers."""
    for worst in run_ranks(check_trainer, 2, str(tmp_path)):
        assert {case: error for case, error in worst.items() if error > 1e-5} == {}
