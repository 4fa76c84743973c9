"""The pool of slots: how many, who is in which, and who still looks into one."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.engine import CPU, StandInGroup, build_rig, build_unit, make_tokens
from torch import nn

from lorashard.engine.slots import Slot, SlotPool, plan_slots
from lorashard.engine.streams import SideStream
from lorashard.errors import ShardError

STREAM = SideStream(CPU)


def fill_slot(num_bytes: int = 1024) -> Slot:
    slot = Slot(num_bytes, CPU)
    slot.wire.copy_(torch.arange(num_bytes) % 251)
    return slot


def hold_in_slot() -> tuple[nn.Linear, Slot]:
    """Return a module whose weights are whole in a slot of their own."""
    module, group = nn.Linear(4, 4).requires_grad_(False), StandInGroup()
    unit = build_unit("layers.7", [module], group)
    slot = Slot(unit.layout.total_bytes, CPU)
    unit.unshard(slot, STREAM)
    unit.wait(STREAM)
    return module, slot


def test_the_wire_is_the_buffer_under_another_storage():
    """Sharing the storage, a backend thread that drops its reference late would look like a weight still held."""
    slot = fill_slot()
    assert slot.wire.data_ptr() == slot.buffer.data_ptr() and torch.equal(slot.wire, slot.buffer)
    assert slot.wire.untyped_storage()._cdata != slot.buffer.untyped_storage()._cdata
    held_by_a_backend = slot.wire[:100]
    assert not slot.is_held()
    held_by_a_backend.fill_(7)
    assert bool((slot.buffer[:100] == 7).all())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int8, torch.float64))
def test_a_view_reads_the_bytes_at_its_place(dtype):
    """Offsets count elements, not bytes: a mix-up reads another tensor of the same unit."""
    slot = fill_slot(1024)
    view = slot.view(dtype, (2, 3), (3, 1), 256 // dtype.itemsize)
    assert view.dtype == dtype and view.data_ptr() == slot.address + 256
    expected = slot.wire[256 : 256 + 6 * dtype.itemsize]
    assert torch.equal(view.contiguous().view(-1).view(torch.uint8), expected)


def test_a_dropped_view_is_not_held():
    """A false alarm would stop a run that is right; the views that a slot keeps for itself are such a trap."""
    slot = fill_slot()
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.int8):
        view = nn.Parameter(slot.view(dtype, (4, 4), (4, 1), 0), requires_grad=False)
        assert slot.is_held()
        view = view.t()[1:]
        assert slot.is_held()
        del view
        assert not slot.is_held()
    slot.check_not_held()


@pytest.mark.parametrize(
    "derive",
    (
        lambda weight: weight,
        lambda weight: weight.detach(),
        lambda weight: weight.data,
        lambda weight: weight.t()[0],
        lambda weight: weight.view(torch.uint8),
        lambda weight: weight.numpy(),
        lambda weight: memoryview(weight.numpy()),
    ),
    ids=("itself", "detached", "data", "slice", "bytes", "numpy", "memoryview"),
)
def test_a_view_that_is_stored_outside_is_named(derive):
    """Whoever keeps a weight would read another unit's numbers next, the loss still healthy."""
    module, slot = hold_in_slot()
    unit = slot.owner
    stored = derive(module.weight)
    unit.reshard(STREAM)
    with pytest.raises(ShardError, match=r"still holds a weight of 'layers.7'.*ctx.save_for_backward"):
        unit.evict(STREAM)
    del stored
    assert unit.evict(STREAM) is slot and slot.owner is None


def test_a_copy_may_be_kept():
    """Keeping numbers is nobody's mistake; only sharing the slot's memory is."""
    module, slot = hold_in_slot()
    copies = [module.weight.clone(), module.weight + 1, module.weight.tolist()]
    slot.owner.reshard(STREAM)
    slot.check_not_held()
    assert copies


def test_a_view_in_a_dead_cycle_is_not_held():
    """An exception or a closure leaves cycles that only the collector frees: nobody can read through them."""
    module, slot = hold_in_slot()
    gc.disable()
    try:
        cycle: list = [module.weight]
        cycle.append(cycle)
        del cycle
        slot.owner.reshard(STREAM)
        assert slot.is_held()
        slot.check_not_held()
    finally:
        gc.enable()


