"""`generate` on a base that is sharded over ranks: plain PEFT's tokens on each, wherever each of them stops."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base, find_differences, make_batch, set_checkpointing, take_gradients
from peft import PeftModel
from transformers import GenerationMixin
from trl.generation.vllm_generation import VLLMGeneration

import lorashard
from lorashard.errors import ConfigError

NEW_TOKENS = 6
# Two rows for even ranks, and a longer one for odd ranks.
PROMPTS = ([[5, 6, 7], [9, 10, 11]], [[11, 12, 13, 14, 15, 16, 17]])
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "up to a length": {"max_new_tokens": None, "max_length": 10},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 2.0},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "a caller who knows no better": {"synced_gpus": False},
}


def make_plain(dtype: torch.dtype = torch.float32) -> PeftModel:
    return add_lora(build_base(dtype=dtype, num_hidden_layers=4, initializer_range=0.3, pad_token_id=0))


def make_sharded(**placement: Any) -> PeftModel:
    return lorashard.shard(make_plain(), "shard", resident_layers=0, **placement)


def answer(model: Any, rank: int, stop_ids: list[int] | None, **arguments: Any) -> list[list[int]]:
    """Return prompts and answers of this rank, sampled with a seed of its own."""
    ids = torch.tensor(PROMPTS[rank % 2])
    torch.manual_seed(rank)
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | arguments
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), eos_token_id=stop_ids, pad_token_id=0, **arguments
    )
    return output.tolist()


@pytest.fixture(scope="module")
def stop_ids() -> list[int]:
    """Tokens that end the answers of even ranks early, by themselves those of no other."""
    first, second = answer(make_plain().eval(), 0, None)
    return [first[5], second[6]]


@pytest.mark.parametrize(
    "world_size, placement, modes",
    [(2, {}, MODES), slow(4, {"shard_group_size": 2}, ["greedy"])],
)
def test_each_rank_gets_its_own_tokens(stop_ids, world_size, placement, modes):
    """Catches a hang, or another rank's weights, where answers of unequal numbers and lengths end at unequal times."""

    def body(rank):
        plain, sharded = make_plain().eval(), make_sharded(**placement).eval()
        answers = {}
        for mode in modes:
            expected = answer(plain, rank, stop_ids, **MODES[mode] | {"synced_gpus": None})
            answers[mode] = (answer(sharded, rank, stop_ids, **MODES[mode]), expected)
        with plain.disable_adapter(), sharded.disable_adapter():
            answers["adapter off"] = (answer(sharded, rank, stop_ids), answer(plain, rank, stop_ids))
        wrapped = Accelerator(cpu=True).prepare(sharded)
        answers["in DDP"] = (answer(wrapped.module, rank, stop_ids), answer(plain, rank, stop_ids))
        return answers

    results = run_ranks(body, world_size)
    for answers in results:
        assert [mode for mode, (found, expected) in answers.items() if found != expected] == []
    new_tokens = [len(results[rank]["greedy"][0][0]) - len(PROMPTS[rank][0]) for rank in (0, 1)]
    assert new_tokens[0] < new_tokens[1] == NEW_TOKENS
    assert results[0]["adapter off"] != results[0]["greedy"]


def test_answers_between_forward_and_backward_change_no_gradient(stop_ids):
    """Catches a slot that generation overwrites while the backward still reads it, and passes counted apart."""

    def train(model: PeftModel, rank: int, checkpointing: str) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
        set_checkpointing(model, checkpointing)
        loss = model.train()(**make_batch(rank)).loss
        answers = answer(model.eval(), rank, stop_ids)
        model.train()
        loss.backward()
        return take_gradients(model), answers

    def body(rank):
        found = []
        for checkpointing in ("off", "non-reentrant"):
            (plain, expected), (sharded, answers) = (
                train(m(), rank, checkpointing) for m in (make_plain, make_sharded)
            )
            found.append((find_differences(sharded, plain), answers == expected))
        return found

    assert run_ranks(body, 2) == [[([], True)] * 2] * 2


def test_ranks_that_need_no_other_wait_for_none():
    """Catches ranks kept in step, at a collective a token, where each has the whole base: here they would hang."""

    def body(rank):
        model = lorashard.shard(make_plain(), "replicate").eval()
        for _ in range(rank):
            answer(model, rank, None)
        return model.get_base_model().generate.__func__ is GenerationMixin.generate

    assert run_ranks(body, 2) == [True, True]


def test_what_cannot_keep_ranks_together_is_refused(stop_ids):
    """Catches a hang where each rank runs as many forwards as it likes, and vLLM's weights read from placeholders."""

    def body(rank):
        model = make_sharded().eval()
        vllm = VLLMGeneration.__new__(VLLMGeneration)  # vLLM itself is not needed to ask for the weights
        vllm.model = model
        vllm._dist = type("NoBackend", (), {"gather_params": staticmethod(lambda params: nullcontext())})
        config = model.generation_config
        cases = [
            (lambda: answer(model, rank, stop_ids, prefill_chunk_size=2), "prefill_chunk_size.*replicate"),
            (lambda: answer(model, rank, stop_ids, prompt_lookup_num_tokens=2), "prompt_lookup_num_tokens"),
            (lambda: model.generate_batch([[5, 6]], generation_config=config), "use_transformers_continuous_batching"),
            (lambda: answer(model, rank, stop_ids, cache_implementation="paged"), "continuous batching"),
            (lambda: next(vllm._iter_named_params()), "use_vllm"),
        ]
        for ask, message in cases:
            with pytest.raises(ConfigError, match=message):
                ask()
        return answer(model, rank, stop_ids) == answer(make_plain().eval(), rank, stop_ids)

    assert run_ranks(body, 2) == [True, True]
