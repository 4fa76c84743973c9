"""The life of a unit: what memory it has when, who waits for whom, and what an engine does with its slots."""

from __future__ import annotations

import contextlib
import copy
import gc
import random

import pytest
import torch
from helpers.engine import CPU, Rig, Stack, StandInGroup, build_rig, build_unit, make_tokens
from helpers.tiny import find_differences, take_gradients
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lorashard.engine import Engine, Placeholder, State, Visit
from lorashard.engine.slots import Slot
from lorashard.engine.streams import SideStream
from lorashard.errors import ShardError


class Life:
    """A unit of two weights in two dtypes, and slots to put it in."""

    def __init__(self, size: int = 2) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(5, 3).requires_grad_(False)
        self.module.bias = nn.Parameter(self.module.bias.bfloat16(), requires_grad=False)
        self.expected = [parameter.clone() for parameter in self.module.parameters()]
        self.group = StandInGroup(size)
        self.unit = build_unit("layers.0", [self.module], self.group)
        self.slots = [Slot(self.unit.layout.total_bytes + 512, CPU) for _ in range(2)]
        self.stream = SideStream(CPU)

    @property
    def is_in_place(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.module.parameters(), self.expected, strict=True))

    @property
    def is_hidden(self) -> bool:
        return all(isinstance(parameter, Placeholder) for parameter in self.module.parameters())


@pytest.mark.parametrize("size", (2, 3, 8))
def test_a_unit_goes_round_its_states(size):
    """A module that keeps a view while the unit is not whole would read a slot that is somebody else's."""
    life = Life(size)
    unit, stream, slot = life.unit, life.stream, life.slots[0]
    for _ in range(2):
        assert unit.state is State.SHARDED and life.is_hidden and unit.slot is None
        unit.unshard(slot, stream)
        assert unit.state is State.UNSHARDING and life.is_hidden and slot.owner is unit
        assert not life.group.gathers[-1][1].is_done
        unit.wait(stream)
        assert unit.state is State.UNSHARDED and life.is_in_place and life.group.gathers[-1][1].is_done
        unit.reshard(stream)
        assert unit.state is State.IDLE and life.is_hidden and unit.slot is slot
        assert unit.evict(stream) is slot and slot.owner is None
    assert life.group.num_gathers == 2


def test_the_modules_hold_views_of_the_slot():
    """A copy would take memory that no formula knows of, and hide from the saved handles."""
    life = Life()
    life.unit.unshard(life.slots[1], life.stream)
    life.unit.wait(life.stream)
    for parameter, field in zip(life.module.parameters(), life.unit.layout.fields, strict=True):
        assert type(parameter) is nn.Parameter and not parameter.requires_grad
        assert parameter.data_ptr() == life.slots[1].address + field.begin_byte


def test_asking_twice_does_nothing():
    """A prefetch and the unit's own hook do not know of each other."""
    life = Life()
    life.unit.unshard(life.slots[0], life.stream)
    life.unit.wait(life.stream)
    weight = life.module.weight
    life.unit.wait(life.stream)
    assert life.module.weight is weight
    life.unit.reshard(life.stream)
    life.unit.reshard(life.stream)
    assert life.unit.state is State.IDLE


def test_coming_back_before_eviction_is_free():
    """The base never changes, so a slot's bytes do not go stale: gathering them again is pure cost."""
    life = Life()
    life.unit.unshard(life.slots[0], life.stream)
    for _ in range(3):
        life.unit.wait(life.stream)
        assert life.is_in_place
        life.unit.reshard(life.stream)
    assert life.group.num_gathers == 1


def test_resharding_what_is_not_whole_changes_nothing():
    """Release by schedule hits units that are on their way or at rest: neither may lose its slot or its gather."""
    life = Life()
    life.unit.reshard(life.stream)
    assert life.unit.state is State.SHARDED
    life.unit.unshard(life.slots[0], life.stream)
    life.unit.reshard(life.stream)
    assert life.unit.state is State.UNSHARDING
    life.unit.wait(life.stream)
    assert life.is_in_place


