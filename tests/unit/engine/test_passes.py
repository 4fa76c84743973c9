"""Passes through a sharded stack: right after any history, with the gathers and the memory that they must have."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from helpers.engine import CPU, Rig, Stack, StandInGroup, build_rig, build_unit, make_tokens, train
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from lorashard.engine import Engine, Placeholder, ScheduleEntry
from lorashard.errors import ShardError

# -- the gradients of any history --------------------------------------------------------------------------------------


class Interrupted(torch.autograd.Function):
    """Raises in forward or in backward."""

    @staticmethod
    def forward(ctx, hidden, where):
        if where == "forward":
            raise KeyboardInterrupt
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt


def interrupt(model: nn.Module, layer: int, where: str) -> None:
    """Run a step that is cut short inside of `layer`."""
    hook = model.layers[layer].lora_b.register_forward_hook(lambda m, args, output: Interrupted.apply(output, where))
    try:
        with pytest.raises(KeyboardInterrupt):
            model(make_tokens(9)).sum().backward()
    finally:
        hook.remove()
        model.zero_grad()


def find_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


class Story:
    """Lives one random history of passes on a sharded stack and on a plain one at once."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_layers = rng.randint(1, 7)
        prefetch, size = rng.choice((0, 1, 1, 2, 3)), rng.choice((2, 3, 4))
        self.rig = build_rig(self.num_layers, size=size, prefetch=prefetch, is_tied=rng.random() < 0.4, seed=seed)
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self) -> None:
        for _ in range(self.rng.randint(3, 12)):
            self.rng.choice((self.train, self.train, self.forward, self.backward, self.evaluate, self.fail))()
        while self.pending:
            self.backward()
        assert self.rig.find_differences(find_gradients) == []

    def forward(self) -> None:
        """Now and then a layer is skipped, or runs twice, or is checkpointed, or something comes between two."""
        rng = self.rng
        order = [i for i in range(self.num_layers) for _ in range(rng.choice((1,) * 8 + (0, 2)))] or [0]
        tokens, is_apart = make_tokens(rng.randrange(50)), rng.random() < 0.5
        is_checkpointed = torch.is_grad_enabled() and rng.random() < 0.3
        outputs = []
        for model in (self.rig.plain, self.rig.model):
            model.order, model.is_apart, model.is_checkpointed = order, is_apart, is_checkpointed
            outputs.append(model(tokens))
        assert torch.equal(*outputs) and self.rig.unsharded == []
        if outputs[0].requires_grad:
            self.pending.append((outputs[0].square().sum(), outputs[1].square().sum()))

    def backward(self) -> None:
        if self.pending:
            for loss in self.pending.pop(self.rng.randrange(len(self.pending))):
                loss.backward()
            assert self.rig.unsharded == []

    def train(self) -> None:
        self.forward()
        self.backward()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward()

    def fail(self) -> None:
        assert self.rig.find_differences(find_gradients) == []
        layer, where = self.rng.randrange(self.num_layers), self.rng.choice(("forward", "backward"))
        for model in (self.rig.plain, self.rig.model):
            model.order = list(range(self.num_layers))
            interrupt(model, layer, where)
        self.evaluate()


@pytest.mark.parametrize("first_seed", range(0, 50, 10))
def test_any_history_of_passes_gives_the_gradients_of_a_plain_model(first_seed):
    """Hand-written cases miss the order that breaks: a late backward, after an evaluation, after an exception."""
    for seed in range(first_seed, first_seed + 10):
        try:
            Story(seed).run()
        except BaseException as error:
            error.add_note(f"in the story of seed {seed}")
            raise


@pytest.mark.parametrize("way", ("is_apart", "is_checkpointed", None))
def test_a_step_is_right_after_one_that_was_cut_short_anywhere(way):
    """A unit left unsharded, a slot that nobody fills any more, or a view in a traceback would spoil the step after a
    Ctrl-C in a notebook."""

    def build(num_layers: int, prefetch: int) -> Rig:
        rig = build_rig(num_layers, prefetch=prefetch)
        for model in (rig.model, rig.plain):
            model.is_apart, model.is_checkpointed = way == "is_apart", way == "is_checkpointed"
        return rig

    for prefetch, layer, where in itertools.product((0, 1), range(5), ("forward", "backward")):
        rig = build(5, prefetch)
        interrupt(rig.model, layer, where)
        assert rig.find_differences(train) == []
    for prefetch, number in itertools.product((0, 1), range(10)):
        rig = build(6, prefetch)
        rig.group.broken = number
        with pytest.raises(KeyboardInterrupt):
            train(rig.model)
        rig.model.zero_grad()
        assert rig.find_differences(train) == [] and rig.find_differences(train) == []


def test_a_backward_is_right_after_another_that_was_cut_short():
    """A unit left unsharded by the first takes a slot from the second, which has none to spare without prefetch."""
    rig = build_rig(num_layers=6, prefetch=0)
    losses = {model: model(make_tokens()).square().sum() for model in (rig.plain, rig.model)}
    interrupt(rig.model, 3, "backward")

    def finish(model: nn.Module) -> dict[str, torch.Tensor]:
        losses[model].backward()
        return find_gradients(model)

    assert rig.find_differences(finish) == []


