"""Gathers of a sharded stack: how many, into which slots, in which order; and what an engine leaves behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Sequence

import pytest
import torch
from helpers.engine import CPU, Rig, Stack, StandInGroup, build_rig, build_unit, make_tokens, train
from torch import nn

from lorashard.engine import Engine, ScheduleEntry, State
from lorashard.engine.slots import Slot
from lorashard.engine.streams import SideStream

# -- gathers -----------------------------------------------------------------------------------------------------------


def count_fewest_gathers(stops: Sequence[int], num_slots: int) -> int:
    """Return how often a unit must be gathered at least to visit `stops` one after the other, by trying every choice of
    whom to give up."""

    @functools.cache
    def fewest(index: int, held: frozenset[int]) -> int:
        if index == len(stops):
            return 0
        if stops[index] in held:
            return fewest(index + 1, held)
        if len(held) < num_slots:
            return 1 + fewest(index + 1, held | {stops[index]})
        return 1 + min(fewest(index + 1, held - {victim} | {stops[index]}) for victim in held)

    return fewest(0, frozenset())


@pytest.mark.parametrize(
    ("passes", "prefetch"),
    (
        *itertools.product(("train", "train train train"), (0, 1, 2)),
        # Without prefetch, which takes a slot for the layer after the one that computes.
        ("eval eval train", 0),
        ("train eval train eval", 0),
    ),
)
def test_no_choice_of_victims_needs_fewer_gathers(passes, prefetch):
    """The order of visits is known: a gather that the best choices do not need is paid for in each step."""
    for num_layers in range(1, 7):
        rig = build_rig(num_layers, prefetch=prefetch)
        stops: list[int] = []
        for one in passes.split():
            if one == "train":
                stops += [*range(num_layers), *reversed(range(num_layers))]
                train(rig.model)
            else:
                stops += range(num_layers)
                with torch.no_grad():
                    rig.model(make_tokens())
        found = [name for name in rig.gathered if name.startswith("layers.")]
        assert len(found) == count_fewest_gathers(stops, 2 + prefetch), num_layers


def test_a_prefetch_that_finds_no_slot_is_skipped():
    """The embedding and the head share a slot: reaching for the head while the embedding computes must do no harm."""
    rig = build_rig(num_layers=2, prefetch=5)
    seen = []
    rig.model.embedding.register_forward_pre_hook(lambda *args: seen.append((rig.unsharded, rig.arriving)))
    assert rig.find_differences(train) == []
    assert seen == [(["embedding"], ["layers.0", "layers.1"])]  # and not the head
    assert rig.gathered[:4] == ["embedding", "layers.0", "layers.1", "head"]


class Wrapped(Stack):
    """Layers get and give what they compute inside of other things."""

    def run(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return layer(None, [{"frozen": torch.ones(1), "hidden": (hidden,)}], scale=2)[1]["hidden"]


class Unwrapping(nn.Module):
    """A layer that is called as `Wrapped` does it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, nothing: None, values: list[dict], scale: int) -> tuple:
        return torch.ones(1), {"text": "a", "hidden": self.layer(values[0]["hidden"][0])}


class WrappedStack(Wrapped):
    def __init__(self, num_layers: int, is_tied: bool = False) -> None:
        super().__init__(num_layers, is_tied=is_tied)
        self.layers = nn.ModuleList(Unwrapping(layer) for layer in self.layers)


@pytest.mark.parametrize("prefetch", (0, 1))
def test_tensors_inside_of_other_arguments_are_found(prefetch):
    """A unit whose entry is overlooked is released late, one whose exit is overlooked is gathered late."""
    plain, wrapped = (build_rig(6, prefetch=prefetch, stack=stack) for stack in (Stack, WrappedStack))
    arriving: dict[str, list] = {"plain": [], "wrapped": []}
    for name, rig in (("plain", plain), ("wrapped", wrapped)):
        for layer in rig.model.layers:
            inner = getattr(layer, "layer", layer)
            inner.lora_b.register_full_backward_hook(
                lambda *args, rig=rig, seen=arriving[name]: seen.append((rig.unsharded, rig.arriving))
            )
        assert rig.find_differences(train) == []
    assert wrapped.gathered == plain.gathered and arriving["wrapped"] == arriving["plain"]


def live_through(order: Sequence[int] | None = None) -> Rig:
    rig = build_rig(num_layers=6, is_tied=True, prefetch=0)
    rig.model.order = order
    for is_training in (True, False, True, True, False):
        with torch.set_grad_enabled(is_training):
            logits = rig.model(make_tokens())
        if is_training:
            logits.sum().backward()
    return rig


def test_ranks_choose_alike_and_are_distinguished_by_what_they_gathered():
    """Ranks choose alone: a choice that hung on an address or a set's order would give them different gathers; and a
    comparison without the gathers' order would let ranks continue that read each other's units."""
    first, second, other = live_through(), live_through(), live_through((5, 4, 3, 2, 1, 0))
    assert first.gathered == second.gathered and first.group.compared == second.group.compared
    kinds = [kind for kind, *_ in first.group.compared]
    assert kinds == [1, 0, 1, 1, 0] and len(first.gathered) > 6
    first_counts, other_counts = ([compared[1] for compared in rig.group.compared[:2]] for rig in (first, other))
    assert first_counts == other_counts and first.group.compared[1] != other.group.compared[1]


