"""Models that are sharded over the same ranks share their process groups, which end with the last of them."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base, make_batch
from peft import PeftModel

import lorashard
from lorashard.errors import ShardError
from lorashard.runtime.dist import HostGroup, ShardGroup
from lorashard.runtime.rank_store import RankStore


def count_threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


def build_small() -> PeftModel:
    return add_lora(build_base(num_hidden_layers=2)).train()


def make_models(rank: int) -> dict[str, list[int]]:
    counts = {"without": [count_threads()], "with": []}
    for _ in range(2):
        kept = [lorashard.shard(build_small())]
        counts["with"].append(count_threads())
        for number in range(4):
            model = lorashard.shard(build_small())
            model(**make_batch()).loss.backward()
            if number % 2 == rank:  # ranks let go of them at different times
                kept.append(model)
            HostGroup.of_all()
            counts["with"].append(count_threads())
        del kept, model
        counts["without"].append(count_threads())
    return counts


def test_models_over_the_same_ranks_share_their_threads_and_leave_none():
    """Catches a process that makes hundreds of models, and in the end computes in none of its thousands of threads."""
    for counts in run_ranks(make_models, 2):
        assert len(set(counts["without"])) == len(set(counts["with"])) == 1
        assert 0 < counts["with"][0] - counts["without"][0] < 10


def note_options(rank: int) -> list[tuple[str, object]]:
    made, new_group = [], dist.new_group

    def note(ranks, timeout, backend, options, group_desc):
        made.append((group_desc.split()[1], options and (options.is_high_priority_stream, options._timeout == timeout)))
        return new_group(ranks, timeout, backend, group_desc=group_desc)

    dist.new_group = note
    dist.get_backend_config = lambda: "cpu:gloo,cuda:nccl"
    dist.ProcessGroupNCCL = SimpleNamespace(Options=SimpleNamespace)
    group = ShardGroup.of_size(2)
    os.environ["TORCH_NCCL_HIGH_PRIORITY"] = "0"
    del group
    gc.collect()
    ShardGroup.of_size(2)
    return made


def test_gathers_go_before_the_computation_on_gpus():
    """Catches gathers that queue behind matrix products, gloo given NCCL's options, and a user overruled."""
    first, without = [("gathers", (True, True)), ("comparisons", None)], [("gathers", None), ("comparisons", None)]
    assert run_ranks(note_options, 2) == [first + without] * 2


def run_different_models(rank: int) -> None:
    models = [lorashard.shard(build_small()) for _ in range(2)]
    with pytest.raises(ShardError, match="diverged"):
        models[rank](**make_batch())


def test_ranks_that_run_different_models_are_stopped():
    """Catches what sharing makes possible: equal positions in two models, whose units pair up with wrong values."""
    run_ranks(run_different_models, 2)


def let_go_one_after_another(rank: int) -> list[int]:
    counts = [count_threads()]
    everyone, pair = ShardGroup.of_size(4), ShardGroup.of_size(2)
    counts.append(count_threads())
    kept = [pair] if rank > 0 else []
    del pair
    counts.append(count_threads())
    again = ShardGroup.of_size(2)
    assert again.compare([1]) is None and everyone.compare([2]) is None
    kept.clear()
    assert again.compare([3]) is None and ShardGroup.of_size(2).compare([rank]) is not None
    counts.append(count_threads())
    del again, everyone
    return [*counts, count_threads()]


def test_groups_end_on_each_rank_with_its_last_model():
    """Catches groups that are never given back, that end under a rank that uses them, that stay for the sake of another
    rank, or that are taken for complete where a rank has ended its part."""
    for rank, (before, both, one_gone, made_again, none) in enumerate(run_ranks(let_go_one_after_another, 4)):
        assert before == none < one_gone <= both == made_again
        assert (one_gone < both) == (rank == 0)


def meet_and_leave(rank: int) -> None:
    for number in range(20):
        group = ShardGroup.of_size(3)
        if (number + rank) % 3 == 0:
            time.sleep(0.01)
        assert group.compare([rank]) == [[0], [1], [2]]
        del group


def test_who_leaves_first_cuts_nobody_off():
    """Catches an end that comes before the others have what this rank has sent, or before they are connected to it."""
    run_ranks(meet_and_leave, 3)


def test_a_rank_that_does_not_come_to_share_groups_is_named():
    """Catches a load on one rank alone that hangs for ever, in silence."""
    with pytest.raises(ShardError) as caught:
        RankStore(dist.HashStore(), 0, 2, "groups").exchange("", timeout_s=0.05)
    assert "[1]" in caught.value.found


def fork_a_worker(rank: int) -> bool:
    group = ShardGroup.of_size(2)
    child = os.fork()
    if child == 0:
        del group
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    return group.compare([1]) is None


def test_a_forked_worker_ends_no_group():
    """Catches a data loader's worker that waits for ever for threads that it does not have."""
    assert run_ranks(fork_a_worker, 2) == [True, True]


def begin_anew(rank: int, folder: str) -> list[int]:
    counts = []
    for number in range(3):
        model = lorashard.shard(build_small())
        loss = model(**make_batch()).loss
        dist.destroy_process_group()
        with pytest.raises(ShardError, match="process group"):
            model(**make_batch())
        del model, loss
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
