"""What a sharded model moves and keeps: collectives, gathers, bytes at rest and on the wire, as the plan says."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.bases import save_base
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.planning import (
    FORMATS,
    Options,
    build_experts,
    build_meta,
    build_sized,
    make_cpu_cluster,
    resolve_options,
)
from helpers.tiny import (
    NUM_LAYERS,
    add_lora,
    build_base,
    build_model,
    make_batch,
    set_checkpointing,
)
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import lorashard
from lorashard.config.quantization_options import Quantization
from lorashard.planning.activations import Activations
from lorashard.planning.costs import Row, Workload, compute_row
from lorashard.planning.size import ModelSize, measure_model
from lorashard.planning.tracker import Work

CPU_BUDGET_S = 90  # the bytes of some 40 models, on one, two and four ranks

# -- collectives and gathers -------------------------------------------------------------------------------------------

# One as the embedding and one as the head; a tied embedding stays in its slot in between.
VOCABULARY_GATHERS = {"llama": 2, "llama-tied": 1}
GATHER_CASES = (
    ("llama", "off", 0),
    ("llama-tied", "non-reentrant", 1),
    ("llama", "off", 1),
    ("llama-tied", "non-reentrant", 2),
)


def check_gathers(rank: int) -> list[list[int]]:
    found = []
    for family, checkpointing, prefetch in GATHER_CASES:
        model = lorashard.shard(build_model(family, checkpointing=checkpointing), prefetch=prefetch)
        counts = [0]
        for _ in range(3):
            model(**make_batch()).loss.backward()
            counts.append(lorashard.stats(model).num_gathers)
        found.append([after - before for before, after in itertools.pairwise(counts)])
    return found


def test_a_microbatch_gathers_no_more_than_it_needs():
    """A lost hint or a careless eviction shows as one gather too many, on every microbatch, for ever."""
    for found in run_ranks(check_gathers, 2):
        for (family, _, prefetch), counts in zip(GATHER_CASES, found, strict=True):
            num_slots = 2 + prefetch
            # Going down after going up, the layers that are still in the slots are free; going up again, likewise.
            first = NUM_LAYERS + (NUM_LAYERS - num_slots) + VOCABULARY_GATHERS[family]
            steady = 2 * (NUM_LAYERS - num_slots) + (VOCABULARY_GATHERS[family] if family == "llama" else 0)
            first += family == "llama" and prefetch > 0  # the embedding, in advance for the next
            assert counts == [first, steady, steady], (family, prefetch)


class CountCollectives(TorchDispatchMode):
    """Counts torch's collectives by name, those of DDP's reducer included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.name().removeprefix("c10d::")] += 1
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


def check_groups(rank: int) -> list[tuple[int, ...]]:
    model = lorashard.shard(build_model(), "shard", shard_group_size=2)
    seen = set()
    broadcast = torch.distributed.broadcast

    def counted(tensor, *args, group=None, **kwargs):
        seen.add(tuple(torch.distributed.get_process_group_ranks(group)))
        return broadcast(tensor, *args, group=group, **kwargs)

    torch.distributed.broadcast = counted
    model(**make_batch()).loss.backward()
    assert lorashard.stats(model).gathered_bytes > 0
    return sorted(seen)


def test_a_hybrid_base_never_leaves_its_group():
    """Bytes of the base that cross nodes are what hybrid sharding is there to avoid."""
    assert run_ranks(check_groups, 4) == [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]


def check_pieces(rank: int) -> dict[str, int]:
    """Return the gathers of a steady step: of 2 rows, of 4 rows in pieces of 2, and of 2 microbatches of 2 rows."""
    found = {}
    for name, rows, num_rows, num_batches in (
        ("microbatch", None, 2, 1),
        ("split", 2, 4, 1),
        ("accumulation", None, 2, 2),
    ):
        model = lorashard.shard(build_model(checkpointing="non-reentrant"), layer_microbatch_size=rows)
        for _ in range(2):
            before = lorashard.stats(model).num_gathers
            for _ in range(num_batches):
                model(**make_batch(rows=num_rows), use_cache=False).loss.backward()
            found[name] = lorashard.stats(model).num_gathers - before
    return found


