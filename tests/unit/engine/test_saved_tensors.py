"""What autograd, and others, keep of a sharded model: never a slot's memory, and always the right values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.bases import save_base
from helpers.engine import Layer, Rig, Stack, build_rig, make_tokens, train
from helpers.tiny import find_differences, make_batch, take_gradients
from peft import LoraConfig
from torch import nn

import lorashard
from lorashard.errors import ShardError
from lorashard.model.stacks import find_decoder_stack
from lorashard.planning.tracker import Tracker

# -- what autograd saves -----------------------------------------------------------------------------------------------

DERIVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda weight: weight,
    "transposed": lambda weight: weight.t(),
    "rows": lambda weight: weight[1:3],
    "strided": lambda weight: weight[1:, ::2],
    "one number": lambda weight: weight[2, 3],
    "expanded": lambda weight: weight[1].expand(5, 8),
    "none of it": lambda weight: weight[:0],
    "bits": lambda weight: weight.view(torch.int32).view(torch.float32)[3:],
}


class DerivedLayer(Layer):
    """Trains a factor of each part of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        parts = {name: derive(self.linear.weight) for name, derive in DERIVED.items()}
        self.factors = nn.ParameterDict({name: torch.randn(part.shape) for name, part in parts.items()})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        products = [(self.factors[name] * derive(self.linear.weight)).sum() for name, derive in DERIVED.items()]
        return super().forward(hidden) + torch.stack(products).mean()


class DerivedStack(Stack):
    layer_class = DerivedLayer


@pytest.mark.parametrize("prefetch", (0, 1))
def test_a_saved_weight_comes_back_from_another_slot(prefetch):
    """Gradients would be computed with whatever the slot holds by then: wrong, finite, and unnoticed."""
    rig = build_rig(num_layers=5, prefetch=prefetch, stack=DerivedStack)
    assert rig.find_differences(train) == []


class OddStack(Stack):
    """Computes with tensors that are made of others and have no storage of their own, or none at all."""

    def run(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        rows = torch.eye(hidden.shape[-2]).to_sparse()
        hidden = torch.stack([torch.sparse.mm(rows, part) for part in layer(hidden)])
        nested = torch.nested.nested_tensor_from_jagged(hidden.flatten(0, 1), torch.tensor([0, 5, len(hidden) * 4]))
        return (nested * nested.detach()).values().view_as(hidden)


def test_tensors_without_storage_are_saved_as_without_sharding():
    """Nested tensors, DTensors and sparse ones have no address that could be sought among the slots."""
    assert build_rig(num_layers=4, stack=OddStack).find_differences(train) == []


def test_a_forward_keeps_what_a_plain_one_keeps_and_drops_it():
    """A copy of every activation would double what a forward keeps; a cycle would keep it for ever where no backward
    follows (a bad batch, a loss only looked at)."""
    rig = build_rig(num_layers=3)
    kept_bytes = {}
    for model in (rig.plain, rig.model):
        with Tracker() as tracker:
            model(make_tokens())
            gc.collect()
            resting_bytes = tracker.live_bytes  # weights and slots, which were there before
            loss = model(make_tokens()).sum()
            kept_bytes[model] = tracker.live_bytes - resting_bytes
            del loss
            gc.collect()
            assert tracker.live_bytes == resting_bytes
    assert 0 < kept_bytes[rig.model] <= kept_bytes[rig.plain]


def test_other_tensors_keep_their_check_for_changes_in_place():
    """Hooks switch torch's own check off: an activation changed before its backward would give wrong gradients."""
    rig = build_rig(num_layers=3)
    outputs: list[torch.Tensor] = []
    hook = rig.model.layers[1].register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = rig.model(make_tokens()).sum()
    outputs[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="inplace operation.*version 1"):
        loss.backward()
    hook.remove()
    rig.model.zero_grad()
    assert rig.find_differences(train) == []


def test_hooks_around_ours_get_all_that_is_in_no_slot():
    """Activation offloading that misses a tensor saves no memory; one that gets a slot's tensor copies the base."""
    rig = build_rig(num_layers=3)
    packed: dict[nn.Module, list[torch.Tensor]] = {}

    def step(model: nn.Module) -> dict[str, torch.Tensor]:
        found = packed[model] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor.detach())
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(make_tokens()).square().sum()
        loss.backward()
        return take_gradients(model)

    assert rig.find_differences(step) == []
    frozen = {p.untyped_storage().data_ptr() for p in rig.plain.parameters() if not p.requires_grad}
    expected = [tensor for tensor in packed[rig.plain] if tensor.untyped_storage().data_ptr() not in frozen]
    assert [tensor.shape for tensor in packed[rig.model]] == [tensor.shape for tensor in expected]
    assert len(packed[rig.plain]) > len(expected) > 0


