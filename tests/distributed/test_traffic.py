"""Which collectives a step takes: the gathers that it needs, the adapter's all-reduce once, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support import run_ranks
from tiny import NUM_LAYERS, build_model, make_batch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import lorashard

# One as the embedding and one as the head; a tied embedding stays in its slot in between.
VOCABULARY_GATHERS = {"llama": 2, "llama-tied": 1}


def check_gathers(rank: int, family: str, checkpointing: str, prefetch: int) -> list[int]:
    model = lorashard.shard(build_model(family, checkpointing=checkpointing), prefetch=prefetch)
    counts = [0]
    for _ in range(4):
        model(**make_batch()).loss.backward()
        counts.append(lorashard.stats(model).num_gathers)
    return [after - before for before, after in zip(counts, counts[1:], strict=False)]


@pytest.mark.parametrize("checkpointing", ("off", "non-reentrant"))
@pytest.mark.parametrize("family", ("llama", "llama-tied"))
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_a_microbatch_gathers_no_more_than_it_needs(family, checkpointing, prefetch):
    """A lost hint or a careless eviction shows as one gather too many, on every microbatch, for ever."""
    num_slots = 2 + prefetch
    for counts in run_ranks(check_gathers, 2, family, checkpointing, prefetch):
        # Going down after going up, the layers that are still in the slots are free; going up again, likewise.
        assert counts[0] == NUM_LAYERS + (NUM_LAYERS - num_slots) + VOCABULARY_GATHERS[family]
        steady = 2 * (NUM_LAYERS - num_slots) + (VOCABULARY_GATHERS[family] if family == "llama" else 0)
        assert counts[1:] == [steady] * 3


class CountCollectives(TorchDispatchMode):
    """Counts torch's collectives by name, those of DDP's reducer included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def check_collectives(rank: int) -> list:
    model = lorashard.shard(build_model())
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(3):
        before = lorashard.stats(model).num_gathers
        with CountCollectives() as mode:
            with parallel.no_sync():
                parallel(**make_batch()).loss.backward()
                parallel(**make_batch()).loss.backward()
            parallel(**make_batch()).loss.backward()
            optimizer.step()
        found.append((dict(mode.counts), lorashard.stats(model).num_gathers - before))
    return found


def test_the_adapter_is_reduced_once_a_step_and_the_base_never():
    """A reduce-scatter, an all-reduce of base bytes, or one in every microbatch is what FSDP users pay for."""
    comparisons = 3 + 1  # of the ranks' positions, a few bytes on the host: each pass and the optimizer's step
    for steps in run_ranks(check_collectives, 2):
        counts, num_gathers = steps[-1]  # DDP settles its buckets in the steps before
        assert counts == {"broadcast_": 2 * num_gathers, "allreduce_": comparisons + 1}  # gloo: a broadcast a rank


def check_bytes(rank: int) -> tuple[int, int]:
    model = lorashard.shard(build_model())
    model(**make_batch()).loss.backward()
    engine, stats = lorashard.api.engine_of(model), lorashard.stats(model)
    layer = next(unit for unit in engine.units if unit.name == "layers.0").layout.total_bytes
    rest = sum(unit.layout.total_bytes for unit in engine.units if not unit.name.startswith("layers"))
    return stats.gathered_bytes, layer * (2 * NUM_LAYERS - 3) + rest


def test_gathered_bytes_are_the_layouts():
    """Bytes counted wrong make every plan and every figure in the documentation wrong."""
    for gathered, expected in run_ranks(check_bytes, 2):
        assert gathered == expected


def check_replicate(rank: int) -> tuple:
    model = lorashard.shard(build_model(), placement="replicate")
    model(**make_batch()).loss.backward()
    stats = lorashard.stats(model)
    return stats.num_gathers, stats.slot_bytes, torch.isfinite(next(model.parameters())).all().item()


def test_replicate_gathers_nothing():
    """A replicated base that still took slots or hooks would pay for nothing."""
    assert run_ranks(check_replicate, 2) == [(0, 0, True)] * 2