def test_a_step_in_pieces_gathers_what_one_microbatch_gathers():
    """A layer that enters its unit once a piece would gather as often as accumulation does."""
    for counts in run_ranks(check_pieces, 2):
        assert counts["split"] == counts["microbatch"] >= NUM_LAYERS
        assert counts["accumulation"] == 2 * counts["microbatch"]


# -- bytes, counted and planned ----------------------------------------------------------------------------------------

NO_ACTIVATIONS = Activations(0, 0, 0, (0,) * NUM_LAYERS, (Work(1e9),) * NUM_LAYERS, (Work(1e9),) * NUM_LAYERS, Work())
Case = tuple[str, Quantization | None, str, int, Options]
OPTIONS: tuple[Options, ...] = (
    {"placement": "shard"},
    {"cpu_offload": True},
    {"placement": "shard", "prefetch": 0},
    {"placement": "host", "prefetch": 2},
    {"placement": "shard", "resident_layers": 2},
    {"placement": "host", "resident_layers": 3},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "NO_SHARD"},
)
GROUPS = ({"placement": "shard", "shard_group_size": 2}, {"placement": "host", "shard_group_size": 2})
VARIANTS = list(itertools.product(("off", "non-reentrant"), (1, 2)))
QUICK: list[Case] = [
    ("llama-tied", None, "non-reentrant", 2, {"placement": "shard"}),
    ("qwen3", None, "off", 1, {"placement": "shard", "resident_layers": 2}),
    ("llama-tied", FORMATS[1], "off", 1, {"cpu_offload": True, "resident_layers": 3}),
    ("large", None, "off", 1, {"placement": "shard"}),
    *(("llama", None, "off", 1, {"sharding_strategy": strategy}) for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
    ("experts", FORMATS[2], "off", 1, {"placement": "shard"}),
]


def list_cases(world_size: int) -> list[Case]:
    """Return (family, quantization, checkpointing, microbatches of a step, options of the placement)."""
    if world_size == 4:
        return [("llama-tied", None, "off", 1, chosen) for chosen in (*GROUPS, OPTIONS[0])]
    families = itertools.cycle(("llama", "llama-tied", "qwen3"))
    variants = itertools.cycle(VARIANTS)
    cases: list[Case] = [(next(families), None, *next(variants), chosen) for chosen in OPTIONS]
    if world_size == 2:
        cases += [("llama-tied", None, *variant, {"placement": "shard"}) for variant in VARIANTS]
    quantized = zip(FORMATS, (OPTIONS[0], OPTIONS[5], OPTIONS[1], OPTIONS[-1]), strict=True)
    return cases + [("llama-tied", format_, "off", 1, chosen) for format_, chosen in quantized]


def build_named(family: str) -> PreTrainedModel:
    if family == "experts":
        return build_experts()
    if family == "large":  # what tiny shapes hide, such as sizes that shards divide unevenly in bf16
        return build_base("llama", torch.bfloat16, vocab_size=8000, hidden_size=256, intermediate_size=688)
    return build_base(family)


def targets_of(family: str) -> Any:
    return ["q_proj", "k_proj", "v_proj", "o_proj"] if family == "experts" else "all-linear"


@functools.cache
def size_of(family: str, quantization: Quantization | None) -> ModelSize:
    return measure_model(build_meta(build_named(family), target_modules=targets_of(family)), quantization)


def predict(size: ModelSize, options: Options, world_size: int, steps: int = 1) -> Row:
    """Return the plan's row for `options`."""
    workload = Workload(NO_ACTIVATIONS, 24, accumulation_steps=steps)
    return compute_row(size, workload, make_cpu_cluster(world_size), resolve_options(options, world_size))


def count_bytes(rank: int, cases: list[Case]) -> list[tuple[int, ...]]:
    found = []
    for family, quantization, checkpointing, steps, options in cases:
        model = add_lora(build_named(family), target_modules=targets_of(family))
        set_checkpointing(model, checkpointing)
        lorashard.shard(model.train(), quantization=quantization, **options)
        for _ in range(steps + 1):
            model(**make_batch()).loss.backward()
        before = lorashard.stats(model)
        for _ in range(steps):
            model(**make_batch()).loss.backward()
        after = lorashard.stats(model)
        traffic = (after.gathered_bytes - before.gathered_bytes, after.copied_bytes - before.copied_bytes)
        kept = (after.bytes_at_rest, after.slot_bytes, after.host_bytes_at_rest, after.workspace_bytes)
        found.append((*kept, *traffic))
    return found


@pytest.mark.parametrize(
    "world_size, cases",
    [(2, QUICK), (4, list_cases(4)[:1]), *(slow(num, list_cases(num)) for num in (1, 2, 4))],
    ids=["quick", "group", "one rank", "two ranks", "four ranks"],
)
def test_bytes_at_rest_in_slots_and_on_the_wire_are_the_plans(world_size, cases):
    """Catches padding, a tied embedding counted twice, a slot too many, scales left out, values unpacked before they
    are sent, and an order of events that the engine no longer has: a model that just fits would not, and time and
    scaling are predicted from these bytes."""
    predicted = {}
    for case in cases:
        size = size_of(*case[:2])
        row = predict(size, case[4], world_size, case[3])
        kept = (row.rest_bytes, row.slot_bytes, row.host_bytes, size.workspace_bytes)
        predicted[str(case)] = (*kept, row.gathered_bytes, row.copied_bytes)
    for counted in run_ranks(count_bytes, world_size, cases):
        assert dict(zip(map(str, cases), counted, strict=True)) == predicted


def check_file(rank: int, folder: str) -> tuple[int, ...]:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = lorashard.load(folder, config, dtype=torch.bfloat16, placement="file")
    model.train()(**make_batch()).loss.backward()
    stats = lorashard.stats(model)
    model = lorashard.shard(build_model(), resident_layers=2)
    assert [unit.name for unit in lorashard.api.engine_of(model).units if unit.is_resident] == ["layers.1", "layers.4"]
    return stats.bytes_at_rest, stats.slot_bytes, stats.host_bytes_at_rest, stats.num_gathers, stats.num_copies


def test_files_take_no_memory_of_a_cpu(tmp_path):
    """Catches a copy of what is mapped, and resident layers that are not spread evenly."""
    row = predict(size_of("llama", None), {"placement": "file"}, 2)
    assert (row.rest_bytes, row.slot_bytes, row.host_bytes) == (0, 0, 0)
    assert run_ranks(check_file, 2, save_base(tmp_path / "base", "llama")) == [(0,) * 5] * 2


def test_quantization_loses_no_parameter_and_shrinks_what_is_moved():
    """Catches a model of 8 B counted as one of 2, and parts that take as many bytes as the values did."""
    base = build_sized("llama", torch.bfloat16)
    plain, *packed = [measure_model(build_meta(base), quantization) for quantization in (None, *FORMATS)]
    layer = plain.layers[0].total_bytes(1)
    for size, ratio in zip(packed, (0.5625 / 2, 0.52 / 2, 1.02 / 2, 1.02 / 2), strict=True):
        assert size.num_parameters == plain.num_parameters
        assert size.layers[0].total_bytes(1) == pytest.approx(layer * ratio, rel=0.05)
        assert size.workspace_bytes >= 128 * 256 * 2
    assert plain.workspace_bytes == 0
    assert packed[0].units[0].layout == plain.units[0].layout  # the embedding stays as it is
