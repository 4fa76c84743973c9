"""The plan where ranks share each sequence: memory, work and exchanges of a rank, and how many ranks share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.planning import LORA, build_meta, build_sized
from peft import LoraConfig, PeftModel
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from lorashard.config.methods import METHODS
from lorashard.config.placement import PlacementOptions, ResolvedPlacement
from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.planning import auto
from lorashard.planning.auto import BaseModel, Training, plan_training
from lorashard.planning.choose import Plan, name_placement
from lorashard.planning.costs import compute_seconds, exchange_seconds
from lorashard.planning.hardware import Cluster, find_gpu_type
from lorashard.planning.run_plan import describe_training
from lorashard.planning.trace import Microbatch, trace
from lorashard.planning.tracker import Work

HEADS, KV_HEADS, WIDTH, TOKENS = 8, 2, 16, 512
ONE_ROW = Microbatch(1, TOKENS, "cpu", is_autocast=False)
GPU = find_gpu_type("l4")
SIZES = dict(vocab_size=96, num_hidden_layers=1, hidden_size=64, num_attention_heads=4)
EXPERTS = dict(num_key_value_heads=2, head_dim=16, intermediate_size=32, num_local_experts=2, num_experts_per_tok=1)


def build(**sizes):
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return build_sized("llama", **{"num_hidden_layers": 3} | heads | sizes)


@pytest.mark.parametrize(("num_ranks", "checkpointing"), ((2, {}), (8, None)), ids=("recomputed", "saved"))
def test_a_rank_has_its_part_of_the_work_and_exchanges_what_attention_needs(num_ranks, checkpointing):
    """Catches attention over a rank's own tokens alone, whose work is a fraction of the truth, key-value heads that are
    not repeated for ranks beyond them, and recomputation without its exchanges."""
    microbatch = replace(ONE_ROW, checkpointing=checkpointing)
    alone, shared = (
        trace(build_meta(build()), replace(microbatch, sequence_parallel_size=size)) for size in (1, num_ranks)
    )
    kv_heads = max(KV_HEADS, num_ranks)
    pass_bytes = (2 * HEADS + 2 * kv_heads) * WIDTH * TOKENS // num_ranks * 4  # queries, outputs, keys, values
    for layer, whole, num_passes in (
        (shared.forward[2], alone.forward[2], 1),
        (shared.backward[2], alone.backward[2], 1 if checkpointing is None else 2),
    ):
        assert layer.flops == pytest.approx(whole.flops / num_ranks, rel=1e-6)
        assert (layer.exchanged_bytes, layer.num_exchanges) == (num_passes * pass_bytes, 2 * num_passes)
        assert whole.num_exchanges == 0
    if checkpointing == {}:
        assert shared.saved_bytes == pytest.approx(alone.saved_bytes / num_ranks, rel=0.01)
    assert alone.layer_bytes / num_ranks < shared.layer_bytes < alone.layer_bytes * 0.8


def test_scores_and_masks_are_those_of_all_tokens():
    """Catches a plan that fits because eager attention's scores, or a mask, are as wide as a rank's own tokens."""
    long = replace(ONE_ROW, row_tokens=4 * TOKENS, num_rows=2)
    masks = {}
    for has_mask in (False, True):
        shared = replace(long, sequence_parallel_size=4, has_mask=has_mask)
        masks[has_mask] = trace(build_meta(build(num_hidden_layers=1)), shared).layer_bytes
    assert masks[True] - masks[False] > long.num_rows * long.row_tokens**2 * 0.9
    model = build_meta(build(num_hidden_layers=1))
    model.get_base_model().config._attn_implementation = "eager"
    scores_bytes = long.num_rows * HEADS // 4 * long.row_tokens**2 * 4
    found = trace(model, replace(long, sequence_parallel_size=4))
    assert scores_bytes < found.layer_bytes < 8 * scores_bytes


def test_attention_that_is_no_exchange_of_heads_is_not_shared():
    """Catches a model that is planned for ranks which could never share it: code with attention of its own, and places
    that are counted within what a rank has."""
    llama4 = Llama4TextConfig(**SIZES, **EXPERTS, intermediate_size_mlp=32)
    for model, found in (
        (FalconForCausalLM(FalconConfig(**SIZES)), "AttentionInterface"),
        (Llama4ForCausalLM(llama4), "chunked_attention, attention in chunks"),
    ):
        with pytest.raises(ConfigError, match=f"sequence_parallel_size: .* expected .*, found .*{found}; leave it out"):
            trace(
                build_meta(model, target_modules=".*proj|.*query_key_value"), replace(ONE_ROW, sequence_parallel_size=2)
            )


def test_sinks_are_exchanged_with_their_heads():
    """Catches eager attention that is planned with the sinks of all heads, which a rank's part of these cannot take."""
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, attn_implementation="eager")).bfloat16()
    alone, shared = (
        trace(build_meta(model, target_modules=".*proj"), replace(ONE_ROW, sequence_parallel_size=size))
        for size in (1, 2)
    )
    assert shared.forward[0].num_exchanges == 2
    assert shared.forward[0].flops == pytest.approx(alone.forward[0].flops / 2, rel=0.05)


def test_exchanges_take_time_inside_and_between_nodes():
    """Catches exchanges for free, a rank's own part sent, and a node's network that each of its ranks has alone."""
    work = Work(exchanged_bytes=8e9, num_exchanges=1)
    inside, across = Cluster(GPU, 8, 1, 2**30), Cluster(GPU, 2, 4, 2**30)
    assert exchange_seconds(Work(), 1, inside) == 0
    assert exchange_seconds(work, 4, inside) == pytest.approx(6e9 / GPU.peer_bytes_per_s, rel=0.01)
    assert exchange_seconds(work, 8, across) == pytest.approx(2 * 6e9 / GPU.network_bytes_per_s, rel=0.01)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    folder = tmp_path_factory.mktemp("base")
    build(num_hidden_layers=1).config.save_pretrained(folder)
    return BaseModel(str(folder), LoraConfig(**LORA | {"target_modules": ["q_proj"]}), torch.float32)