def test_a_slot_in_flight_is_waited_for_before_it_is_given_back():
    """A gather that arrives late would write into the next unit's weights."""
    life = Life()
    for give_back in (life.unit.evict, life.unit.abandon):
        life.unit.unshard(life.slots[0], life.stream)
        give_back(life.stream)
        assert life.group.gathers[-1][1].is_done
        assert life.unit.state is State.SHARDED and life.slots[0].owner is None and life.is_hidden


class WatchedStream(SideStream):
    """Hands out numbers for events, and remembers behind which one each gather was put."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.num_marks = 0
        self.waited_for: list = []

    def mark(self):
        self.num_marks += 1
        return self.num_marks

    @contextlib.contextmanager
    def after(self, event):
        self.waited_for.append(event)
        yield


def test_a_gather_waits_for_the_last_reader_of_its_slot():
    """On a GPU the host is far ahead: a gather that overtakes the last reader overwrites what it computes with."""
    first, second, stream = Life(), Life(), WatchedStream()
    slot = first.slots[0]
    for number_of_readers, unit in enumerate((first.unit, second.unit, first.unit)):
        unit.unshard(slot, stream)
        assert stream.waited_for[-1] == (number_of_readers or None)
        unit.wait(stream)
        unit.reshard(stream)
        unit.evict(stream)
    first.unit.unshard(slot, stream)
    first.unit.abandon(stream)
    second.unit.unshard(slot, stream)
    assert stream.waited_for[-2:] == [3, 4]


@pytest.mark.parametrize("state", State)
def test_a_unit_can_be_abandoned_in_any_state(state):
    """After an exception the unit may be anywhere, and somebody's traceback may still view its slot."""
    life = Life()
    if state is not State.SHARDED:
        life.unit.unshard(life.slots[0], life.stream)
    if state in (State.UNSHARDED, State.IDLE):
        life.unit.wait(life.stream)
    held = life.module.weight
    if state is State.IDLE:
        life.unit.reshard(life.stream)
    assert life.unit.state is state
    life.unit.abandon(life.stream)
    assert life.unit.state is State.SHARDED and life.is_hidden and life.slots[0].owner is None
    life.unit.unshard(life.slots[1], life.stream)
    life.unit.wait(life.stream)
    assert life.is_in_place
    del held


def test_a_tied_weight_is_one_tensor_in_every_place():
    """Two tensors would be gathered twice, and one of the places left with a placeholder."""
    embedding, head = nn.Embedding(7, 4).requires_grad_(False), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    expected = head.weight.clone()
    unit = build_unit("head", [embedding, head], StandInGroup())
    assert len(unit.layout.fields) == 1 and head.weight is embedding.weight is unit.weights[0].placeholder
    slot, stream = Slot(unit.layout.total_bytes, CPU), SideStream(CPU)
    unit.unshard(slot, stream)
    unit.wait(stream)
    assert head.weight is embedding.weight and torch.equal(head.weight, expected)


def test_one_rank_gathers_and_copies_nothing():
    """Alone, a rank holds the whole unit: weights are views of the shard, for the whole run."""
    rig = build_rig(num_layers=3, size=1)
    assert rig.in_state(State.UNSHARDED) == {unit.name for unit in rig.engine.units}
    assert compare(rig, train) == []
    assert (rig.engine.stats().num_gathers, len(rig.engine.pool)) == (0, 0)
    for unit in rig.engine.units:
        begin = unit.home.shard.data_ptr()
        for weight in unit.weights:
            for owner in weight.owners:
                parameter = owner.module._parameters[owner.attribute]
                assert begin <= parameter.data_ptr() < begin + unit.home.device_bytes


# -- units under an engine -----------------------------------------------------------------------------------------


