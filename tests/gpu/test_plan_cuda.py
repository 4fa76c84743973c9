"""On a GPU: the peak that is predicted from a config is the one that CUDA's allocator counts."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.gpu import NEEDS_GPU
from helpers.planning import build_meta, build_trained
from helpers.tiny import build_base, make_batch
from trl.trainer.utils import add_fused_lm_head

import lorashard
from lorashard.config.placement import ResolvedPlacement
from lorashard.planning.costs import Workload, compute_row
from lorashard.planning.hardware import Cluster, find_gpu_type
from lorashard.planning.size import measure_model
from lorashard.planning.trace import Microbatch, trace

pytestmark = NEEDS_GPU

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "num_hidden_layers": 8,
}


@pytest.mark.parametrize("checkpointing", ({}, None), ids=("checkpointing", "saving"))
@pytest.mark.parametrize("placement", ("replicate", "host"))
@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_predicted_peak_is_within_a_tenth_of_the_allocators(placement, checkpointing, dropout):
    """Catches kernels that save other things, or allocate more, on a GPU than on the CPU that the plan traces with."""
    microbatch = Microbatch(1, 4096, "cuda", checkpointing=checkpointing)
    base = build_base("llama", torch.bfloat16, **SIZES)
    size = measure_model(build_meta(base, dropout, r=16))
    workload = Workload(
        trace(build_meta(base, dropout, r=16), microbatch), microbatch.num_tokens, optimizer="adamw_torch"
    )
    cluster = Cluster(find_gpu_type("l4"), 1, 1, 2**40)
    row = compute_row(size, workload, cluster, ResolvedPlacement(placement, 1, 0, 1, None, "all"))

    gc.collect()
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    model = lorashard.shard(
        build_trained(base, microbatch, dropout, r=16), placement=placement, device=torch.device("cuda", 0)
    )
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    batch = {name: tensor.cuda() for name, tensor in make_batch(rows=1, tokens=4096).items()}
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = -model(**batch, fused_lm_head=True).log_probs.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    measured_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert row.peak_bytes == pytest.approx(measured_bytes, rel=0.1)
