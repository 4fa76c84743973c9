"""What memory a sharded model takes: shards and slots, nothing else of the base."""

from __future__ import annotations

import ctypes
import gc
import itertools

import pytest
import torch
from support import run_ranks
from tiny import CHECKPOINTING, FAMILIES, NUM_LAYERS, add_lora, build_base, make_batch, set_checkpointing

import lorashard
from lorashard.engine import Placeholder

# Large enough that a layer's weights outweigh everything else.
SIZES = dict(hidden_size=64, intermediate_size=192, vocab_size=512)


def build(family: str = "llama", checkpointing: str = "off"):
    model = add_lora(build_base(family, **SIZES), target_modules=["q_proj"])
    set_checkpointing(model, checkpointing)
    return model.train()


def list_storages() -> dict[int, int]:
    """Return {address: bytes} of every storage that a reachable tensor holds."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, Placeholder):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def check_at_rest(rank: int, family: str, world_size: int) -> dict:
    before = list_storages()
    model = build(family)
    base_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    adapter = {p.data_ptr() for p in model.parameters() if p.requires_grad}
    lorashard.shard(model)
    model(**make_batch()).loss.backward()
    model.zero_grad()
    stats = lorashard.stats(model)
    engine = lorashard.api.engine_of(model)
    allowed = {slot.address for slot in engine.pool} | {unit.home.shard.data_ptr() for unit in engine.units} | adapter
    smallest_weight = SIZES["hidden_size"] * SIZES["hidden_size"] // 2 * 4
    others = {a: n for a, n in list_storages().items() if a not in before and a not in allowed and n >= smallest_weight}
    padding = 256 * world_size * (NUM_LAYERS + 2) + 256 * sum(len(unit.weights) for unit in engine.units)
    return {
        "others": others,
        "share": base_bytes <= stats.bytes_at_rest * world_size <= base_bytes + padding,
        "pool": stats.slot_bytes == sum(slot.num_bytes for slot in engine.pool),
        "peak": 0 < stats.peak_unsharded_bytes <= stats.slot_bytes,
        "num_slots": stats.num_slots,
        "largest": max(unit.layout.total_bytes for unit in engine.units) <= stats.slot_bytes < base_bytes,
    }


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_slots_and_shards_holds_base_bytes(family, world_size):
    """A whole copy that survives sharding, or a tensor that autograd keeps, would make the sharding pointless."""
    for facts in run_ranks(check_at_rest, world_size, family, world_size):
        assert facts == {"others": {}, "share": True, "pool": True, "peak": True, "num_slots": 4, "largest": True}


class MallInfo2(ctypes.Structure):
    """glibc's account of this process's heap."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def count_live_bytes() -> int:
    """Return the bytes that the heap holds now, exactly: torch's CPU tensors are ordinary heap blocks."""
    gc.collect()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = MallInfo2
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def measure_kept_bytes(model) -> int:
    """Return the bytes that a forward keeps for its backward."""
    batch = make_batch(rows=8, tokens=128)
    for _ in range(2):  # what is made once is made here
        model(**batch).loss.backward()
    before = count_live_bytes()
    loss = model(**batch).loss
    kept = count_live_bytes() - before
    loss.backward()
    return kept


def check_activations(rank: int) -> dict:
    kept = {}
    for checkpointing, is_sharded in itertools.product(CHECKPOINTING, (False, True)):
        model = build(checkpointing=checkpointing)
        kept[checkpointing, is_sharded] = measure_kept_bytes(lorashard.shard(model) if is_sharded else model)
    return kept


def test_activation_checkpointing_saves_what_it_saves_without_sharding():
    """Handle hooks in the wrong place switch activation checkpointing off in silence, with the right gradients."""
    for kept in run_ranks(check_activations, 2):
        for checkpointing in CHECKPOINTING:
            assert kept[checkpointing, True] == pytest.approx(kept[checkpointing, False], rel=0.05), checkpointing
        assert kept["non-reentrant", True] < kept["off", True] / 3
        assert kept["around-call", True] < kept["off", True] / 3
        assert kept["reentrant", True] < kept["off", True] / 3


def check_autocast(rank: int) -> list[int]:
    kept = []
    for is_sharded in (False, True):
        base = build_base("llama", torch.bfloat16, **SIZES)
        model = add_lora(base, target_modules=["q_proj"]).train()
        model = lorashard.shard(model) if is_sharded else model
        with torch.autocast("cpu", torch.bfloat16):
            kept.append(measure_kept_bytes(model))
    return kept


def test_a_base_in_the_compute_dtype_is_not_kept_under_autocast():
    """Autocast of a base in another dtype saves a fresh copy of each weight: every layer would stay in memory."""
    for plain, sharded in run_ranks(check_autocast, 2):
        assert sharded == pytest.approx(plain, rel=0.05)
