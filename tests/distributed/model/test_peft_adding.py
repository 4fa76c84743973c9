"""An adapter that is put on a sharded base later: the same on all ranks, trained by an optimizer that is known.

That it computes as plain PEFT's does, the exactness ladder shows.
"""

from __future__ import annotations

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base
from peft import IA3Config, LoraConfig, PeftModel

import lorashard
from lorashard.errors import ConfigError

WORLD_SIZE = 2


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options)


def make_model() -> PeftModel:
    return add_lora(build_base("llama"), target_modules=["q_proj", "down_proj"]).train()


def check_random_numbers(rank: int) -> list[float]:
    model = lorashard.shard(make_model(), "shard")
    torch.manual_seed(rank)
    model.add_adapter("other", lora())
    return [float(p.abs().sum()) for n, p in model.named_parameters() if "other" in n]


def test_an_added_adapter_is_rank_0s():
    """Each rank draws its own random numbers: DDP would then train a different adapter on each, in silence."""
    first, second = run_ranks(check_random_numbers, WORLD_SIZE)
    assert first == second and any(first)


def test_an_added_adapter_that_rewrites_the_base_is_refused():
    """PiSSA on a base that another adapter trains on would change what that one was trained with."""
    model = lorashard.shard(make_model(), "host")
    for init in ("pissa", "olora"):
        with pytest.raises(ConfigError, match="init_lora_weights"):
            model.add_adapter("other", lora(init_lora_weights=init))
    with pytest.raises(ValueError, match="Cannot combine"):  # PEFT's own
        model.add_adapter("other", IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    assert list(model.peft_config) == ["default"]


def test_the_optimizer_of_an_adapter_that_came_later_is_known():
    """PEFT adds it frozen; the ranks would not be compared at its steps."""
    model = lorashard.shard(add_lora(build_base()))
    model.add_adapter("later", LoraConfig(r=2, target_modules=["up_proj"]))
    model.set_adapter("later")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = lorashard.api.engine_of(model)
    assert engine.is_trained_by(torch.optim.SGD(trained, lr=0.1))
    assert not engine.is_trained_by(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
