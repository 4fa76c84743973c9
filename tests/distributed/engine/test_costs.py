"""What a sharded model costs: collectives, gathers, bytes at rest and on the wire, memory; and what the plan says."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.bases import save_base
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.planning import FORMATS, WIDE, build_experts, build_meta, build_sized, build_trained, measure_peak
from helpers.tiny import (
    CHECKPOINTING,
    NUM_LAYERS,
    VOCAB_SIZE,
    add_lora,
    build_base,
    build_model,
    make_batch,
    set_checkpointing,
)
from peft import LoraConfig, PeftModel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import lorashard
from lorashard.config.placement import ResolvedPlacement, read_placement, resolve_placement
from lorashard.config.quantization_options import Quantization
from lorashard.engine import FrozenWeight
from lorashard.model.micro_batching import split_layers
from lorashard.model.stacks import find_decoder_stack
from lorashard.planning.activations import Activations
from lorashard.planning.costs import Row, Workload, compute_row
from lorashard.planning.hardware import Cluster, find_gpu_type
from lorashard.planning.size import ModelSize, measure_model
from lorashard.planning.trace import Microbatch, trace
from lorashard.planning.tracker import Work

CPU_BUDGET_S = 120  # peaks are measured with torch's profiler, at sizes that outweigh an allocator's rounding

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
CPU = replace(find_gpu_type("l4"), device_type="cpu", is_overlapping=False)
Options = dict[str, Any]
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


def make_cluster(num_ranks: int) -> Cluster:
    return Cluster(CPU, num_ranks, 1, 2**34)


def resolve(options: Options, world_size: int) -> ResolvedPlacement:
    return resolve_placement(read_placement(**options), world_size, None)


def predict(size: ModelSize, options: Options, world_size: int, steps: int = 1) -> Row:
    """Return the plan's row for `options`."""
    workload = Workload(NO_ACTIVATIONS, 24, accumulation_steps=steps)
    return compute_row(size, workload, make_cluster(world_size), resolve(options, world_size))


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


WIDE_NUMEL = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 352


def build_wide(quantization: Quantization | None) -> PeftModel:
    model = add_lora(build_base(dtype=torch.bfloat16, num_hidden_layers=4, **WIDE), target_modules=["q_proj", "v_proj"])
    return lorashard.shard(model.train(), "shard", quantization=quantization)


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


# -- memory ------------------------------------------------------------------------------------------------------------

# Large enough that a layer's weights outweigh everything else.
SIZES = dict(hidden_size=64, intermediate_size=192, vocab_size=512)
LAYER_BYTES = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 192)


def build(family: str = "llama", checkpointing: str = "off") -> PeftModel:
    model = add_lora(build_base(family, **SIZES), target_modules=["q_proj"])
    set_checkpointing(model, checkpointing)
    return model.train()


def list_storages() -> dict[int, int]:
    """Return {address: bytes} of every storage that a reachable tensor holds."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, FrozenWeight)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def check_at_rest(rank: int, world_size: int, families: tuple[str, ...]) -> dict:
    found = {}
    for family in families:
        before = list_storages()
        model = build(family)
        base_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
        adapter = {p.data_ptr() for p in model.parameters() if p.requires_grad}
        lorashard.shard(model)
        model(**make_batch()).loss.backward()
        model.zero_grad()
        stats = lorashard.stats(model)
        engine = lorashard.api.engine_of(model)
        allowed = {slot.address for slot in engine.pool} | {unit.home.shard.data_ptr() for unit in engine.units}
        smallest = SIZES["hidden_size"] * SIZES["hidden_size"] // 2 * 4
        new = {a: n for a, n in list_storages().items() if a not in before and n >= smallest}
        padding = 256 * world_size * (NUM_LAYERS + 2) + 256 * sum(len(unit.weights) for unit in engine.units)
        found[family] = {
            "others": {address: num for address, num in new.items() if address not in allowed | adapter},
            "share": base_bytes <= stats.bytes_at_rest * world_size <= base_bytes + padding,
            "pool": stats.slot_bytes == sum(slot.num_bytes for slot in engine.pool),
            "peak": 0 < stats.peak_unsharded_bytes <= stats.slot_bytes,
            "num_slots": stats.num_slots,
            "largest": max(unit.layout.total_bytes for unit in engine.units) <= stats.slot_bytes < base_bytes,
        }
        del model, engine
    return found


@pytest.mark.parametrize(
    ("world_size", "families"),
    [(2, ("llama", "llama-tied", "qwen3")), slow(4, ("llama-tied",))],
)
def test_nothing_but_slots_and_shards_holds_base_bytes(world_size, families):
    """A whole copy that survives sharding, or a tensor that autograd keeps, would make the sharding pointless."""
    expected = {"others": {}, "share": True, "pool": True, "peak": True, "num_slots": 4, "largest": True}
    for found in run_ranks(check_at_rest, world_size, world_size, families):
        assert found == {family: expected for family in families}


class MallInfo2(ctypes.Structure):
    """glibc's account of this process's heap, ten fields: the fifth is `hblkhd`, the eighth `uordblks`."""

    _fields_ = [("values", ctypes.c_size_t * 10)]


def count_live_bytes() -> int:
    """Return the bytes that the heap holds now, exactly: torch's CPU tensors are ordinary heap blocks."""
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallInfo2
    values = libc.mallinfo2().values
    return values[4] + values[7]


