"""How autograd meets a slot: it saves handles, never slot tensors.

Note [Saved handles]
    A Linear needs its weight for the gradient of its input, so autograd saves it. A slot's bytes are overwritten by
    the next unit, so what is saved for a tensor in a slot is where it sits in its unit; backward gets a view of the
    slot that the unit is in by then, gathered again if need be.

Note [Innermost hooks win]
    Saved-tensor hooks do not stack: torch calls the innermost pair alone. So ours are put around the whole model call,
    where those of activation checkpointing, which are placed inside around a layer, still win; and whatever pair is
    already there when we enter (activation offloading, save_on_cpu) gets every tensor that is not in a slot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .placeholder import FrozenWeight
from .slots import SlotPool, StridedPlace
from .unit import Unit

_Pack = Callable[[torch.Tensor], Any]
_Unpack = Callable[[Any], torch.Tensor]


class Handle(NamedTuple):
    """Where a saved tensor sits in its unit's buffer."""

    unit: Unit
    place: StridedPlace

    def find(self) -> torch.Tensor:
        """Return the tensor; its unit is unsharded."""
        assert self.unit.slot is not None
        return self.unit.slot.view_strided(self.place)

    def copy(self) -> torch.Tensor:
        """Return the tensor's values in memory of their own; its unit is unsharded."""
        return self.find().clone()


class WeightHandle(NamedTuple):
    """Which weight of a unit a saved `FrozenWeight` stands for, and the views that were taken of it."""

    unit: Unit
    place: int
    views: tuple[Any, ...]

    def find(self) -> FrozenWeight:
        """Return the tensor; its unit is unsharded."""
        return self.unit.bind(self.place).viewed(self.views)

    def copy(self) -> torch.Tensor:
        """Return the tensor's values in memory of their own; its unit is unsharded."""
        return self.find().read("a look at the graph")


class _Outer(NamedTuple):
    """What the pair of hooks around ours made of a tensor."""

    packed: Any


@contextlib.contextmanager
def saved_handles(pool: SlotPool[Unit], restore: Callable[[Handle | WeightHandle], torch.Tensor]) -> Iterator[None]:
    """While the body runs, save handles for tensors in `pool`; `restore` turns one back into a tensor.

    See [Saved handles] and [Innermost hooks win].

    Memory: none of the base is kept by autograd.
    """
    outer: tuple[_Pack, _Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    find = pool.find

    def pack(tensor: torch.Tensor) -> Any:
        has_gradient = tensor.requires_grad
        is_activation = has_gradient and not tensor._is_view()  # the base is frozen
        slot = None if is_activation else find(tensor)
        if slot is not None and slot.owner is not None:
            return Handle(slot.owner, (tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())))
        if isinstance(tensor, FrozenWeight):
            return (tensor, 0) if tensor.place is None else WeightHandle(*tensor.place, tensor.views)
        if outer is not None:
            return _Outer(outer[0](tensor))
        # Detached: a node that kept its own output would be a cycle that nothing collects. With its version: hooks
        # switch torch's own check for in-place changes off.
        return (tensor.detach() if has_gradient else tensor), tensor._version

    def unpack(packed: Any) -> torch.Tensor:
        kind = type(packed)
        if kind is tuple:
            tensor, version = packed
            if tensor._version == version:
                return tensor
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(tensor.shape)} {tensor.dtype} is at version {tensor._version}; expected version {version} "
                "instead"
            )
        if kind is _Outer:
            assert outer is not None
            return outer[1](packed.packed)
        return restore(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def is_in_backward() -> bool:
    """Tell whether a backward is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def first_differentiable(values: Any) -> torch.Tensor | None:
    """Return the first tensor that requires a gradient in nested tuples, lists and dicts, or None."""
    if isinstance(values, torch.Tensor):
        return values if values.requires_grad else None
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    for value in values:
        found = first_differentiable(value)
        if found is not None:
            return found
    return None
