"""One unit: what is gathered at once, and the modules that read it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.profiler import record_function

from ..runtime.dist import Work
from .home import Home
from .layout import Field, Layout, Part
from .placeholder import FrozenWeight, Placeholder
from .slots import Slot, own_version
from .streams import SideStream

_UNNAMED = nullcontext()


class State(enum.Enum):
    """What memory exists for a unit, and who may read it."""

    SHARDED = "only the shard; the modules hold placeholders"
    UNSHARDING = "a slot is being filled; the modules hold placeholders"
    UNSHARDED = "unsharded in a slot; the modules hold views of it"
    CACHED = "unsharded in a slot that may be taken at any time; the modules hold placeholders"


@dataclass(frozen=True)
class Owner:
    """A place that a weight is read from: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str


class HasBytes(Protocol):
    """Memory that is held beside slots and homes."""

    @property
    def num_bytes(self) -> int: ...


class WeightFormat(Protocol):
    """How a weight is stored, if not as it is computed with: as several fields of the layout, its parts.

    Attributes:
        workspace: what its values are computed in; all weights of a model may share it.
    """

    @property
    def workspace(self) -> HasBytes: ...

    def parts(self, shape: Sequence[int]) -> Sequence[Part]:
        """Return the tensors that keep a weight of `shape`."""
        ...

    def bind(
        self, placeholder: Placeholder, parts: Sequence[torch.Tensor], place: tuple[Unit, int] | None
    ) -> FrozenWeight:
        """Return what modules hold for the weight of `placeholder` while its parts are there.

        Args:
            place: of a weight in a slot, its unit and its index there, which autograd is to save.
        """
        ...


@dataclass
class Weight:
    """A frozen tensor of the base and every place that reads it (tied weights have several)."""

    placeholder: Placeholder
    owners: list[Owner]
    format: WeightFormat | None = None


