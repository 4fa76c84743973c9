"""The attention that a person names is the one that computes, with plain PEFT's gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import run_ranks
from tiny import build_base, fill_lora_b, find_differences, make_batch, take_gradients
from transformers import AutoModelForCausalLM

import lorashard
from lorashard.errors import ConfigError

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def step(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    fill_lora_b(model)
    model.train()
    loss = model(**make_batch(), use_cache=False).loss
    loss.backward()
    return take_gradients(model) | {"loss": loss.detach()}


def compare_attention(rank: int, folder: Path, names: list[str | None]) -> dict[str, object]:
    found = {}
    for name in names:
        torch.manual_seed(1)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=name)
        expected = step(get_peft_model(base, LoraConfig(**LORA)))
        torch.manual_seed(1)
        sharded = lorashard.load(folder, LoraConfig(**LORA), "shard", dtype=torch.float32, attn_implementation=name)
        wrong = find_differences(step(sharded), expected)
        found[str(name)] = (wrong, sharded.get_base_model().config._attn_implementation)
    return found


def test_attention_is_the_one_that_was_named(tmp_path):
    """Catches a default that is not sdpa, and an option that is dropped on its way to transformers."""
    build_base().save_pretrained(tmp_path)
    for found in run_ranks(compare_attention, 2, tmp_path, [None, "eager"]):
        assert found == {"None": ([], "sdpa"), "eager": ([], "eager")}


@pytest.mark.parametrize(
    ("name", "package"),
    [("flash_attention_2", "flash_attn"), ("kernels-community/flash-attn3", "kernels"), ("fastest", None)],
)
def test_an_attention_that_cannot_be_had_is_refused_in_a_line(tmp_path, monkeypatch, name, package):
    """Catches a traceback from deep inside of transformers in place of the package that is missing."""
    if package is not None and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    build_base().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        lorashard.load(tmp_path, LoraConfig(**LORA), "replicate", attn_implementation=name)
    assert str(caught.value).startswith(f"attn_implementation: {name}: ")
    assert len(str(caught.value).splitlines()) == 1
