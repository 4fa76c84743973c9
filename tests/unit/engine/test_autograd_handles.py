"""What autograd saves for a tensor in a slot, and what it gets back after the slot's bytes have changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.engine import CPU, Rig, StandInGroup, build_rig, build_unit, make_tokens
from helpers.tiny import find_differences, take_gradients
from torch import nn

from lorashard.engine.autograd import Handle, first_differentiable, is_in_backward, saved_handles
from lorashard.engine.slots import SlotPool
from lorashard.engine.streams import SideStream
from lorashard.errors import ShardError


class TwoSlots:
    """One unit with one weight, and a pool of two slots that it can be moved between."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(6, 4, bias=False).requires_grad_(False)
        self.weight = self.module.weight.clone()
        self.unit = build_unit("layers.0", [self.module], StandInGroup())
        self.pool = SlotPool({"layer": (2, self.unit.layout.total_bytes)}, CPU)
        self.stream = SideStream(CPU)
        self.restored: list[Handle] = []
        self.gather(0)

    def gather(self, slot: int) -> None:
        self.unit.unshard(list(self.pool)[slot], self.stream)
        self.unit.wait(self.stream)

    def evict(self) -> None:
        """Take the unit out of its slot, and put rubbish there."""
        self.unit.reshard(self.stream)
        self.unit.evict(self.stream).wire.fill_(0xFF)

    def restore(self, handle: Handle) -> torch.Tensor:
        self.restored.append(handle)
        if handle.unit.slot is None:
            self.gather(1)
        assert handle.unit.slot is not None
        return handle.unit.slot.view(handle.dtype, handle.shape, handle.stride, handle.offset)


@pytest.fixture
def slots() -> TwoSlots:
    return TwoSlots()


DERIVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda weight: weight,
    "transposed": lambda weight: weight.t(),
    "rows": lambda weight: weight[1:3],
    "strided": lambda weight: weight[1:, ::2],
    "one number": lambda weight: weight[2, 3],
    "expanded": lambda weight: weight[1].expand(5, 6),
    "none of it": lambda weight: weight[:0],
    "bits": lambda weight: weight.view(torch.int32).view(torch.float32)[3:],
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_a_saved_weight_comes_back_from_another_slot(slots, derive):
    """Gradients would be computed with whatever the slot holds by then: wrong, finite, and unnoticed."""
    expected_part = derive(slots.weight)
    trained = torch.randn(expected_part.shape, requires_grad=True)
    expected = torch.autograd.grad((trained * expected_part).sum(), trained)[0]
    with saved_handles(slots.pool, slots.restore):
        product = (trained * derive(slots.module.weight)).sum()
    slots.evict()
    found = torch.autograd.grad(product, trained)[0]
    assert torch.equal(found, expected) and len(slots.restored) == 1
    assert slots.restored[0].shape == expected_part.shape and slots.unit.slot is list(slots.pool)[1]


def test_nothing_of_a_slot_is_kept_by_autograd(slots):
    """A graph that holds a slot tensor keeps the slot from being reused."""
    hidden = torch.randn(3, 6, requires_grad=True)
    with saved_handles(slots.pool, slots.restore):
        output = torch.tanh(slots.module(hidden)).sum()
    slots.unit.reshard(slots.stream)
    slots.unit.slot.check_not_held()
    output.backward()
    slots.unit.reshard(slots.stream)
    slots.unit.slot.check_not_held()


def test_other_tensors_keep_their_check_for_changes_in_place(slots):
    """Hooks switch torch's own check off: an activation changed before its backward would give wrong gradients."""
    trained = torch.ones(3, requires_grad=True)
    with saved_handles(slots.pool, slots.restore):
        activation = trained * 2
        output = (activation * activation).sum()
    activation.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*version 1; expected version 0"):
        output.backward()


def test_other_tensors_come_back_as_they_are(slots):
    """A copy of every activation would double what a forward keeps."""
    trained = torch.ones(3, requires_grad=True)
    with saved_handles(slots.pool, slots.restore):
        activation = trained.exp()
    assert activation.grad_fn._saved_result.data_ptr() == activation.data_ptr()
    activation.sum().backward()
    assert torch.equal(trained.grad, activation.detach()) and slots.restored == []


class Recorder:
    """A pair of hooks that remembers the tensors it was given, and gives back copies."""

    def __init__(self) -> None:
        self.packed: list[torch.Tensor] = []
        self.num_unpacked = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        self.packed.append(tensor.detach())
        return tensor.detach().clone()

    def unpack(self, packed: Any) -> torch.Tensor:
        self.num_unpacked += 1
        return packed


