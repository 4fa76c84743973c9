"""Layer-major accumulation under sharding: each unit is visited once, and holds the activations of a few rows."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from support import run_ranks
from tiny import (
    NUM_LAYERS,
    VOCAB_SIZE,
    add_lora,
    build_base,
    build_model,
    make_batch,
    set_checkpointing,
    take_gradients,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import lorashard
from lorashard.model.layer_major import split_layers
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


def check_gradients(rank: int) -> dict[str, float]:
    worst = {}
    batches = {"rows": make_batch(rows=5), "packed": make_packed_batch()}
    for family, checkpointing, kind in itertools.product(("llama-tied", "qwen3"), CHECKPOINTING, batches):
        plain, split = (
            build_model(family, checkpointing=checkpointing),
            build_model(family, checkpointing=checkpointing),
        )
        shard(split, rows=2)
        split.eval()
        with torch.no_grad():
            split(**batches[kind], use_cache=False)
        split.train()
        for _ in range(2):
            for model in (plain, split):
                model(**batches[kind], use_cache=False).loss.backward()
        worst[f"{family} {checkpointing} {kind}"] = find_worst(take_gradients(split), take_gradients(plain))
    return worst


def test_pieces_of_a_sharded_models_batch_give_the_plain_models_gradients():
    """The order of the sum over rows differs, nothing else: a unit that is gone before its last piece would show."""
    for worst in run_ranks(check_gradients, 2):
        assert {case: error for case, error in worst.items() if error > 1e-5} == {}


def check_placements(rank: int, folder: str, cases: list[dict[str, Any]]) -> dict[str, float]:
    plain = build_model(checkpointing="non-reentrant")
    plain(**make_batch(rows=5), use_cache=False).loss.backward()
    expected = take_gradients(plain)
    worst = {}
    for options in cases:
        lora = plain.peft_config["default"]
        split = lorashard.load(folder, lora, dtype=torch.float32, layer_microbatch_size=2, **options)
        set_checkpointing(split, "non-reentrant")
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if parameter.requires_grad:
                    split.get_parameter(name).copy_(parameter)
        split.train()(**make_batch(rows=5), use_cache=False).loss.backward()
        worst[str(options)] = find_worst(take_gradients(split), expected)
    return worst


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_pieces_of_a_batch_are_right_wherever_the_base_rests(tmp_path, world_size):
    """Catches a unit that is copied or mapped and gone before its last piece has been computed."""
    build_base().save_pretrained(tmp_path)
    cases: list[dict[str, Any]] = [{"placement": name} for name in ("replicate", "host", "file")]
    cases += [{"placement": "shard", "resident_layers": 2}]
    cases += [{"placement": "shard", "shard_group_size": 2}] if world_size == 4 else []
    for worst in run_ranks(check_placements, world_size, str(tmp_path), cases):
        assert {case: error for case, error in worst.items() if error > 1e-5} == {}


def check_gathers(rank: int, checkpointing: str) -> dict[str, int]:
    """Return the gathers of a steady step: of 2 rows, of 8 rows in pieces of 2, and of 4 microbatches of 2 rows."""

    def one_batch(model: PeftModel, rows: int) -> None:
        model(**make_batch(rows=rows), use_cache=False).loss.backward()

    def accumulation(model: PeftModel) -> None:
        for _ in range(4):
            one_batch(model, 2)

    steps: dict[str, tuple[int | None, Callable[[PeftModel], None]]] = {
        "microbatch": (None, lambda model: one_batch(model, 2)),
        "split": (2, lambda model: one_batch(model, 8)),
        "accumulation": (None, accumulation),
    }
    counts = {}
    for name, (rows, step) in steps.items():
        model = shard(build_model(checkpointing=checkpointing), rows)
        step(model)
        before = lorashard.stats(model).num_gathers
        step(model)
        counts[name] = lorashard.stats(model).num_gathers - before
    return counts


@pytest.mark.parametrize("checkpointing", ("off", "non-reentrant"))
def test_a_step_in_pieces_gathers_what_one_microbatch_gathers(checkpointing):
    """A layer that enters its unit once a piece would gather as often as accumulation does."""
    for counts in run_ranks(check_gathers, 2, checkpointing):
        assert counts["split"] == counts["microbatch"] >= NUM_LAYERS
        assert counts["accumulation"] == 4 * counts["microbatch"]


def measure_peak_bytes(step: Callable[[], None]) -> int:
    """Return the most that torch had allocated at once during `step`, beyond what it had before."""
    gc.collect()  # what is freed of the model before, in the middle of the step, would count as the step's
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


def check_peak(rank: int, checkpointing: str) -> dict[tuple[bool, int], int]:
    batch = make_batch(rows=8, tokens=64)
    peaks = {}
    for is_sharded, rows in itertools.product((False, True), (1, 2, 4, 8)):
        base = build_base(hidden_size=64, intermediate_size=1024, num_hidden_layers=3, vocab_size=VOCAB_SIZE)
        model = add_lora(base, target_modules=["q_proj"]).train()
        set_checkpointing(model, checkpointing)
        if is_sharded:
            lorashard.shard(model)
        split_layers(find_decoder_stack(model)[1], rows)

        def step(model: PeftModel = model) -> None:
            model(**batch, use_cache=False).loss.backward()

        step()
        peaks[is_sharded, rows] = measure_peak_bytes(step)
    return peaks


@pytest.mark.parametrize("checkpointing", ("non-reentrant", "reentrant"))
def test_a_layer_holds_the_activations_of_a_piece(checkpointing):
    """Pieces that are all recomputed before the first is differentiated: right gradients, and no memory saved."""
    for peaks in run_ranks(check_peak, 2, checkpointing):
        for is_sharded in (False, True):
            # What grows with the rows of a piece is a layer's inside: each row adds as much as the next.
            each_row = (peaks[is_sharded, 8] - peaks[is_sharded, 1]) / 7
            for rows in (2, 4):
                grown = peaks[is_sharded, rows] - peaks[is_sharded, 1]
                assert grown == pytest.approx((rows - 1) * each_row, rel=0.1)
            assert peaks[is_sharded, 1] < peaks[is_sharded, 8] / 3


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