def measure_kept_bytes(model: PeftModel, rows: int, tokens: int) -> int:
    """Return the bytes that a forward keeps for its backward."""
    batch = make_batch(rows=rows, tokens=tokens)
    model(**batch).loss.backward()  # what is made once is made here
    kept = []
    for _ in range(2):  # the heap is other threads' too, who take more now and then
        before = count_live_bytes()
        loss = model(**batch).loss
        kept.append(count_live_bytes() - before)
        loss.backward()
    return min(kept)


def check_kept(rank: int, ways: tuple[str, ...]) -> dict[str, Any]:
    kept: dict[Any, int] = {}
    for checkpointing, is_sharded in itertools.product(ways, (False, True)):
        model = build(checkpointing=checkpointing)
        model = lorashard.shard(model) if is_sharded else model
        kept[checkpointing, is_sharded] = measure_kept_bytes(model, 4, 64)
    for is_sharded in (False, True):
        model = add_lora(build_base("llama", torch.bfloat16, **SIZES), target_modules=["q_proj"]).train()
        model = lorashard.shard(model) if is_sharded else model
        with torch.autocast("cpu", torch.bfloat16):
            kept["autocast", is_sharded] = measure_kept_bytes(model, 4, 64)
    return kept


@pytest.mark.parametrize("ways", [CHECKPOINTING[:2], slow(CHECKPOINTING)], ids=["one", "all"])
def test_activation_checkpointing_saves_what_it_saves_without_sharding(ways):
    """Handle hooks in the wrong place switch activation checkpointing off in silence, with the right gradients;
    autocast of a base in another dtype saves a fresh copy of each weight: every layer would stay in memory."""
    for kept in run_ranks(check_kept, 2, ways):
        for case in (*ways, "autocast"):
            assert kept[case, True] == pytest.approx(kept[case, False], rel=0.05, abs=LAYER_BYTES / 2), case
        for checkpointing in ways[1:]:
            assert kept[checkpointing, True] < kept["off", True] / 3


def check_unpacked(rank: int) -> dict[str, Any]:
    kept = {}
    for name, quantization in (("none", None), ("nf4", FORMATS[0])):  # so few tokens that weights would outweigh them
        kept[name] = measure_kept_bytes(build_wide(quantization), 1, 4)
    before = list_storages()
    model = build_wide(FORMATS[1])
    model(**make_batch(rows=1, tokens=4)).loss.backward()
    model.zero_grad()
    engine = lorashard.api.engine_of(model)
    allowed = {slot.address for slot in engine.pool} | {unit.home.shard.data_ptr() for unit in engine.units}
    workspaces = {weight.format.workspace for unit in engine.units for weight in unit.weights if weight.format}
    allowed |= {w.take(0, (1,), torch.uint8, torch.device("cpu")).untyped_storage().data_ptr() for w in workspaces}
    smallest = 64 * 128  # k_proj, in 8 bits
    others = {a: n for a, n in list_storages().items() if a not in before and a not in allowed and n >= smallest}
    return {"kept": kept, "others": others}


def test_nothing_of_the_base_is_unpacked_but_in_the_workspace():
    """Values that autograd keeps, or a copy on the module, would be the whole base in bf16 after one forward."""
    for found in run_ranks(check_unpacked, 2):
        assert found["others"] == {}
        assert abs(found["kept"]["nf4"] - found["kept"]["none"]) < WIDE_NUMEL // 4, found