def test_hooks_around_ours_get_all_that_is_in_no_slot(slots):
    """Activation offloading that misses a tensor saves no memory; one that gets a slot's tensor copies the base."""
    outer = Recorder()
    hidden = torch.randn(3, 6, requires_grad=True)
    around = torch.autograd.graph.saved_tensors_hooks(outer.pack, outer.unpack)
    with around, saved_handles(slots.pool, slots.restore):
        activation = torch.sigmoid(slots.module(hidden))
        output = (activation * activation).sum()
    addresses = [tensor.data_ptr() for tensor in outer.packed]
    assert addresses == [activation.data_ptr()] * 3
    slots.evict()
    output.backward()
    assert outer.num_unpacked == 3 and len(slots.restored) == 1
    plain = hidden.detach().requires_grad_()
    torch.sigmoid(plain @ slots.weight.t()).square().sum().backward()
    torch.testing.assert_close(hidden.grad, plain.grad)


def test_hooks_inside_ours_win(slots):
    """Activation checkpointing places its hooks inside: ours must not take its tensors, or it would save nothing."""
    inner = Recorder()
    trained = torch.ones(3, requires_grad=True)
    with saved_handles(slots.pool, slots.restore):
        with torch.autograd.graph.saved_tensors_hooks(inner.pack, inner.unpack):
            output = trained.exp().sum()
        (trained.exp() * 2).sum().backward()
    assert len(inner.packed) == 1
    output.backward()
    assert inner.num_unpacked == 1


def test_hooks_are_gone_after_the_body(slots):
    """Hooks that stay behind would turn tensors of other models into handles."""
    with pytest.raises(KeyboardInterrupt), saved_handles(slots.pool, slots.restore):
        raise KeyboardInterrupt
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_backward_is_noticed():
    """Recomputation is told from a forward by this alone."""
    seen = []
    trained = torch.ones(2, requires_grad=True)
    output = trained * 2
    output.register_hook(lambda grad: seen.append(is_in_backward()))
    output.sum().backward()
    assert seen == [True] and not is_in_backward()


def test_the_first_differentiable_tensor_is_found():
    """A unit whose entry is overlooked is released late, one whose exit is overlooked is gathered late."""
    frozen, first, second = torch.ones(1), torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    assert first_differentiable(first) is first
    assert first_differentiable((frozen, None, [3, {"a": frozen, "b": first}], second)) is first
    assert first_differentiable({"logits": frozen, "hidden": (second, first)}) is second
    for nothing in (frozen, None, (), {}, "text", 3, [frozen, [frozen]]):
        assert first_differentiable(nothing) is None


def train(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    model(make_tokens(seed)).square().sum().backward()
    return take_gradients(model)


def differentiate_twice(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(model(make_tokens()).square().sum(), parameters, create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    return take_gradients(model)


def differentiate_retained(model: nn.Module) -> dict[str, torch.Tensor]:
    """Other passes come between the two backwards through one graph."""
    loss = model(make_tokens()).square().sum()
    loss.backward(retain_graph=True)
    model(make_tokens(1)).sum().backward()
    with torch.no_grad():
        model(make_tokens(2))
    loss.backward()
    return take_gradients(model)


def compare(rig: Rig, body: Callable[[nn.Module], dict[str, torch.Tensor]]) -> list[str]:
    return find_differences(body(rig.model), body(rig.plain))


@pytest.mark.parametrize("num_layers", (1, 3, 6))
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_a_retained_graph_can_be_used_again(num_layers, prefetch):
    """Handles must outlive the first backward, whatever has passed through the slots since."""
    assert compare(build_rig(num_layers, prefetch=prefetch), differentiate_retained) == []


def test_double_backward_is_right_where_the_slots_hold_the_layers():
    """What the first backward saves for the second is a slot tensor, and right as long as nobody evicts it."""
    for num_layers in (1, 2, 3):
        assert compare(build_rig(num_layers), differentiate_twice) == []


def test_double_backward_is_refused_where_they_do_not():
    """The first backward saves slot tensors behind the hooks' back: the second must not read other layers there."""
    rig = build_rig(num_layers=5)
    with pytest.raises(ShardError, match="still holds a weight of 'layers.4'"):
        differentiate_twice(rig.model)
    rig.model.zero_grad()
    assert compare(rig, train) == []


def test_a_graph_that_is_dropped_is_freed():
    """A forward without its backward (a bad batch, a loss only looked at) would keep its activations for ever."""
    rig = build_rig(num_layers=3)
    outputs: list[weakref.ref] = []
    for layer in rig.model.layers:
        layer.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    rig.model(make_tokens())
    gc.collect()
    assert [output() for output in outputs] == [None] * 3


def test_a_look_at_the_graph_gives_a_copy():
    """Debuggers and profilers read `grad_fn._saved_*`: a view would be overwritten in their hands, or hold the slot."""
    rig = build_rig(num_layers=5)
    kept = {}
    for model in (rig.plain, rig.model):
        node = model(make_tokens()).grad_fn
        while not hasattr(node, "_saved_mat2"):
            node = node.next_functions[0][0]
        kept[model] = node._saved_mat2
    assert rig.engine.pool.find(kept[rig.model]) is None
    assert compare(rig, train) == []
    assert torch.equal(kept[rig.model], kept[rig.plain])
