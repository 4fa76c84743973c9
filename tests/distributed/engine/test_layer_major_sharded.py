"""Per-layer micro-batching under sharding, with a trainer that knows nothing of it."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base, make_batch
from helpers.words import make_tokenizer
from trl import SFTConfig, SFTTrainer

import lorashard
from lorashard.model.stacks import find_decoder_stack


def find_worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, as a part of each tensor's largest value."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


def train(folder: str, rows: int | None, options: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run TRL's unmodified trainer; return the losses that it logs and the adapter that it leaves."""
    model = lorashard.shard(add_lora(build_base(num_hidden_layers=3)).train(), layer_microbatch_size=rows)
    calls: list[object] = []
    mlp = find_decoder_stack(model)[1][0].mlp
    mlp.register_forward_pre_hook(lambda *args: calls.append(None))
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
    trainer = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=make_tokenizer())
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    num_passes = 2 * 2  # of each step one in forward and one in backward, where it is computed anew
    assert len(calls) >= num_passes * 4 if rows == 1 else len(calls) == num_passes
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def check_trainer(rank: int, folder: str, cases: list[dict]) -> dict[str, float]:
    worst = {}
    for options in cases:
        (plain_losses, plain), (losses, split) = (train(folder, rows, options) for rows in (None, 1))
        assert len(losses) == 2 and losses == pytest.approx(plain_losses, rel=1e-5)
        worst[str(options)] = find_worst(split, plain)
    return worst


@pytest.mark.parametrize(
    "cases",
    [[{"max_length": 32}], slow([{"max_length": None, "padding_free": True}, {"max_length": 32, "packing": True}])],
    ids=["padded", "packed"],
)
def test_an_unmodified_trainer_trains_the_same_adapter(tmp_path, cases):
    """TRL's batches, padded, padding-free and packed, with what else its trainer hands down to the layers."""
    for worst in run_ranks(check_trainer, 2, str(tmp_path), cases):
        assert {case: error for case, error in worst.items() if error > 1e-5} == {}
