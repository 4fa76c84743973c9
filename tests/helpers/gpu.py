"""What the tests that need a GPU share."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel

from helpers.tiny import make_batch, take_gradients

DEVICE = torch.device("cuda", 0)
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]


def train(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return the losses of two batches and the gradients that each gives."""
    found = {}
    for seed in range(2):
        batch = {name: value.to(DEVICE) for name, value in make_batch(seed).items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        found |= {f"{seed} {name}": value for name, value in take_gradients(model).items()} | {f"loss {seed}": loss}
    return {name: value.detach() for name, value in found.items()}