@pytest.mark.parametrize("is_cut_short", (False, True))
def test_training_goes_on_after_inference_mode(is_cut_short):
    """Tensors made in inference mode cannot be saved for backward; a slot keeps some of its tensors for ever."""
    rig = build_rig(num_layers=6)
    with torch.inference_mode():
        if is_cut_short:
            hook = rig.model.layers[2].linear.register_forward_hook(lambda m, args, output: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rig.model(make_tokens())
            hook.remove()
        else:
            rig.model(make_tokens())
    assert rig.find_differences(train) == []


class Detached(Stack):
    """Every layer learns alone: no gradient goes from one to the one before it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs = [self.embedding(tokens)]
        for layer in self.layers:
            outputs.append(layer(outputs[-1].detach()))
        return self.head(torch.stack(outputs).sum(dim=0))


def test_units_whose_inputs_get_no_gradient_are_released():
    """Nothing tells that their backward is over: held until the end, they would run out of slots."""
    for prefetch in (0, 1):
        rig = build_rig(num_layers=6, prefetch=prefetch, stack=Detached)
        assert rig.find_differences(train) == [] and rig.find_differences(train) == []


# -- what is unsharded when --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_each_unit_is_unsharded_in_its_own_forward(prefetch):
    """Two unsharded at once would need a slot more; a prefetch that starts late hides nothing, one too many reshards; a
    copy beside the slots would take memory that no formula knows of."""
    rig = build_rig(num_layers=6, prefetch=prefetch)
    slots, seen = {slot.address for slot in rig.engine.pool}, []

    def note(module: nn.Module, *args: object) -> None:
        for weight in module.parameters():
            assert type(weight) is nn.Parameter and not weight.requires_grad
            assert weight.untyped_storage().data_ptr() in slots
        seen.append((rig.unsharded, set(rig.arriving)))

    for layer in rig.model.layers:
        layer.linear.register_forward_hook(note)
    with torch.no_grad():
        rig.model(make_tokens())
    order = [f"layers.{i}" for i in range(6)]
    head = ["head"] if prefetch else []  # in the slot that the embedding has left
    assert seen == [([order[i]], {*order[i + 1 : i + 1 + prefetch], *head}) for i in range(6)]


def test_the_embedding_is_not_gathered_while_a_backward_needs_the_head_again():
    """Two forwards under one loss: the embedding would displace the head between their backwards, and come back."""
    rig = build_rig(num_layers=4)
    for _ in range(2):
        rig.group.gathers.clear()
        (rig.model(make_tokens(0)).sum() - rig.model(make_tokens(1)).sum()).backward()
    assert sum(name in ("embedding", "head") for name in rig.gathered) == 4


def test_the_head_is_held_to_the_end_of_the_forward():
    """Fused losses read `lm_head.weight` after the head's own modules; held any longer it would keep its slot."""
    rig = build_rig(num_layers=2, is_tied=True)
    seen = []

    def note(*args: object) -> None:
        seen.append((rig.unsharded, rig.model.head.weight is rig.model.embedding.weight))

    rig.model.register_forward_hook(note)
    with torch.no_grad():
        rig.model(make_tokens())
    loss = rig.model(make_tokens()).sum()
    assert seen == [(["head"], True)] * 2 and rig.unsharded == []
    loss.backward()
    assert rig.unsharded == [] and rig.model.head.weight is rig.model.embedding.weight


@pytest.mark.parametrize("is_checkpointed", (False, True))
def test_each_unit_is_unsharded_throughout_its_own_backward(is_checkpointed):
    """A recomputation keeps real views of the slot: given back when it ends, they are overwritten before their use."""
    rig = build_rig(num_layers=6)
    rig.model.is_checkpointed = is_checkpointed
    seen = []
    for i, layer in enumerate(rig.model.layers):
        layer.lora_b.register_full_backward_hook(lambda *args, name=f"layers.{i}": seen.append(name in rig.unsharded))
    for stops_early in (True, False):
        with set_checkpoint_early_stop(stops_early):  # otherwise the layer is recomputed to its end
            assert rig.find_differences(train) == []
    assert seen == [True] * 12


class Nested(nn.Module):
    """Calls a unit from within another."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.inner = Nested(depth - 1) if depth > 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(hidden)
        return hidden if self.inner is None else self.inner(hidden)


@pytest.mark.parametrize("prefetch", (0, 1))
def test_exhausted_slots_are_named(prefetch):
    """A bare assertion would leave the user without a word on which layers collide and what to do."""
    torch.manual_seed(0)
    plain, group = nn.Sequential(Nested(3)), StandInGroup()
    root = copy.deepcopy(plain)
    modules = [root[0], root[0].inner, root[0].inner.inner]
    units = [build_unit(f"layers.{i}", [module.linear], group, i) for i, module in enumerate(modules)]
    engine = Engine([ScheduleEntry(u, (m,)) for u, m in zip(units, modules, strict=True)], [root], group, CPU, prefetch)
    hidden = torch.ones(2, 4)
    if prefetch:
        assert torch.equal(root(hidden), plain(hidden))
        return
    for _ in range(2):
        with pytest.raises(ShardError) as caught:
            root(hidden)
        assert "layers.2" in caught.value.where and "prefetch" in caught.value.fix
        assert "layers.0" in caught.value.found and "layers.1" in caught.value.found
        assert all(isinstance(module.linear.weight, Placeholder) for module in modules)
    assert torch.equal(modules[2](hidden), plain[0].inner.inner(hidden)) and engine.units == tuple(units)
