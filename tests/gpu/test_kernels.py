"""Generated and hand-written kernels on a sharded base, on one GPU: inductor's and Liger's."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import build_model, find_differences, make_batch, take_gradients
from peft import PeftModel
from transformers.integrations.liger import apply_liger_kernel

import lorashard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]
DEVICE = torch.device("cuda", 0)
CASES = (
    {"checkpointing": "non-reentrant"},
    {"checkpointing": "off", "family": "llama-tied"},
    {"checkpointing": "reentrant", "family": "qwen3", "dtype": torch.bfloat16},
)


def train(model: PeftModel) -> dict[str, torch.Tensor]:
    found = {}
    for seed in range(2):
        batch = {name: value.to(DEVICE) for name, value in make_batch(seed).items()}
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        found |= {f"{seed} {name}": value for name, value in take_gradients(model).items()} | {f"loss {seed}": loss}
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_liger_gives_the_gradients_that_it_gives_unsharded(case):
    """Catches a kernel that keeps a weight for its backward where the next unit's bytes come to lie."""
    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    plain = build_model(**case).to(DEVICE)
    sharded = lorashard.shard(build_model(**case), "host", device=DEVICE)
    for model in (plain, sharded):
        apply_liger_kernel(model, None)
    assert find_differences(train(sharded), train(plain)) == []


@pytest.mark.parametrize("case", CASES)
def test_inductor_gives_the_same_gradients(case):
    """Catches generated code that reads a weight's slot after another unit has come: rounding alone may differ."""
    torch._dynamo.reset()
    expected = train(build_model(**case).to(DEVICE))
    found = train(lorashard.shard(build_model(**case), "host", device=DEVICE, torch_compile=True))
    worst = max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)
    assert worst < (0.1 if case.get("dtype") is torch.bfloat16 else 1e-4)
