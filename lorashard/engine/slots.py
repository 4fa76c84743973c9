"""The fixed pool of device buffers that unsharded units occupy."""

from __future__ import annotations

import gc
import operator
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from ..errors import ShardError
from .layout import Field, Layout
from .queues import Event, on_device

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Mapped over a unit's weights at each reshard: a call in Python for each would take longer than all else there.
_USE_COUNT = torch.Tensor._use_count  # type: ignore[attr-defined]
_ADDRESS = torch.Tensor.data_ptr
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
# Of a tensor in a buffer: dtype, shape, stride, and offset, the last two in elements.
StridedPlace = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
_MAX_VIEWS = 64  # that a slot keeps: code may slice its weights by what the data are


class SlotUser(Protocol):
    """What takes a slot: a unit."""

    @property
    def name(self) -> str: ...

    @property
    def size_class(self) -> str: ...

    @property
    def layout(self) -> Layout: ...


OwnerT = TypeVar("OwnerT", bound=SlotUser)


def own_version(view: torch.Tensor) -> torch.Tensor:
    """Return the same view with a version of its own.

    Views of one buffer share theirs: an operation in place on one weight would look to autograd like one on every
    weight of the buffer. PEFT parametrizes experts, and torch then sets the parameter to itself, which is such a one.
    """
    return view.data


class _Bound(NamedTuple):
    """What modules hold for one owner: the tensors as they were made, and the references to them then."""

    tensors: Sequence[torch.Tensor]
    addresses: list[int]
    quiet_count: int


_NOTHING = _Bound((), [], 0)


class Slot(Generic[OwnerT]):
    """One preallocated buffer, and the unit whose bytes it holds.

    Note [Nobody else holds a slot]
        A tensor that views a slot and outlives its unit would silently read another unit's bytes: a weight that a
        custom autograd Function stashed on `ctx`, say. torch counts the references to a storage, so before a slot is
        reused the count must be back to what it was when the slot was made. Collectives write through `wire`, the
        same memory under another storage, because a backend's own threads drop their references when they like.

        A slot keeps what modules hold for each unit that has been in it (`bind`), and what backward reads
        (`view_strided`), so that nothing is made again in the loop. These tensors are counted in, and the references to
        each object must be back as well.

    Memory: `num_bytes` on the device, for the life of the pool.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self.owner: OwnerT | None = None
        self.readers_done: Event | None = None
        self._allocate()

    @torch.inference_mode(False)  # a tensor made in that mode could never be saved for a backward
    def _allocate(self) -> None:
        self.buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        with on_device(self._device):  # torch exports no tensor of another GPU than the current one
            self.wire = torch.from_dlpack(self.buffer)
        self._storage = self.buffer.untyped_storage()
        self._bound: dict[OwnerT | None, _Bound] = {}
        self._views: dict[StridedPlace, torch.Tensor] = {}
        self._quiet_views = 0  # references to those
        self._quiet_count = self._count_references()

    @property
    def address(self) -> int:
        return self._storage.data_ptr()

    def _count_references(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def bind(self, owner: OwnerT, make: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Return the tensors that modules hold for `owner` while it is in this slot: `make` is asked for them once.

        Args:
            make: returns plain tensors, each of which views the slot once.

        Memory: the tensors' objects, about a kilobyte each; their bytes are the slot's.
        """
        if owner not in self._bound:
            with torch.inference_mode(False):  # they outlive that mode, and are saved for a backward
                tensors = make()
            self._quiet_count += len(tensors)
            self._bound[owner] = _Bound(tensors, [*map(_ADDRESS, tensors)], _count_objects(tensors))
        return self._bound[owner].tensors

    def _forget_changed(self) -> None:
        """Drop what is kept for the owner if somebody has changed it: the next pass is to find what was made."""
        bound = self._bound.get(self.owner, _NOTHING)
        is_elsewhere = [*map(_ADDRESS, bound.tensors)] != bound.addresses
        if is_elsewhere or any(map(_REQUIRES_GRAD, bound.tensors)) or any(map(vars, bound.tensors)):
            del self._bound[self.owner]
            self._quiet_count -= len(bound.tensors)

    def view(self, field: Field) -> torch.Tensor:
        """Return the tensor whose bytes are `field` of the unit that this slot holds."""
        return own_version(field.view_in(self.buffer))

    def view_strided(self, place: StridedPlace) -> torch.Tensor:
        """Return a tensor over this slot's bytes."""
        view = self._views.get(place)
        if view is None:
            dtype, shape, stride, offset = place
            with torch.inference_mode(False):
                view = own_version(self.buffer.view(dtype).as_strided(shape, stride, offset))
            if len(self._views) < _MAX_VIEWS:
                self._views[place] = view
                self._quiet_count += 1
                self._quiet_views += _QUIET_REFERENCES
        return view

    def is_held(self) -> bool:
        """Tell whether something outside of the engine still views this slot, or has a tensor of its owner's.

        Without an owner, of any that has been here.
        """
        if self._count_references() > self._quiet_count:
            return True
        if _count_objects(self._views.values()) > self._quiet_views:
            return True
        for bound in self._bound.values() if self.owner is None else [self._bound.get(self.owner, _NOTHING)]:
            if _count_objects(bound.tensors) > bound.quiet_count:
                return True
        return False

    def check_not_held(self) -> None:
        """Raise ShardError if a tensor outside of the engine still views this slot. See [Nobody else holds a slot]."""
        self._forget_changed()
        if not self.is_held():
            return
        gc.collect()
        if self.is_held():
            raise ShardError(
                "something still holds a weight although its computation has ended, and would read other weights there "
                "next. A custom autograd Function that keeps a weight on `ctx`, retain_graph=True under activation "
                "checkpointing, or a hook that stores weights does this",
                where=f"unit '{self.owner and self.owner.name}'",
                fix="keep weights with ctx.save_for_backward; load with placement='replicate' if the code cannot be "
                "changed",
            )

    def replace_if_held(self) -> None:
        """Abandon the buffer for a new one if something still views it: only after an exception, never in the loop.

        A traceback that is still alive keeps the weights of the frames in which the exception passed.
        """
        if self.is_held():
            gc.collect()
        if self.is_held():
            self._allocate()


