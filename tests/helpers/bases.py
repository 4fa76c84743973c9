"""Tiny checkpoints on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import build_base
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

MOE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def save_base(folder: Path, family: str, **sizes: Any) -> str:
    """Save a seeded base in bf16, in several files; of experts one by one, as hubs have them. Return its folder."""
    torch.manual_seed(0)
    model: PreTrainedModel
    if family == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**MOE | sizes, num_local_experts=4))
    elif family == "qwen3-moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE | sizes, **experts))
    else:
        model = build_base(family, **sizes)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    return str(folder)
