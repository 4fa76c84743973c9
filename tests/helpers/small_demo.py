"""The demo's data and tokenizer on a base that is as small as the tokenizer allows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from helpers.tiny import build_base

DEMO = Path(__file__).parents[2] / "examples/demo"


def copy_small_demo(folder: Path) -> Path:
    """Copy the demo's files, with a seeded float32 base of two layers in place of its own; its answers mean nothing."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "model.safetensors"))
    config = json.loads((DEMO / "base/config.json").read_text())
    same = {name: config[name] for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")}
    build_base("llama-tied", num_hidden_layers=2, initializer_range=0.3, **same).save_pretrained(folder / "base")
    return folder
