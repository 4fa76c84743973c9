"""Mixture-of-experts models on resident units, without activation checkpointing, against plain PEFT.

PEFT parametrizes experts and routers, and torch's parametrizations assign a parameter to itself, which counts as a
change in place of every tensor that shares its version.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.cases import slow
from helpers.families import FAMILIES, OTHERS, VOCAB_SIZE, Family, auto_class, make_config, make_inputs, save_family
from helpers.forked_ranks import run_ranks
from helpers.tiny import fill_adapter, find_differences, take_gradients
from peft import LoraConfig, PeftModel, get_peft_model

import lorashard

QUICK = ("Mixtral", "Qwen3-MoE")
# Every family of docs/models.md with a router.
OTHER_MOE = (
    "GPT-OSS", "DeepSeek-V3", "DeepSeek-V2", "Granite MoE", "Granite 4 (hybrid)", "Jamba",
    "Llama 4 (text)", "MiniMax", "OLMoE", "Phi-3.5-MoE", "Qwen2-MoE", "Qwen3-Next",
)  # fmt: skip
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One way for units to be resident."""

    num_ranks: int
    dtype: torch.dtype
    placement: dict[str, Any]


CASES = (
    Case(1, FP32, {"placement": "shard"}),
    Case(1, BF16, {"placement": "replicate"}),
    Case(2, FP32, {"placement": "shard", "resident_layers": 2}),
    Case(2, BF16, {"placement": "replicate"}),
)


def build_plain(family: Family, dtype: torch.dtype) -> PeftModel:
    """Return a seeded model with an adapter in which every gradient counts."""
    torch.manual_seed(0)
    config = make_config(family)
    base = auto_class(config).from_config(config, dtype=dtype)
    return fill_adapter(get_peft_model(base, make_lora(base, family)))


def make_lora(base: torch.nn.Module, family: Family) -> LoraConfig:
    """Return an adapter on linear layers and on every fused tensor of experts."""
    experts = {
        ".".join(name.split(".")[-3:]) for name, p in base.named_parameters() if ".experts." in name and p.ndim == 3
    }
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**options | family.lora | {"target_parameters": sorted(experts)})


def train_twice(model: PeftModel, family: Family) -> dict[str, torch.Tensor]:
    """Return the gradients of two forwards before one backward: each parametrizes again what the other has saved."""
    batch = make_inputs(family)
    shifted = batch | {"input_ids": (batch["input_ids"] + 1) % VOCAB_SIZE}
    (model(**batch, use_cache=False).loss + model(**shifted, use_cache=False).loss).backward()
    return take_gradients(model, needs_all=False)


def compare(rank: int, families: list[Family], cases: list[Case], expected: dict[Any, Any]) -> list[str]:
    wrong = []
    for family in families:
        for case in cases:
            model = lorashard.shard(build_plain(family, case.dtype), **case.placement)
            found = find_differences(train_twice(model, family), expected[family.name, case.dtype])
            wrong += [f"{family.name} {case}: {name}" for name in found]
    return wrong


def families_of(names: tuple[str, ...]) -> list[Family]:
    found = [family for family in (*FAMILIES, *OTHERS) if family.name in names]
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize("names", [QUICK, slow(OTHER_MOE)], ids=["quick", "others"])
def test_experts_on_resident_units_train_as_in_plain_peft(names):
    """Views of one buffer that share a version: the first backward finds weights modified in place."""
    families = families_of(names)
    expected = {(f.name, dtype): train_twice(build_plain(f, dtype), f) for f in families for dtype in (FP32, BF16)}
    assert all(any(".experts." in name for name in gradients) for gradients in expected.values())
    for num_ranks in (1, 2):
        cases = [case for case in CASES if case.num_ranks == num_ranks]
        assert run_ranks(compare, num_ranks, families, cases, expected) == [[]] * num_ranks


def test_experts_in_mapped_files_train_as_in_plain_peft(tmp_path):
    """Mapped pages are resident units of another home."""
    (family,) = families_of(("Mixtral",))
    base = auto_class(make_config(family)).from_pretrained(save_family(family, tmp_path), dtype=FP32)
    lora = make_lora(base, family)
    expected = train_twice(fill_adapter(get_peft_model(base, copy.deepcopy(lora))), family)

    def compare_mapped(rank: int) -> list[str]:
        model = lorashard.load(str(tmp_path), lora, placement="file", dtype=FP32)
        return find_differences(train_twice(fill_adapter(model), family), expected)

    assert run_ranks(compare_mapped, 2) == [[], []]