def train(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    model(make_tokens(seed)).square().sum().backward()
    return take_gradients(model)


def compare(rig: Rig, body) -> list[str]:
    return find_differences(body(rig.model), body(rig.plain))


@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_each_unit_is_whole_in_its_own_forward(prefetch):
    """Two whole at once would need a slot more; a prefetch that starts late hides nothing, one too many evicts."""
    rig = build_rig(num_layers=6, prefetch=prefetch)
    seen = []
    for layer in rig.model.layers:
        layer.linear.register_forward_hook(
            lambda *args: seen.append((rig.in_state(State.UNSHARDED), rig.in_state(State.UNSHARDING)))
        )
    with torch.no_grad():
        rig.model(make_tokens())
    order = [*(f"layers.{i}" for i in range(6)), "head"]
    assert seen == [({order[i]}, set(order[i + 1 : i + 1 + prefetch])) for i in range(6)]


def test_the_head_is_held_to_the_end_of_the_forward():
    """Fused losses read `lm_head.weight` after the head's own modules; held any longer it would keep its slot."""
    rig = build_rig(num_layers=2)
    seen = []
    rig.model.register_forward_hook(lambda *args: seen.append(rig.in_state(State.UNSHARDED)))
    with torch.no_grad():
        rig.model(make_tokens())
    loss = rig.model(make_tokens()).sum()
    assert seen == [{"head"}] * 2 and rig.in_state(State.UNSHARDED) == set()
    loss.backward()
    assert rig.in_state(State.UNSHARDED) == set()


@pytest.mark.parametrize("is_checkpointed", (False, True))
def test_each_unit_is_whole_throughout_its_own_backward(is_checkpointed):
    """A recomputation keeps real views of the slot: given back when it ends, they are overwritten before their use."""
    rig = build_rig(num_layers=6)
    rig.model.is_checkpointed = is_checkpointed
    seen = []
    for i, layer in enumerate(rig.model.layers):
        layer.lora_b.register_full_backward_hook(lambda *args, unit=rig.unit[f"layers.{i}"]: seen.append(unit.state))
    train(rig.model)
    assert seen == [State.UNSHARDED] * 6


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
        assert compare(rig, train) == []
        assert compare(rig, train) == []


def test_a_unit_asked_for_twice_is_gathered_once():
    """A prefetched unit that is gathered again when its turn comes doubles the traffic."""
    rig = build_rig(num_layers=6, prefetch=2)
    with torch.no_grad():
        rig.model(make_tokens())
    assert sorted(rig.gathered) == sorted(unit.name for unit in rig.engine.units)
    assert all(work.is_done for _, work in rig.group.gathers)


def test_a_prefetch_that_finds_no_slot_is_skipped():
    """The embedding and the head share a slot: reaching for the head while the embedding computes must do no harm."""
    rig = build_rig(num_layers=2, prefetch=5)
    seen = []
    rig.model.embedding.register_forward_hook(lambda *args: seen.append(rig.unit["head"].state))
    assert compare(rig, train) == []
    assert seen == [State.SHARDED]
    assert rig.gathered[:4] == ["embedding", "layers.0", "layers.1", "head"]


class Nested(nn.Module):
    """Calls a unit from within another."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.inner = Nested(depth - 1) if depth > 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(hidden)
        return hidden if self.inner is None else self.inner(hidden)


class Root(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.child(hidden)


def test_exhausted_slots_are_named():
    """A bare assertion would leave the user without a word on which layers collide and what to do."""
    torch.manual_seed(0)
    plain = Root(Nested(3))
    for prefetch, is_enough in ((0, False), (1, True)):
        root, group, visits = copy.deepcopy(plain), StandInGroup(), []
        modules = [root.child, root.child.inner, root.child.inner.inner]
        for i, module in enumerate(modules):
            visits.append(Visit(build_unit(f"layers.{i}", [module.linear], group, i), (module,)))
        engine = Engine(visits, [root], group, CPU, prefetch)
        hidden = torch.ones(2, 4)
        if is_enough:
            assert torch.equal(root(hidden), plain(hidden))
            continue
        for _ in range(2):
            message = (
                r"no slot is free for 'layers.2': \['layers.0', 'layers.1'\] are all in use at once. Raise prefetch"
            )
            with pytest.raises(ShardError, match=message):
                root(hidden)
            assert {unit.state for unit in engine.units} == {State.SHARDED}
        assert torch.equal(root.child.inner.inner(hidden), plain.child.inner.inner(hidden))


def test_the_counts_are_those_of_the_group():
    """Users judge the traffic and the memory by these."""
    rig = build_rig(num_layers=6)
    train(rig.model)
    stats = rig.engine.stats()
    assert stats.num_gathers == len(rig.gathered)
    assert stats.gathered_bytes == sum(rig.unit[name].layout.total_bytes for name in rig.gathered)
    assert stats.bytes_at_rest * 2 == sum(unit.layout.total_bytes for unit in rig.engine.units)
    assert stats.slot_bytes == 3 * rig.unit["layers.0"].layout.total_bytes + rig.unit["head"].layout.total_bytes
    assert stats.peak_unsharded_bytes == stats.slot_bytes  # six layers pass through three slots
    assert stats.wait_s > 0


def test_equal_histories_have_equal_hashes():
    """A hash that hung on the process would stop a run that is right; one without the order lets a wrong one go on."""
    first, second, other = (build_rig(num_layers=6, prefetch=0) for _ in range(3))
    other.model.order = (5, 4, 3, 2, 1, 0)
    for rig in (first, second, other):
        with torch.no_grad():
            rig.model(make_tokens())
        train(rig.model)
    assert first.group.compared == second.group.compared
    for rig in (first, other):
        assert [(kind, num_gathers) for kind, num_gathers, _ in rig.group.compared] == [(0, 0), (1, 8)]
    assert first.group.compared[1][2] != other.group.compared[1][2]


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
            self.check_slots()
        while self.pending:
            self.backward()
        self.check_gradients()

    def forward(self) -> None:
        """Now and then a layer is skipped, or runs twice, or is checkpointed, or something stands between two."""
        rng = self.rng
        order = [i for i in range(self.num_layers) for _ in range(rng.choice((1,) * 8 + (0, 2)))] or [0]
        tokens, is_apart = make_tokens(rng.randrange(50)), rng.random() < 0.5
        is_checkpointed = torch.is_grad_enabled() and rng.random() < 0.3
        outputs = []
        for model in (self.rig.plain, self.rig.model):
            model.order, model.is_apart, model.is_checkpointed = order, is_apart, is_checkpointed
            outputs.append(model(tokens))
        assert torch.equal(*outputs)
        if outputs[0].requires_grad:
            self.pending.append((outputs[0].square().sum(), outputs[1].square().sum()))

    def backward(self) -> None:
        if self.pending:
            for loss in self.pending.pop(self.rng.randrange(len(self.pending))):
                loss.backward()

    def train(self) -> None:
        self.forward()
        self.backward()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward()

    def fail(self) -> None:
        self.check_gradients()
        layer, where = self.rng.randrange(self.num_layers), self.rng.choice(("forward", "backward"))
        for model in (self.rig.plain, self.rig.model):
            model.order = list(range(self.num_layers))
            interrupt(model, layer, where)
        self.evaluate()

    def check_gradients(self) -> None:
        found, expected = (
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            for model in (self.rig.model, self.rig.plain)
        )
        assert find_differences(found, expected) == []
        for model in (self.rig.plain, self.rig.model):
            model.zero_grad()

    def check_slots(self) -> None:
        for unit in self.rig.engine.units:
            assert (unit.slot is None) == (unit.state is State.SHARDED)
        owners = [slot.owner for slot in self.rig.engine.pool if slot.owner is not None]
        assert len(owners) == len(set(owners)) and all(owner.slot.owner is owner for owner in owners)


@pytest.mark.parametrize("first_seed", range(0, 60, 10))
def test_any_history_of_passes_gives_the_gradients_of_a_plain_model(first_seed):
    """Hand-written cases miss the order that breaks: a late backward, after an evaluation, after an exception."""
    for seed in range(first_seed, first_seed + 10):
        try:
            Story(seed).run()
        except BaseException as error:
            error.add_note(f"in the story of seed {seed}")
            raise


@pytest.mark.parametrize("is_apart", (False, True))
def test_a_step_is_right_after_one_that_was_cut_short_anywhere(is_apart):
    """A unit left whole or a gather left in flight would spoil the step after a Ctrl-C in a notebook."""
    for prefetch in (0, 1, 2):
        for layer in range(5):
            for where in ("forward", "backward"):
                rig = build_rig(num_layers=5, prefetch=prefetch)
                rig.model.is_apart = rig.plain.is_apart = is_apart
                interrupt(rig.model, layer, where)
                assert compare(rig, train) == []


def interrupt_gather(rig: Rig, number: int) -> None:
    """Run a step in which the start of gather `number` raises."""
    all_gather = rig.group.all_gather

    def interrupted(whole, shard):
        if rig.group.num_gathers == number:
            raise KeyboardInterrupt
        return all_gather(whole, shard)

    rig.group.all_gather = interrupted
    with pytest.raises(KeyboardInterrupt):
        train(rig.model)
    rig.group.all_gather = all_gather
    rig.model.zero_grad()


def test_a_step_is_right_after_a_gather_that_was_cut_short():
    """The unit then has a slot that nobody fills: it must be given back."""
    for number in range(9):
        rig = build_rig(num_layers=5)
        interrupt_gather(rig, number)
        for _ in range(3):
            assert compare(rig, train) == []


def test_a_step_is_right_after_a_gather_that_was_cut_short_between_two_units():
    """As above, where something stands between two layers: one is given back before the next is gathered."""
    rig = build_rig(num_layers=6, prefetch=0)
    rig.model.is_apart = rig.plain.is_apart = True
    interrupt_gather(rig, number=9)
    for _ in range(3):
        assert compare(rig, train) == []


def test_a_backward_is_right_after_another_that_was_cut_short():
    """A unit left whole by the first takes a slot from the second, which has none to spare without prefetch."""
    rig = build_rig(num_layers=6, prefetch=0)
    losses = [model(make_tokens()).square().sum() for model in (rig.plain, rig.model)]
    interrupt(rig.model, 3, "backward")
    for loss in losses:
        loss.backward()
    assert find_differences(take_gradients(rig.model), take_gradients(rig.plain)) == []


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
    assert compare(rig, train) == []


def test_only_steps_of_the_own_adapter_are_compared():
    """Another model's optimizer may step on some ranks alone: to compare ranks there would hang them."""
    rig = build_rig(num_layers=2)
    train(rig.model)
    adapter = [parameter for parameter in rig.model.parameters() if parameter.requires_grad]
    stranger = nn.Parameter(torch.ones(1))
    for parameters, num_compared in (([stranger], 0), ([stranger, adapter[0]], 1), (adapter, 1)):
        rig.group.compared.clear()
        torch.optim.SGD(parameters, lr=0.1).step()
        assert len(rig.group.compared) == num_compared


def test_a_dropped_engine_leaves_no_hook_behind():
    """Every optimizer of the process would run it, for every model that was ever sharded."""
    before = set(_global_optimizer_pre_hooks)
    rig = build_rig(num_layers=2)
    train(rig.model)
    own = set(_global_optimizer_pre_hooks) - before
    assert len(own) == 1
    del rig
    gc.collect()
    assert not own & set(_global_optimizer_pre_hooks)
