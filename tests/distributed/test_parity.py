"""The parity ladder: every adapter gradient of a sharded model equals the unsharded one's, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from parity_support import SCENARIOS, Results, accumulation, evaluation_between, one_step, retained_graph, run_scenario
from support import run_ranks
from tiny import CHECKPOINTING, FAMILIES, build_model, find_differences, make_batch, take_gradients

import lorashard
from lorashard.placement import PlacementOptions

PLACEMENT_OPTIONS = set(PlacementOptions.model_fields)


def compare(rank: int, cases: list[dict], scenarios, expected: list[list[Results]]) -> dict:
    """Run each scenario on sharded models; return what differs."""
    found = {}
    for case, results in zip(cases, expected, strict=True):
        options = {name: case[name] for name in PLACEMENT_OPTIONS & case.keys()}
        sharded = lorashard.shard(build_model(**{k: v for k, v in case.items() if k not in options}), **options)
        wrong = [
            f"{scenario.__name__}: {name}"
            for scenario, result in zip(scenarios, results, strict=True)
            for name in find_differences(run_scenario(scenario, sharded), result)
        ]
        if wrong:
            found[str(case)] = wrong
    return found


def find_wrong_cases(world_size: int, cases: list[dict], scenarios) -> dict:
    """Compare with plain models, which are run once, before there are ranks."""
    known: dict[str, list[Results]] = {}
    expected = []
    for case in cases:
        plain = {name: value for name, value in case.items() if name not in PLACEMENT_OPTIONS}
        if str(plain) not in known:
            model = build_model(**plain)
            known[str(plain)] = [run_scenario(scenario, model) for scenario in scenarios]
        expected.append(known[str(plain)])
    found = run_ranks(compare, world_size, cases, scenarios, expected)
    return {rank: wrong for rank, wrong in enumerate(found) if wrong}


SLOW = [pytest.param(4, 0, marks=pytest.mark.slow), pytest.param(2, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("world_size", "half"), [(1, 0), (2, 0), *SLOW])
def test_gradients_equal_plain_peft(world_size, half):
    """A slot overwritten too early, a handle that restores another unit, a swallowed hook: any wrong byte shows."""
    checkpointing = CHECKPOINTING if world_size == 2 else ("off", "non-reentrant")
    dtypes = (torch.float32, torch.bfloat16)
    cases = [
        dict(family=family, checkpointing=checkpointing[c], dtype=dtype)
        for (f, family), c, (d, dtype) in itertools.product(
            enumerate(FAMILIES), range(len(checkpointing)), enumerate(dtypes)
        )
        if (f + c + d) % 2 == half
    ]
    assert find_wrong_cases(world_size, cases, SCENARIOS) == {}


def test_gradients_equal_with_dropout():
    """Recomputation under sharding must draw the dropout masks that the forward drew."""
    cases = [dict(family=f, checkpointing=c, dropout=0.1) for f, c in itertools.product(FAMILIES, CHECKPOINTING)]
    assert find_wrong_cases(2, cases, (one_step, accumulation, evaluation_between)) == {}


def test_prefetch_changes_no_bit():
    """Prefetch is a hint: a gather started early must never be taken for another unit's."""
    cases = [dict(checkpointing=c, prefetch=p) for c, p in itertools.product(CHECKPOINTING, (0, 2, 5))]
    assert find_wrong_cases(2, cases, SCENARIOS) == {}


def test_a_retained_graph_gives_the_same_gradients_again():
    """Handles stay valid after a backward: a second one must gather again, not read what is in the slot by then."""
    assert find_wrong_cases(2, [dict(family=f) for f in FAMILIES], (retained_graph, one_step)) == {}


def test_other_saved_tensor_hooks_still_get_their_tensors():
    """Offloading that is entered around the model must see every tensor that is in no slot, and no slot's."""
    assert run_ranks(check_offloading, 2) == [[]] * 2


def check_offloading(rank: int) -> list[str]:
    sizes: list[int] = []

    def pack(tensor: torch.Tensor):
        sizes.append(tensor.untyped_storage().nbytes())
        return tensor.clone()

    plain, sharded = build_model(), lorashard.shard(build_model())
    expected = one_step(plain)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        found = one_step(sharded)
    slot_sizes = {slot.num_bytes for slot in lorashard.api.engine_of(sharded).pool}
    assert sizes and not slot_sizes & set(sizes)
    return find_differences(found, expected)


def test_ranks_with_slices_equal_one_process_accumulating():
    """DDP over the adapter: a slice on each rank gives what one process gives for all; the order of the sum differs."""
    for worst in run_ranks(check_slices, 2):
        assert worst < 1e-5


def check_slices(rank: int) -> float:
    plain, sharded = build_model(), lorashard.shard(build_model())
    parallel = torch.nn.parallel.DistributedDataParallel(sharded)
    for _ in range(2):
        for microbatch in range(2):
            (plain(**make_batch(seed=microbatch)).loss / 2).backward()
        parallel(**make_batch(seed=rank)).loss.backward()
        expected, found = take_gradients(plain), take_gradients(sharded)
        worst = max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)
    return worst