def _count_objects(tensors: Collection[torch.Tensor]) -> int:
    """Count the references to the tensors, in Python and in C++ (what autograd saves without hooks)."""
    return sum(map(sys.getrefcount, tensors)) + sum(map(_USE_COUNT, tensors))


_QUIET_REFERENCES = _count_objects({0: torch.empty(0)}.values())  # to a tensor that only a dict has


class SlotPool(Generic[OwnerT]):
    """Slots in size classes, made once; a unit only ever takes a slot of its own class.

    Memory: `total_bytes` on the device, allocated here and never again.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """Make `{size_class: (num_slots, num_bytes)}`."""
        self._classes: dict[str, list[Slot[OwnerT]]] = {
            name: [Slot(num_bytes, device) for _ in range(num)] for name, (num, num_bytes) in sizes.items()
        }
        self._slots = [slot for slots in self._classes.values() for slot in slots]
        self._order_by_address()

    def __iter__(self) -> Iterator[Slot[OwnerT]]:
        return iter(self._slots)

    def owners(self) -> list[OwnerT]:
        """Return what has a slot: few, where the units are many."""
        return [slot.owner for slot in self._slots if slot.owner is not None]

    @property
    def total_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self)

    def __len__(self) -> int:
        return len(self._slots)

    def of_class(self, size_class: str) -> list[Slot[OwnerT]]:
        return self._classes[size_class]

    def find(self, tensor: torch.Tensor) -> Slot[OwnerT] | None:
        """Return the slot that `tensor` lives in, or None."""
        if type(tensor) not in _PLAIN:  # a subclass need not have a storage of its own
            return None
        try:
            address = tensor.data_ptr() or tensor.untyped_storage().data_ptr()  # a view of no element has none
        except RuntimeError:  # nor has a sparse tensor a storage
            return None
        index = bisect_right(self._begins, address) - 1  # this is asked of all that autograd saves
        return self._by_address[index] if index >= 0 and address < self._ends[index] else None

    def replace_held(self) -> None:
        """Give every slot that an exception left viewed a new buffer."""
        for slot in self:
            slot.replace_if_held()
        self._order_by_address()

    def _order_by_address(self) -> None:
        self._by_address = sorted(self._slots, key=lambda slot: slot.address)
        self._begins = [slot.address for slot in self._by_address]
        self._ends = [slot.address + slot.num_bytes for slot in self._by_address]


def plan_slots(units: Iterable[SlotUser], num_layer_slots: int) -> dict[str, tuple[int, int]]:
    """Return how many slots of which size the units need: `{size_class: (num_slots, num_bytes)}`.

    Layers get `num_layer_slots` (one that computes, those that are prefetched, one that may stay); every other class
    gets one, since its units are visited one at a time.
    """
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for unit in units:
        sizes[unit.size_class] = max(sizes.get(unit.size_class, 0), unit.layout.total_bytes)
        counts[unit.size_class] = counts.get(unit.size_class, 0) + 1
    wanted = {name: num_layer_slots if name == "layer" else 1 for name in sizes}
    return {name: (min(wanted[name], counts[name]), sizes[name]) for name in sizes}