def plan(base: BaseModel, free_bytes: int, num_ranks: int = 6, **training) -> Plan:
    options = {"resident_layers": 0, "activation_checkpointing_layers": "all"} | training.pop("options", {})
    asked = Training(Microbatch(1, 8192, is_autocast=False), **{"may_share": True} | training)
    return plan_training(base, asked, Cluster(GPU, num_ranks, 1, free_bytes), PlacementOptions(**options))


def test_as_few_ranks_share_a_sequence_as_it_takes(base):
    """Catches a run that is refused for its sequences while ranks could share them, ranks that share without need, a
    number that heads or ranks are not divided by, and a choice without its reason."""
    needed = {}
    for size in (1, 2):
        made = plan(base, 2**40, options={"sequence_parallel_size": size})
        needed[size] = min(row.peak_bytes for row in made.rows)
    assert plan(base, needed[1]).choice.placement.sequence_parallel_size == 1
    made = plan(base, needed[1] - 1)
    placement = made.choice.placement
    assert placement.sequence_parallel_size == 2 and "sequence_parallel_size 2" in name_placement(placement, 6)
    assert made.reason.endswith(
        "; sequence_parallel_size: 2, since a sequence of 8,192 tokens does not fit a rank with fewer"
    )
    step = made.choice
    assert step.tokens_per_s == pytest.approx(3 * 8192 / step.step_s)
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert plan(base, needed[1] - 1, num_ranks=4).choice.placement.sequence_parallel_size == 2
    # Of 3 and 6 ranks none divides 8 heads: with 4 ranks more could share.
    assert plan(base, needed[2] - 1).chosen is None
    assert plan(base, needed[2] - 1, num_ranks=4).choice.placement.sequence_parallel_size == 4
    assert plan(base, needed[1] - 1, may_share=False).chosen is None
    assert plan(base, needed[1] - 1, options={"sequence_parallel_size": 1}).chosen is None
    with pytest.raises(ConfigError) as error:
        plan(base, needed[1] - 1, is_batch_global=True)
    assert error.value.option == "sequence_parallel_size" and error.value.fix == "give sequence_parallel_size: 2"
    assert plan(base, needed[1], is_batch_global=True).chosen is not None


def test_what_no_number_of_ranks_makes_fit_takes_one_trace_more(base, monkeypatch):
    """Catches a refusal that comes after a trace of each number of ranks, and one that does not name the last."""
    most = plan(base, 2**40, num_ranks=8, options={"sequence_parallel_size": 8})
    traced = []

    def count(model: PeftModel, microbatch: Microbatch, *options: Any) -> Any:
        traced.append(microbatch.sequence_parallel_size)
        return trace(model, microbatch, *options)

    monkeypatch.setattr(auto, "trace", count)
    refused = plan(base, min(row.peak_bytes for row in most.rows) - 1, num_ranks=8)
    assert refused.chosen is None and "sequence_parallel_size 8 needs least" in refused.reason
    assert set(traced) <= {1, 8}


def test_a_number_that_heads_are_not_divided_by_is_refused(base):
    """Catches a mistake that is found when the first layer attends, after the model has been loaded."""
    with pytest.raises(ConfigError) as error:
        plan(base, 2**40, options={"sequence_parallel_size": 6})
    assert str(error.value) == (
        "sequence_parallel_size: expected a divisor of the 6 ranks and of the model's 8 attention heads, found 6; "
        "2 is the largest that works"
    )


def test_attention_waits_for_its_exchanges(base):
    """Catches a step that is as fast as if the ranks did not exchange anything."""
    placement = ResolvedPlacement("replicate", 1, 0, 1, None, sequence_parallel_size=2)
    training = Training(Microbatch(1, 8192, is_autocast=False))
    slow = replace(GPU, peer_bytes_per_s=1e6, kernel_s=0.0)
    steps = [
        plan_training(base, training, Cluster(gpu, 2, 1, 2**40), PlacementOptions(), given=placement).choice.step_s
        for gpu in (replace(GPU, kernel_s=0.0), slow)
    ]
    layers = trace(base.build(), replace(training.microbatch, sequence_parallel_size=2))
    work = [work for pair in (layers.forward, layers.backward) for work in pair]
    expected_s = sum(exchange_seconds(one, 2, Cluster(slow, 2, 1, 0)) for one in work)
    assert steps[1] - steps[0] > 0.9 * expected_s > 100 * sum(compute_seconds(one, GPU) for one in work)


def test_only_methods_that_can_share_sequences_may_choose_to():
    """Catches a number of ranks that `auto` has chosen for a trainer that feeds each rank sequences of its own."""
    may_share = {}
    for method in METHODS:
        rewards = {"reward_funcs": "think_format_reward"} if method == "grpo" else {}
        config = RunConfig(model="m", dataset="d", output_dir="o", method=method, max_steps=1, **rewards)
        may_share[method] = describe_training(config, "cuda", 2, longest_tokens=9).may_share
    assert may_share == {"sft": True, "dpo": True, "kto": True, "reward": False, "grpo": False}
    jobs = {"jobs": [{"name": "a"}, {"name": "b", "lora_r": 4}]}
    sweep = RunConfig(model="m", dataset="d", output_dir="o", max_steps=1, sweep=jobs)
    assert not describe_training(sweep, "cuda", 2, longest_tokens=9).may_share
