"""Tiny checkpoints whose files are quantized as those of the hub are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.bases import MOE

Tensors = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = MOE | dict(
    vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_key_value_heads=4
)
_DEEPSEEK: dict[str, Any] = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def to_mxfp4(tensors: Tensors) -> Tensors:
    """Replace the experts by stored blocks and scales of any bits, some of them at the ends of the range."""
    made: Tensors = {}
    for key, value in tensors.items():
        if value.dim() != 3:
            made[key] = value
            continue
        experts, rows, columns = value.shape
        made[f"{key}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        made[f"{key}_scales"] = torch.randint(112, 122, (experts, columns, rows // 32), dtype=torch.uint8)
        made[f"{key}_scales"][0, 0] = 2
    return made


def to_fp8(tensors: Tensors, block: int = 16) -> Tensors:
    """Quantize every linear weight in square blocks, the last of a row or column perhaps smaller."""
    made: Tensors = {}
    for key, value in tensors.items():
        if value.dim() != 2 or any(name in key for name in ("embed", "lm_head", ".gate.")):
            made[key] = value
            continue
        rows, columns = (-(-n // block) for n in value.shape)
        scales = torch.empty(rows, columns)
        made[key] = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
        for row in range(rows):
            for column in range(columns):
                here = (slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block))
                scales[row, column] = value[here].float().abs().max() / 448
                made[key][here] = (value[here].float() / scales[row, column]).to(torch.float8_e4m3fn)
        made[f"{key}_scale_inv"] = scales
    return made


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "GPT-OSS": ("GptOss", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2), MXFP4, to_mxfp4),
    "Qwen3": ("Qwen3", dict(head_dim=16), FP8, to_fp8),
    "DeepSeek-V3": ("DeepseekV3", _DEEPSEEK, FP8, to_fp8),
}


def save_stored(folder: Path, name: str) -> Path:
    """Save one of MODELS with seeded weights, and return its folder."""
    config, options, quantization, change = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, f"{config}Config")(**_SIZES, **options), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    rewrite(folder, change, quantization)
    return folder


def rewrite(folder: Path, change: Callable[[Tensors], Tensors], quantization: dict[str, Any] | None = None) -> None:
    """Change a checkpoint's tensors, and say in its config how they are quantized."""
    file = folder / "model.safetensors"
    tensors = {key: tensor.contiguous() for key, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
