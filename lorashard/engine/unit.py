"""One unit: what is gathered at once, and the modules that read it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import record_function

from ..runtime.dist import Work
from .home import Home
from .layout import Field, Layout
from .packed import Packed, PackedWeight, Packing, Workspace
from .placeholder import Placeholder
from .slots import Slot, own_version
from .streams import SideStream


class State(enum.Enum):
    """What memory exists for a unit, and who may read it."""

    SHARDED = "only the shard; the modules hold placeholders"
    UNSHARDING = "a slot is being filled; the modules hold placeholders"
    UNSHARDED = "whole in a slot; the modules hold views of it"
    IDLE = "whole in a slot that may be taken at any time; the modules hold placeholders"


@dataclass(frozen=True)
class Owner:
    """A place that a weight is read from: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str


@dataclass
class Weight:
    """A frozen tensor of the base and every place that reads it (tied weights have several).

    Args:
        packing: how it rests, if not as it is computed with: then several fields of the layout are its parts.
    """

    placeholder: Placeholder
    owners: list[Owner]
    packing: Packing | None = None


class Unit:
    """A decoder layer, the embedding, or the final norm with the LM head.

    A resident unit rests whole where it is computed with: it is UNSHARDED for the whole run and never has a slot.

    Memory: its home's at rest; one slot (`layout.total_bytes`) while not SHARDED.
    """

    def __init__(
        self,
        name: str,
        index: int,
        size_class: str,
        weights: Sequence[Weight],
        home: Home,
        workspace: Workspace | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.size_class = size_class
        self.weights = weights
        self.home = home
        self.workspace = workspace or Workspace()
        self.state = State.SHARDED
        self.slot: Slot | None = None
        self.has_backward_below = False  # whether a backward goes on to the units before this one
        self._work: Work | None = None
        views = home.views()
        self.is_resident = views is not None
        if views is not None:
            self._put(self._bind([own_version(view) for view in views]))
            self.state = State.UNSHARDED
        else:
            self._put([weight.placeholder for weight in weights])

    @property
    def layout(self) -> Layout:
        return self.home.layout

    def unshard(self, slot: Slot, stream: SideStream) -> None:
        """Start gathering this unit's weights into `slot`; return before they have arrived.

        Ranks: collective over the shard group where the home is: every rank of it must unshard the same units in the
            same order.
        Memory: takes `slot` until `evict`.
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
        self._put(self._bind([self._view(self.slot, field) for field in self.layout.fields]))
        self.state = State.UNSHARDED

    def reshard(self, stream: SideStream) -> None:
        """Take the weights out of the modules; the slot keeps the bytes until another unit needs it.

        The base never changes, so a slot's bytes never go stale: coming back before they are evicted is free.

        Ranks: local.
        """
        if self.state is State.UNSHARDED and self.slot is not None:
            self._put([weight.placeholder for weight in self.weights])
            self.slot.readers_done = stream.mark()
            self.state = State.IDLE

    def evict(self, stream: SideStream) -> Slot:
        """Give the slot back and return it.

        Ranks: local; a gather that is still in flight is waited for.
        """
        assert self.slot is not None and self.state in (State.IDLE, State.UNSHARDING)
        is_arriving = self.state is State.UNSHARDING
        self._settle(stream)
        if is_arriving:  # nobody has read the slot, but its next filling must not overtake this one
            self.slot.readers_done = stream.mark()
        self.slot.check_not_held()
        slot, self.slot = self.slot, None
        slot.owner = None
        self.state = State.SHARDED
        return slot

    def abandon(self, stream: SideStream) -> None:
        """Return to SHARDED from any state, whoever still views the slot: after an exception."""
        if self.slot is not None:
            self._settle(stream)
            self._put([weight.placeholder for weight in self.weights])
            self.slot.readers_done = stream.mark()
            self.slot.owner, self.slot = None, None
            self.state = State.SHARDED

    def write(self, number: int, value: torch.Tensor) -> None:
        """Let the weight `number` have other numbers where it rests; no slot holds the old ones.

        Ranks: local.
        """
        assert self.slot is None and self.weights[number].packing is None
        data = value.detach().to("cpu", self.weights[number].placeholder.dtype).contiguous().view(-1).view(torch.uint8)
        self.home.write(self._fields_of(number)[0], data)

    def _fields_of(self, number: int) -> Sequence[Field]:
        begin = sum(_count_parts(weight) for weight in self.weights[:number])
        return self.layout.fields[begin : begin + _count_parts(self.weights[number])]

    def _settle(self, stream: SideStream) -> None:
        if self._work is not None:
            with _named_range(f"wait for {self.name}"):
                stream.wait(self._work)
            self._work = None

    def packed(self, number: int) -> Packed:
        """Return the packed weight `number` of this unit, which is whole in its slot."""
        assert self.slot is not None
        return self._pack(number, [self._view(self.slot, field) for field in self._fields_of(number)])

    def _bind(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the modules hold, given the tensors of the layout's fields."""
        bound: list[torch.Tensor] = []
        begin = 0
        for number, weight in enumerate(self.weights):
            parts = views[begin : begin + _count_parts(weight)]
            begin += len(parts)
            is_packed = weight.packing is not None
            bound.append(self._pack(number, parts) if is_packed else nn.Parameter(parts[0], requires_grad=False))
        return bound

    def _pack(self, number: int, parts: Sequence[torch.Tensor]) -> Packed:
        weight = self.weights[number]
        assert weight.packing is not None
        like = weight.placeholder
        place = None if self.slot is None else (self, number)
        return Packed(
            PackedWeight(like.full_name, tuple(like.shape), like.dtype, weight.packing, parts, self.workspace, place)
        )

    @staticmethod
    def _view(slot: Slot, field: Field) -> torch.Tensor:
        stride = _contiguous_stride(field.shape)
        return slot.view(field.dtype, field.shape, stride, field.begin_byte // field.dtype.itemsize)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        # Swapped in place, never through `.data`: autograd must see a new tensor, not an old one with new numbers.
        for weight, tensor in zip(self.weights, tensors, strict=True):
            for owner in weight.owners:
                owner.module._parameters[owner.attribute] = tensor  # type: ignore[assignment]


def _named_range(name: str) -> AbstractContextManager[object]:
    """Show `name` in torch's profiler, if it is running."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def _count_parts(weight: Weight) -> int:
    return 1 if weight.packing is None else len(weight.packing.parts(weight.placeholder.shape))


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
