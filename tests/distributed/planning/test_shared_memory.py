"""The memory that the plan foretells where ranks share rows, against what torch's allocator gives out on each."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.forked_ranks import run_ranks
from helpers.planning import build_meta, build_sized, build_trained, measure_peak
from helpers.tiny import make_batch
from trl.trainer.utils import add_fused_lm_head

import lorashard
from lorashard.planning.trace import Microbatch, trace

TOKENS = 512
COLLECTIVES = "all_to_all_single", "all_reduce"  # of tensors that are freed within the step


def waits_for_gloo(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return `collective`, which ends, where it is waited for, when gloo's thread too has let go of its tensors.

    That thread holds them for a moment longer. Where it is the last to hold one, the profiler, which follows the
    threads of the step alone, never sees it freed.
    """

    @wraps(collective)
    def collect(*args: Any, **options: Any) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        counts = [tensor._use_count() for tensor in tensors]
        work = collective(*args, **options)
        while work is None and any(tensor._use_count() > count for tensor, count in zip(tensors, counts, strict=True)):
            time.sleep(0)
        return work

    return collect


def measure(rank: int, size: int, tiles: int | None) -> int:
    """Return the most bytes that a microbatch of one long row takes at once on this rank."""
    microbatch = Microbatch(1, TOKENS, "cpu", is_autocast=False)
    model = build_trained(build_sized("llama", intermediate_size=1024), microbatch)
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))
    shared = lorashard.shard(model, "replicate", sequence_parallel_size=size, mlp_tile_tokens=tiles)

    def step() -> None:
        (-shared(**make_batch(rows=1, tokens=TOKENS), fused_lm_head=True).log_probs.sum()).backward()

    step()  # gradients rest
    with patch.multiple(dist, **{name: waits_for_gloo(getattr(dist, name)) for name in COLLECTIVES}):
        return measure_peak(step)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "tiles"), [(2, 64), (4, None)])
def test_a_rank_takes_what_the_plan_foretells(size, tiles):
    """Catches activations of whole rows on a rank, buffers of the exchange that outlive it, and a plan of neither."""
    microbatch = Microbatch(1, TOKENS, "cpu", is_autocast=False, sequence_parallel_size=size, tile_tokens=tiles)
    planned = trace(build_meta(build_sized("llama", intermediate_size=1024)), microbatch).peak_bytes
    for measured in run_ranks(measure, size, size, tiles):
        assert measured == pytest.approx(planned, rel=0.02)