def test_only_a_held_buffer_is_replaced():
    """Replacing every buffer after an exception would double the pool; replacing none would corrupt what is held."""
    pool = SlotPool({"layer": (3, 1024)}, CPU)
    held, free, _ = pool
    addresses = [slot.address for slot in pool]
    held.wire.fill_(5)
    view = held.view(torch.uint8, (16,), (1,), 0)
    free.view(torch.float32, (16,), (1,), 0)
    pool.replace_held()
    assert [slot.address == address for slot, address in zip(pool, addresses, strict=True)] == [False, True, True]
    assert not any(slot.is_held() for slot in pool)
    held.wire.fill_(9)
    assert bool((view == 5).all())
    assert held.wire.data_ptr() == held.address and held.view(torch.int8, (4,), (1,), 0).tolist() == [9] * 4
    assert pool.find(view) is None
    assert [pool.find(slot.view(torch.int8, (1,), (1,), 0)) for slot in pool] == list(pool)


def test_a_tensor_is_found_in_its_slot():
    """A slot tensor that is not recognised is saved raw: backward then reads whatever is there by then."""
    pool = SlotPool({"layer": (2, 1024), "vocabulary": (1, 4096)}, CPU)
    for slot in pool:
        weight = nn.Parameter(slot.view(torch.bfloat16, (4, 8), (8, 1), 128), requires_grad=False)
        for tensor in (weight, weight.t(), weight[1:2, ::2], weight.detach(), weight.view(torch.int16), weight[:0]):
            assert pool.find(tensor) is slot
    for tensor in (torch.ones(3), torch.ones(0), torch.ones(3).to_sparse(), torch.ones(3, device="meta"), weight + 1):
        assert pool.find(tensor) is None


class Wrapper(torch.Tensor):
    """Stands for tensors that are made of others, and have no storage of their own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_a_tensor_subclass_without_storage_is_in_no_slot():
    """Nested tensors, DTensors and quantised tensors must pass through the saved-tensor hooks as without sharding."""
    tensor = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    assert SlotPool({"layer": (1, 1024)}, CPU).find(tensor) is None


def test_a_pool_counts_its_bytes():
    """The plan states the pool in advance; a class that is left out of the sum makes it a lie."""
    pool = SlotPool({"layer": (3, 1024), "vocabulary": (1, 4096)}, CPU)
    assert len(pool) == 4 and pool.total_bytes == 3 * 1024 + 4096
    assert [slot.num_bytes for slot in pool.of_class("layer")] == [1024] * 3
    assert [slot.num_bytes for slot in pool.of_class("vocabulary")] == [4096]


def test_slots_are_as_large_as_the_largest_unit_of_their_class():
    """A slot sized for the average would overflow; one sized for the head, for every layer, would waste the memory."""
    group = StandInGroup()
    widths = {"layer": (4, 16, 8), "vocabulary": (100,)}
    units = [
        build_unit(f"{size_class}.{width}", [nn.Linear(width, width).requires_grad_(False)], group, 0, size_class)
        for size_class, all_widths in widths.items()
        for width in all_widths
    ]
    by_name = {unit.name: unit.layout.total_bytes for unit in units}
    expected = {"layer": (2, by_name["layer.16"]), "vocabulary": (1, by_name["vocabulary.100"])}
    assert plan_slots(units, num_layer_slots=2) == expected


def test_no_more_slots_than_units_are_made():
    """A model of two layers needs no third slot."""
    group = StandInGroup()
    units = [build_unit(str(i), [nn.Linear(4, 4).requires_grad_(False)], group) for i in range(2)]
    assert plan_slots(units, num_layer_slots=5)["layer"][0] == 2
    assert plan_slots([], num_layer_slots=5) == {}


def test_a_pool_repeats_its_choices():
    """Ranks choose alone: a choice that hung on an address or a set's order would give them different gathers."""
    histories = []
    rigs = [build_rig(num_layers=7, is_tied=True, prefetch=2) for _ in range(3)]
    for rig in rigs:
        slots = list(rig.engine.pool)
        history = []
        for is_training in (True, False, True, True, False, False, True):
            with torch.set_grad_enabled(is_training):
                logits = rig.model(make_tokens())
            history.append([slots.index(unit.slot) if unit.slot else None for unit in rig.engine.units])
            if is_training:
                logits.sum().backward()
            history.append([slots.index(unit.slot) if unit.slot else None for unit in rig.engine.units])
        histories.append((history, rig.gathered, rig.group.compared))
    assert histories[0] == histories[1] == histories[2]
