"""Small bases on the disk: for runs that are real but short, and for what is sharded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from helpers.paths import DEMO_BASE
from helpers.tiny import build_base

MOE: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def build_any(family: str, **sizes: Any) -> PreTrainedModel:
    """Return a seeded base of one of tiny.FAMILIES, or one with experts."""
    torch.manual_seed(0)
    if family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**MOE | {"num_local_experts": 4} | sizes))
    if family == "qwen3-moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE | experts | sizes))
    return build_base(family, **sizes)


def save_base(
    folder: Path,
    family: str,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "40KB",
    **sizes: Any,
) -> str:
    """Save a seeded base in several files; of experts one by one, as hubs have them. Return its folder."""
    build_any(family, **sizes).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return str(folder)


def write_small_base(folder: Path, ends_early: bool = True) -> Path:
    """Write a model of two layers in float32 with the tokenizer and the chat template of the demo, where it is not.

    Args:
        ends_early: some of its answers are short, and some are empty.
    """
    if folder.exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(DEMO_BASE)
    base = build_base(
        "llama-tied",
        torch.float32,
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # so that its answers differ
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.no_grad():
        base.get_input_embeddings().weight[tokenizer.eos_token_id] *= 8 if ends_early else 1
    base.save_pretrained(folder)
    for path in DEMO_BASE.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)
    return folder