class WatchedStream(SideStream):
    """Returns numbers for events, and remembers behind which one each gather was put."""

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
    group, stream = StandInGroup(), WatchedStream()
    first, second = (build_unit(f"layers.{i}", [nn.Linear(5, 3).requires_grad_(False)], group, i) for i in range(2))
    slot = Slot(first.layout.total_bytes, CPU)
    for number_of_readers, unit in enumerate((first, second, first)):
        unit.unshard(slot, stream)
        assert stream.waited_for[-1] == (number_of_readers or None)
        unit.wait(stream)
        unit.release(stream)
        unit.reshard(stream)
    for give_back in (first.abandon, first.reshard):  # before it has arrived
        first.unshard(slot, stream)
        give_back(stream)
    second.unshard(slot, stream)
    assert stream.waited_for[-3:] == [3, 4, 5]


# -- what it costs, and what it leaves behind --------------------------------------------------------------------------


def test_units_pass_through_their_states():
    """A unit that stays UNSHARDED after a pass would pin a slot and starve the next one."""
    rig = build_rig(num_layers=6)
    states = [{unit.state for unit in rig.engine.units}]
    during: set = set()
    rig.model.layers[3].lora_b.register_full_backward_hook(
        lambda *args: during.update((unit.name, unit.state) for unit in rig.engine.units)
    )
    loss = rig.model(make_tokens()).sum()
    states.append({unit.state for unit in rig.engine.units})
    loss.backward()
    states.append({unit.state for unit in rig.engine.units})
    resting = {State.SHARDED, State.CACHED}
    # The embedding is on its way for the next forward.
    assert states == [{State.SHARDED}, resting, resting | {State.UNSHARDING}]
    assert ("layers.3", State.UNSHARDED) in during and ("layers.0", State.SHARDED) in during


def test_the_counts_are_those_of_the_group():
    """Users judge the traffic and the memory by these."""
    rig = build_rig(num_layers=6)
    train(rig.model)
    stats, sizes = rig.engine.stats(), {unit.name: unit.layout.total_bytes for unit in rig.engine.units}
    assert stats.num_gathers == len(rig.gathered)
    assert stats.gathered_bytes == sum(sizes[name] for name in rig.gathered)
    assert stats.bytes_at_rest * 2 == sum(sizes.values())
    assert stats.slot_bytes == 3 * sizes["layers.0"] + sizes["head"]
    assert stats.peak_unsharded_bytes == stats.slot_bytes  # six layers pass through three slots
    assert stats.wait_s > 0


def test_slots_are_as_large_as_the_largest_unit_of_their_class():
    """A slot sized for the average would overflow; one sized for the head, for every layer, would waste the memory;
    and a model of two layers needs no third slot."""
    for widths, prefetch, num_slots in (((4, 16, 8), 0, 2), ((4, 16), 3, 2)):
        group = StandInGroup()
        modules = [nn.Linear(width, width).requires_grad_(False) for width in (*widths, 100)]
        classes = ["layer"] * len(widths) + ["vocabulary"]
        units = [build_unit(str(i), [m], group, i, c) for i, (m, c) in enumerate(zip(modules, classes, strict=True))]
        visits = [ScheduleEntry(unit, (module,)) for unit, module in zip(units, modules, strict=True)]
        engine = Engine(visits, [nn.Sequential(*modules)], group, CPU, prefetch)
        stats, sizes = engine.stats(), [unit.layout.total_bytes for unit in units]
        assert (stats.num_slots, stats.slot_bytes) == (num_slots + 1, num_slots * max(sizes[:-1]) + sizes[-1])


def test_one_rank_gathers_and_copies_nothing():
    """Alone, a rank holds the unsharded unit: weights are views of the shard, for the whole run."""
    rig = build_rig(num_layers=3, size=1)
    shards = {unit.home.shard.data_ptr() for unit in rig.engine.units}
    for _ in range(2):
        frozen = [parameter for parameter in rig.model.parameters() if not parameter.requires_grad]
        assert {parameter.untyped_storage().data_ptr() for parameter in frozen} == shards
        assert rig.find_differences(train) == []
    stats = rig.engine.stats()
    assert (stats.num_gathers, stats.num_slots, rig.group.compared) == (0, 0, [])


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


def list_called_files() -> set[str]:
    """Return the files of all code that a step of some optimizer runs."""
    optimizer, files = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), set()
    sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename))
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return files


def test_a_dropped_engine_leaves_no_hook_behind():
    """Every optimizer of the process would run it, for every model that was ever sharded."""
    rig = build_rig(num_layers=2)
    train(rig.model)
    file = sys.modules[Engine.__module__].__file__
    assert file in list_called_files()
    del rig
    gc.collect()
    assert file not in list_called_files()
