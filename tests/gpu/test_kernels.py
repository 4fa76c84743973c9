"""Generated and hand-written kernels on a sharded base, on one GPU: inductor's and Liger's."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import DEVICE, NEEDS_GPU, train
from helpers.tiny import build_model, find_differences
from transformers.integrations.liger import apply_liger_kernel

import lorashard

pytestmark = NEEDS_GPU
CASES = (
    {"checkpointing": "non-reentrant"},
    {"checkpointing": "off", "family": "llama-tied"},
    {"checkpointing": "reentrant", "family": "qwen3", "dtype": torch.bfloat16},
)


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
