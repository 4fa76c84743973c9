"""Models that are sharded over the same ranks share their process groups, which end when nobody uses them."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base, make_batch
from peft import PeftModel

import lorashard
from lorashard.errors import ShardError
from lorashard.runtime.dist import HostGroup, ShardGroup


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def build_small() -> PeftModel:
    return add_lora(build_base(num_hidden_layers=2)).train()


def make_models(rank: int) -> tuple[list[int], bool]:
    kept = [lorashard.shard(build_small())]
    counts = [count_threads()]
    for number in range(5):
        model = lorashard.shard(build_small())
        if number % 2 == rank:  # ranks let go of them at different times
            kept.append(model)
        HostGroup.of_all()
        counts.append(count_threads())
    return counts, len(kept) > 1


def test_models_over_the_same_ranks_take_no_more_threads():
    """Catches a process that makes hundreds of models, and in the end computes in none of its thousands of threads."""
    for counts, _ in run_ranks(make_models, 2):
        assert counts[2:] == [counts[1]] * 4  # the first HostGroup has its own
        assert counts[1] - counts[0] < 10


def run_different_models(rank: int) -> None:
    models = [lorashard.shard(build_small()) for _ in range(2)]
    with pytest.raises(ShardError, match="diverged"):
        models[rank](**make_batch())


def test_ranks_that_run_different_models_are_stopped():
    """Catches what sharing makes possible: equal positions in two models, whose units pair up with wrong numbers."""
    run_ranks(run_different_models, 2)


def change_sizes(rank: int) -> list[tuple[list[str], int]]:
    def look() -> tuple[list[str], int]:
        gc.collect()
        own = [group.group_desc for group in dist.distributed_c10d._world.pg_map if "gathers" in group.group_desc]
        return own, count_threads()

    pair = ShardGroup.of_size(2)
    found = [look()]
    everyone = ShardGroup.of_size(4)
    found.append(look())
    if rank == 0:
        del pair
    everyone = ShardGroup.of_size(4)
    found.append(look())
    if rank != 0:
        del pair
    everyone = ShardGroup.of_size(4)
    found.append(look())
    assert everyone.compare([1]) is None
    ShardGroup.of_size(2)
    return [*found, look()]


def test_groups_end_where_all_ranks_meet_and_none_uses_them():
    """Catches groups that are never given back, that end under a rank that uses them, and that cannot be made again."""
    for one, both, one_rank_done, all_done, again in run_ranks(change_sizes, 4):
        assert len(one[0]) == 1
        assert both[0] == one_rank_done[0] == [*one[0], *all_done[0]]
        assert len(all_done[0]) == 1
        assert all_done[1] < both[1]
        assert len(again[0]) == 2
        assert again[1] == both[1]


def begin_anew(rank: int, folder: str) -> list[int]:
    counts = []
    for number in range(3):
        model = lorashard.shard(build_small())
        loss = model(**make_batch()).loss
        dist.destroy_process_group()
        del model, loss
        gc.collect()
        counts.append(count_threads())
        store = f"file://{Path(folder, str(number))}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    dist.barrier()  # or the first to return ends while the other still connects to it
    return counts


def test_the_default_group_may_go_first():
    """Catches a model whose end fails, or whose groups are taken for those of a later default group."""
    with tempfile.TemporaryDirectory() as folder:
        for counts in run_ranks(begin_anew, 2, folder):
            assert len(set(counts)) == 1
