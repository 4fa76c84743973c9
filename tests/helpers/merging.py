"""Bases, adapters and PEFT's own merge of them, for the tests of merging."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from helpers import bases
from helpers.tiny import disturb
from helpers.words import make_tokenizer


def save_base(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "40KB") -> Path:
    """Save a seeded base of two layers with a tokenizer, in the key layout that hubs have; return its folder."""
    bases.save_base(folder, family, dtype, max_shard_size, num_hidden_layers=2)
    make_tokenizer(template="base").save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, **options) -> Path:
    """Save an adapter of which every tensor has been moved by what could be training; return its folder."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(loaded, LoraConfig(**defaults | options))
    disturb(model)
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def merge_with_peft(base: Path, adapter: Path, dtype: torch.dtype, **options) -> dict[str, torch.Tensor]:
    """Return the state dict of PEFT's own merge; a base with ties is untied first, as PEFT asks."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, **options)
    return PeftModel.from_pretrained(loaded, adapter).merge_and_unload().state_dict()


def merge_untied(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the state dict of PEFT's merge into a base whose tied head has become a copy of its own."""
    loaded = AutoModelForCausalLM.from_pretrained(base)
    loaded.config.tie_word_embeddings = False
    loaded.lm_head.weight = torch.nn.Parameter(loaded.lm_head.weight.detach().clone())
    return PeftModel.from_pretrained(loaded, adapter).merge_and_unload().state_dict()


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every stored tensor, as safetensors' own loader reads it."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for key in opened.keys():  # noqa: SIM118
                assert key not in tensors
                tensors[key] = opened.get_tensor(key)
    return tensors
