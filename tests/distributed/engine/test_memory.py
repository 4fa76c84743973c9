"""The memory of a sharded model: who holds bytes of the base, what a backward needs, and the peaks of the plan."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.planning import (
    FORMATS,
    WIDE,
    Options,
    build_meta,
    build_sized,
    build_trained,
    make_cpu_cluster,
    measure_peak,
    resolve_options,
)
from helpers.tiny import (
    CHECKPOINTING,
    NUM_LAYERS,
    VOCAB_SIZE,
    add_lora,
    build_base,
    make_batch,
    set_checkpointing,
)
from peft import PeftModel
from torch.nn.parallel import DistributedDataParallel

import lorashard
from lorashard.config.quantization_options import Quantization
from lorashard.engine import FrozenWeight
from lorashard.model.micro_batching import split_layers
from lorashard.model.stacks import find_decoder_stack
from lorashard.planning.costs import Workload, compute_row
from lorashard.planning.size import measure_model
from lorashard.planning.trace import Microbatch, trace

CPU_BUDGET_S = 90  # peaks are measured with torch's profiler, at sizes that outweigh an allocator's rounding

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


WIDE_NUMEL = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 352


def build_wide(quantization: Quantization | None) -> PeftModel:
    model = add_lora(build_base(dtype=torch.bfloat16, num_hidden_layers=4, **WIDE), target_modules=["q_proj", "v_proj"])
    return lorashard.shard(model.train(), "shard", quantization=quantization)


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
        make_cpu_cluster(world_size),
        resolve_options(options, world_size),
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
