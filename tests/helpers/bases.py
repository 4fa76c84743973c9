"""Small bases for runs that are real but short."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tiny import build_base
from transformers import AutoTokenizer

DEMO_BASE = Path(__file__).parents[2] / "examples/demo/base"


def write_small_base(folder: Path) -> Path:
    """Write a model of two layers in float32 with the tokenizer and the chat template of the demo, where it is not."""
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
    with torch.no_grad():  # so that some answers end early
        base.get_input_embeddings().weight[tokenizer.eos_token_id] *= 8
    base.save_pretrained(folder)
    for path in DEMO_BASE.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)
    return folder