# -- peaks -------------------------------------------------------------------------------------------------------------

PEAKS: dict[str, list[tuple[Options, dict | None, Quantization | None]]] = {
    "one rank": [({"placement": "replicate"}, {}, None), ({"placement": "replicate"}, {}, FORMATS[0])],
    "sharded": [({"placement": "shard", "resident_layers": 2}, {}, None)],
    "sharded in other ways": [
        ({"placement": "shard"}, None, None),
        ({"placement": "shard"}, None, FORMATS[0]),
        ({"placement": "host"}, {}, FORMATS[2]),
    ],
}


def check_peak(rank: int, world_size: int, options: Options, checkpointing: dict | None, quantization: Any) -> Any:
    microbatch = Microbatch(2, 96, "cpu", loss="model", checkpointing=checkpointing, is_autocast=False)
    sizes = dict(hidden_size=256, intermediate_size=768) if quantization else {}
    base = build_sized("llama", torch.bfloat16 if quantization else torch.float32, num_hidden_layers=4, **sizes)
    activations = trace(build_meta(base, r=32), microbatch, quantization)
    row = compute_row(
        measure_model(build_meta(base, r=32), quantization),
        Workload(activations, microbatch.num_tokens, optimizer="adamw_torch"),
        make_cluster(world_size),
        resolve(options, world_size),
    )
    model = lorashard.shard(build_trained(base, microbatch, r=32), quantization=quantization, **options)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable)
    parallel = DistributedDataParallel(model) if world_size > 1 else model

    def step() -> None:
        parallel(**make_batch(rows=2, tokens=96), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    peak_bytes = measure_peak(step)
    stats = lorashard.stats(model)
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    resting = trainable + states + (trainable if world_size > 1 else [])  # DDP's buckets are as large as the adapter
    resting_bytes = sum(tensor.numel() * tensor.element_size() for tensor in resting)
    base_bytes = stats.bytes_at_rest + stats.slot_bytes + stats.workspace_bytes
    assert stats.workspace_bytes == row.workspace_bytes
    return row.peak_bytes, base_bytes + resting_bytes + peak_bytes


def check_peaks(rank: int, world_size: int, kind: str) -> list[tuple[int, int]]:
    return [check_peak(rank, world_size, *case) for case in PEAKS[kind]]


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        slow(1, "one rank"),
        (2, "sharded"),
        slow(2, "sharded in other ways"),
    ],
)
def test_peak_is_within_a_tenth_of_what_a_step_takes(world_size, kind):
    """Catches whatever else a step takes: gradients, DDP's buckets, optimizer states, a gather's own buffers, a
    workspace for each layer, numbers that autograd keeps, or what unpacking needs beside them."""
    for found in run_ranks(check_peaks, world_size, world_size, kind):
        for case, (predicted, measured) in zip(PEAKS[kind], found, strict=True):
            assert predicted == pytest.approx(measured, rel=0.1), case


def check_piece_peaks(rank: int) -> dict[tuple[str, int], int]:
    batch = make_batch(rows=8, tokens=64)
    peaks = {}
    for checkpointing, rows in itertools.product(("non-reentrant", "reentrant"), (1, 4, 8)):
        base = build_base(hidden_size=64, intermediate_size=1024, num_hidden_layers=3, vocab_size=VOCAB_SIZE)
        model = add_lora(base, target_modules=["q_proj"]).train()
        set_checkpointing(model, checkpointing)
        lorashard.shard(model)
        split_layers(find_decoder_stack(model)[1], rows)

        def step(model: PeftModel = model) -> None:
            model(**batch, use_cache=False).loss.backward()

        step()
        peaks[checkpointing, rows] = measure_step(step)
    return peaks


def measure_step(step: Callable[[], object]) -> int:
    gc.collect()  # what is freed of the model before, in the middle of the step, would count as the step's
    return measure_peak(step)


@pytest.mark.slow
def test_a_layer_holds_the_activations_of_a_piece():
    """Pieces that are all recomputed before the first is differentiated: right gradients, and no memory saved."""
    for peaks in run_ranks(check_piece_peaks, 2):
        for checkpointing in ("non-reentrant", "reentrant"):
            one, four, eight = (peaks[checkpointing, rows] for rows in (1, 4, 8))
            # What grows with the rows of a piece is a layer's inside: each row adds as much as the next.
            assert four - one == pytest.approx(3 * (eight - one) / 7, rel=0.1)
            assert one < eight / 3