class Unit:
    """A decoder layer, the embedding, or the final norm with the LM head.

    A resident unit rests unsharded where it is computed with: it is UNSHARDED for the whole run and never has a slot.

    Memory: its home's at rest; one slot (`layout.total_bytes`) while not SHARDED.
    """

    def __init__(self, name: str, index: int, size_class: str, weights: Sequence[Weight], home: Home) -> None:
        self.name = name
        self.index = index
        self.size_class = size_class
        self.weights = weights
        self.home = home
        self.state = State.SHARDED
        self.slot: Slot[Unit] | None = None
        self.has_backward_below = False  # whether backward continues to the units before this one
        self._work: Work | None = None
        self._places: list[tuple[int, dict[str, Any], str]] = [
            (index, owner.module._parameters, owner.attribute)
            for index, weight in enumerate(weights)
            for owner in weight.owners
        ]
        self._placeholders = [weight.placeholder for weight in weights]
        self._has_formats = any(weight.format is not None for weight in weights)
        views = home.views()
        self.is_resident = views is not None
        if views is not None:
            self._put(self._bind_all([own_version(view) for view in views]))
            self.state = State.UNSHARDED
        else:
            self._put(self._placeholders)

    @property
    def layout(self) -> Layout:
        return self.home.layout

    def unshard(self, slot: Slot[Unit], stream: SideStream) -> None:
        """Start gathering this unit's weights into `slot`; return before they have arrived.

        Ranks: collective over the shard group where the home is: every rank of it must unshard the same units in the
            same order.
        Memory: takes `slot` until `reshard`.
        """
        assert self.state is State.SHARDED and slot.owner is None
        self.slot, slot.owner = slot, self
        with stream.after(slot.readers_done), _named_range(f"unshard {self.name}"):
            self._work = self.home.unshard_into(slot.wire)
        self.state = State.UNSHARDING

    def wait(self, stream: SideStream) -> None:
        """Make the computation wait for the gather, and put the weights into the modules.

        Ranks: local; on CPU it blocks until all ranks have issued the gather.
        """
        if self.state is State.UNSHARDED:
            return
        assert self.slot is not None
        self._settle(stream)
        # A `FrozenWeight` has parts of its own, which others may hold: only plain tensors are kept.
        self._put(self._bind_slot() if self._has_formats else self.slot.bind(self, self._bind_slot))
        self.state = State.UNSHARDED

    def release(self, stream: SideStream) -> None:
        """Take the weights out of the modules; the slot keeps the bytes until another unit needs it.

        The base never changes, so a slot's bytes never go stale: to unshard it again before `reshard` is free.

        Ranks: local.
        """
        if self.state is State.UNSHARDED and self.slot is not None:
            self._put(self._placeholders)
            self.slot.readers_done = stream.mark()
            self.state = State.CACHED

    def reshard(self, stream: SideStream) -> Slot[Unit]:
        """Free the slot and return it.

        Ranks: local; a gather that is still in flight is waited for.
        """
        assert self.slot is not None and self.state in (State.CACHED, State.UNSHARDING)
        if self.state is State.UNSHARDING:
            self._settle(stream)
            # Nobody has read the slot, but its next filling must not overtake this one.
            self.slot.readers_done = stream.mark()
        self.slot.check_not_held()
        slot, self.slot = self.slot, None
        slot.owner = None
        self.state = State.SHARDED
        return slot

    def abandon(self, stream: SideStream) -> None:
        """Return to SHARDED from any state, whoever still views the slot: after an exception.

        Ranks: local; a gather that is still in flight is waited for.
        """
        if self.slot is not None:
            self._settle(stream)
            self._put(self._placeholders)
            self.slot.readers_done = stream.mark()
            self.slot.owner, self.slot = None, None
            self.state = State.SHARDED

    def write(self, index: int, value: torch.Tensor) -> None:
        """Give weight `index` other values where it rests; no slot holds the old ones.

        Ranks: local.
        """
        assert self.slot is None and self.weights[index].format is None
        data = value.detach().to("cpu", self.weights[index].placeholder.dtype).contiguous().view(-1).view(torch.uint8)
        self.home.write(self._fields_of(index)[0], data)

    def bind(self, index: int) -> FrozenWeight:
        """Return what modules hold for weight `index`, which has a format of its own and is unsharded in its slot."""
        assert self.slot is not None
        tensor = self._bind(index, [self.slot.view(field) for field in self._fields_of(index)])
        assert isinstance(tensor, FrozenWeight)
        return tensor

    def _fields_of(self, index: int) -> Sequence[Field]:
        begin = sum(_count_parts(weight) for weight in self.weights[:index])
        return self.layout.fields[begin : begin + _count_parts(self.weights[index])]

    def _settle(self, stream: SideStream) -> None:
        if self._work is not None:
            with _named_range(f"wait for {self.name}"):
                stream.wait(self._work)
            self._work = None

    def _bind_slot(self) -> list[torch.Tensor]:
        assert self.slot is not None
        return self._bind_all([self.slot.view(field) for field in self.layout.fields])

    def _bind_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the modules hold, given the tensors of the layout's fields."""
        rest = iter(tensors)
        return [
            self._bind(index, [next(rest) for _ in range(_count_parts(weight))])
            for index, weight in enumerate(self.weights)
        ]

    def _bind(self, index: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        weight = self.weights[index]
        if weight.format is None:
            return nn.Parameter(parts[0], requires_grad=False)
        return weight.format.bind(weight.placeholder, parts, None if self.slot is None else (self, index))

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        # Swapped in place, never through `.data`: autograd must see another tensor, not an old one with new values.
        for index, parameters, attribute in self._places:
            parameters[attribute] = tensors[index]


def _named_range(name: str) -> AbstractContextManager[object]:
    """Show `name` in torch's profiler, if it is running."""
    return record_function(name) if torch.autograd._profiler_enabled() else _UNNAMED


def _count_parts(weight: Weight) -> int:
    return 1 if weight.format is None else len(weight.format.parts(weight.placeholder.shape))
