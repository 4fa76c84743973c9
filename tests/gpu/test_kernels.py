"""Generated and hand-written kernels on a sharded base, on one GPU: inductor's and Liger's."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu import DEVICE, NEEDS_GPU, train
from helpers.tiny import build_model, find_differences
from transformers.integrations.liger import apply_liger_kernel

import lorashard
from lorashard.model.fusing import Numerics

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
@pytest.mark.parametrize("kernels", ["compile", "liger"])
def test_fused_is_within_its_tolerance(case, kernels):
    """Catches generated code that reads a weight's slot after another unit has come, and kernels of another formula."""
    if kernels == "liger":
        pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    torch._dynamo.reset()
    exact = train(lorashard.shard(build_model(**case), "host", device=DEVICE))
    fused = train(lorashard.shard(build_model(**case), "host", device=DEVICE, numerics=Numerics(kernels)))
    worst = max(float((fused[n] - exact[n]).abs().max() / exact[n].abs().max()) for n in exact)
    assert 0 < worst < (0.1 if case.get("dtype") is torch.bfloat16 else 1e-4)