def test_hooks_are_gone_after_a_pass():
    """Hooks that stay behind would turn tensors of other models into handles."""
    rig = build_rig(num_layers=2)
    for error in (None, KeyboardInterrupt):
        if error is not None:
            rig.group.broken = rig.group.num_gathers
            with pytest.raises(error):
                rig.model(make_tokens())
        else:
            rig.model(make_tokens())
        with torch.autograd.graph.disable_saved_tensors_hooks("some are in use"):  # which this refuses
            pass


# -- a graph that is used more than once -------------------------------------------------------------------------------


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


def test_a_retained_graph_can_be_used_again():
    """Handles must outlive the first backward, whatever has passed through the slots since."""
    for num_layers, prefetch in ((1, 0), (3, 2), (6, 0), (6, 1)):
        assert build_rig(num_layers, prefetch=prefetch).find_differences(differentiate_retained) == []


def test_a_double_backward_is_right_or_refused():
    """What the first backward saves for the second is a slot's tensor, behind the hooks' back: right as long as the
    slots hold the layers, and otherwise the second must not read other layers there."""
    for num_layers in (1, 3):
        assert build_rig(num_layers).find_differences(differentiate_twice) == []
    rig = build_rig(num_layers=5)
    with pytest.raises(ShardError) as caught:
        differentiate_twice(rig.model)
    assert "layers.4" in caught.value.where
    rig.model.zero_grad()
    assert rig.find_differences(train) == []


class Keep(torch.autograd.Function):
    """Saves a weight as torch asks for it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def test_a_look_at_the_graph_gives_a_copy():
    """Debuggers and profilers read what nodes have saved: a view would be overwritten in their hands, or hold the
    slot."""
    rig = build_rig(num_layers=5)
    kept = {}
    for model in (rig.plain, rig.model):
        outputs: list[torch.Tensor] = []

        def keep(linear: nn.Module, args: Any, output: torch.Tensor, outputs: list = outputs) -> torch.Tensor:
            outputs.append(Keep.apply(output, linear.weight))
            return outputs[-1]

        hook = model.layers[1].linear.register_forward_hook(keep)
        loss = model(make_tokens()).sum()
        hook.remove()
        (kept[model],) = outputs[0].grad_fn.saved_tensors
        del loss, outputs
    assert kept[rig.model].untyped_storage().data_ptr() not in {slot.address for slot in rig.engine.pool}
    assert rig.find_differences(train) == []
    assert torch.equal(kept[rig.model], kept[rig.plain])


# -- what others keep --------------------------------------------------------------------------------------------------


def keep_and_train(rig: Rig, derive: Callable[[torch.Tensor], Any]) -> list:
    """Keep what `derive` gives for the weight of a layer during a forward, then train."""
    kept: list = []
    hook = rig.model.layers[2].linear.register_forward_hook(lambda m, args, output: kept.append(derive(m.weight)))
    try:
        with torch.no_grad():
            rig.model(make_tokens())
    finally:
        hook.remove()
    assert rig.find_differences(train) == []
    return kept


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda weight: weight,
    "detached": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "slice": lambda weight: weight.t()[0],
    "bytes": lambda weight: weight.view(torch.uint8),
    "numpy": lambda weight: weight.numpy(),
    "memoryview": lambda weight: memoryview(weight.numpy()),
}


@pytest.mark.parametrize("derive", VIEWS.values(), ids=VIEWS)
def test_a_view_that_is_stored_outside_is_named(derive):
    """Whoever keeps a weight would read another unit's values next, the loss still healthy."""
    rig = build_rig(num_layers=5)
    with pytest.raises(ShardError) as caught:
        keep_and_train(rig, derive)
    assert "layers.2" in caught.value.where
    rig.model.zero_grad()
    assert rig.find_differences(train) == []


