"""The collectives of two communicators are started in one order on all ranks, which is all that NCCL promises for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_model, make_batch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import lorashard
from lorashard.runtime.dist import ShardGroup

_Started = tuple[str, str, int]  # group, operation, bytes


def log_collectives(rank: int) -> list[_Started]:
    started: list[_Started] = []

    original = ShardGroup.all_gather

    def all_gather(self, unsharded, shard):
        started.append((self.gather_group.find().group_desc, "all_gather", unsharded.numel()))
        return original(self, unsharded, shard)

    def log_all_reduce(group, bucket):
        started.append((dist.group.WORLD.group_desc, "all_reduce", bucket.buffer().nbytes))
        return allreduce_hook(group, bucket)

    ShardGroup.all_gather = all_gather
    some = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 2, 4]}  # nothing trains below them
    for options in ({}, some):
        model = lorashard.shard(build_model(**options))
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.002)
        parallel.register_comm_hook(dist.group.WORLD, log_all_reduce)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            batches = [make_batch(seed=10 * step + 3 * rank + i, rows=1 + (rank + i) % 2) for i in range(2)]
            with parallel.no_sync():
                parallel(**batches[0]).loss.backward()
            parallel(**batches[1]).loss.backward()
            optimizer.step()
            with torch.no_grad():
                parallel.eval()(**batches[0])
            parallel.train()
    return started


def test_gathers_and_all_reduces_start_in_one_order_on_all_ranks():
    """Catches a gather that one rank starts before an all-reduce and another after it: two GPUs wait for each other.

    Over accumulation, evaluation, and layers of which some have no adapter.
    """
    first, second = run_ranks(log_collectives, 2)

    assert first == second
    names = "".join("R" if operation == "all_reduce" else "g" for _, operation, _ in first)
    assert "RgR" in names  # DDP's buckets come between gathers, or the order would say nothing
    assert len({num_bytes for _, operation, num_bytes in first if operation == "all_reduce"}) > 1