class Leak(torch.autograd.Function):
    """Puts the weight that a backward reads where it stays."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, kept: list) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.kept = kept
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.kept.extend(ctx.saved_tensors)
        return grad, None, None


def test_a_weight_that_a_backward_has_left_outside_is_named():
    """The slot keeps what it gives a backward, for the next one: it would count as its own."""
    rig = build_rig(num_layers=5)
    kept: list = []
    layer = rig.model.layers[4].linear
    layer.register_forward_hook(lambda m, args, output: Leak.apply(output, m.weight, kept))
    with pytest.raises(ShardError) as caught:
        train(rig.model)
    assert "layers.4" in caught.value.where and len(kept) == 1


@pytest.mark.parametrize("derive", (lambda weight: weight, lambda weight: weight.detach()), ids=("itself", "detached"))
def test_a_quantized_weight_that_is_stored_outside_is_named(derive, tmp_path):
    """Its parts are views of the slot too: it would be dequantized from another unit's."""
    save_base(tmp_path, "llama", num_hidden_layers=6)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = lorashard.load(str(tmp_path), lora, "host", dtype=torch.float32, quantization="nf4")
    kept: list = []
    for layer in find_decoder_stack(model)[1]:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: kept.append(derive(module.weight)))
    with pytest.raises(ShardError) as caught, torch.no_grad():
        model(**make_batch())
    assert "layers." in caught.value.where


def test_what_is_done_to_a_weight_ends_with_its_visit():
    """What the slot keeps for the next pass would carry a script's note, or be a copy that nothing updates."""
    rig = build_rig(num_layers=5)
    module = rig.model.layers[4].linear

    def change(module: nn.Module, args: tuple) -> None:
        module.weight.note = "mine"
        module.weight.data = module.weight.data.clone()

    hook = module.register_forward_pre_hook(change)
    train(rig.model)
    hook.remove()
    rig.model.zero_grad()
    assert rig.find_differences(train) == []
    slots = {slot.address for slot in rig.engine.pool}
    seen: list = []
    module.register_forward_hook(
        lambda m, args, output: seen.append((m.weight.untyped_storage().data_ptr() in slots, vars(m.weight)))
    )
    train(rig.model)
    assert seen == [(True, {})]


def make_cycle(weight: torch.Tensor) -> None:
    cycle: list = [weight]
    cycle.append(cycle)


@pytest.mark.parametrize(
    "derive", (lambda weight: [weight.clone(), weight + 1, weight.tolist()], make_cycle), ids=("copy", "dead cycle")
)
def test_what_shares_no_memory_may_be_kept(derive):
    """A false alarm would stop a run that is right: copies are nobody's mistake, and through a cycle that an exception
    or a closure has left nobody can read."""
    gc.disable()
    try:
        assert len(keep_and_train(build_rig(num_layers=5), derive)) == 1
    finally:
        gc.enable()


def test_a_view_that_an_exception_keeps_stays_as_it_is():
    """The frames of a traceback keep weights: their slot's memory must go to them, or they show another layer's, or
    nothing can be trained any more."""
    rig = build_rig(num_layers=5)
    kept: list[torch.Tensor] = []

    def fail(linear: nn.Module, *args: object) -> None:
        kept.append(linear.weight)
        raise KeyboardInterrupt

    hook = rig.model.layers[2].linear.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        rig.model(make_tokens())
    hook.remove()
    slot_bytes = rig.engine.stats().slot_bytes
    for _ in range(2):
        assert rig.find_differences(train) == []
    assert find_differences({"weight": kept[0]}, {"weight": rig.plain.layers[2].linear.weight}) == []
    addresses = {slot.address for slot in rig.engine.pool}
    assert kept[0].untyped_storage().data_ptr() not in addresses and rig.engine.stats().slot_bytes == slot_bytes
