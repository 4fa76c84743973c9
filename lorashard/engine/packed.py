"""A weight that rests in fewer bytes than it is computed with, and becomes numbers only inside of an operation.

Note [Packed weights and autograd]
    A module holds a `Packed` where an unquantized base has a parameter: true name, shape, dtype and device, and no
    storage of its own, only views of the slot that its bytes are in. torch's dispatcher calls it below autograd, so
    what autograd saves is the `Packed`, never the numbers: the saved-tensor hooks make a handle of it like of any
    other tensor in a slot, and backward unpacks it anew. The numbers exist in a workspace for the time of one
    operation. Views (the transposed weight of a Linear, one expert's of many) are remembered and applied when it is
    unpacked, so the operations that run, forward and backward, are those of plain weights, bit for bit.

    The idea of a tensor subclass that unpacks on use is torchao's (`NF4Tensor`); bitsandbytes' own `MatMul4Bit` keeps
    the packed weight on `ctx`, which no hook sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from ..errors import ShardError
from .stand_in import StandIn, refuse_writes


@dataclass(frozen=True)
class Part:
    """One of the tensors that together keep a weight.

    Attributes:
        name: what it is; empty for the numbers themselves.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Packing(Protocol):
    """How a weight's numbers are kept in fewer bytes.

    Attributes:
        name: as the option calls it.
    """

    name: str

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        """Return the tensors that keep a weight of `shape`: first the numbers, then what scales them."""
        ...

    def unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the numbers to `out`, a contiguous tensor of the weight's shape in the dtype of the computation."""
        ...

    def select(self, parts: Sequence[torch.Tensor], shape: Sequence[int], index: int) -> list[torch.Tensor] | None:
        """Return the parts of `weight[index]`, views of these; None where its blocks are not its own."""
        ...


class Workspace:
    """The memory that weights are unpacked to, reused by one operation after another.

    Memory: the largest weight, or the largest expert that was asked for by itself, in the dtype of the computation; as
        many times as one operation reads packed weights, which is once.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """The bytes that are held."""
        return sum(buffer.numel() for buffer in self._buffers)

    @torch.inference_mode(False)  # a tensor made in that mode could not be written outside of it
    def take(self, index: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory for the packed weight number `index` of an operation; what was there before is lost."""
        num_bytes = math.prod(shape) * dtype.itemsize
        while len(self._buffers) <= index:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=device))
        if self._buffers[index].numel() < num_bytes:
            self._buffers[index] = torch.empty(0, dtype=torch.uint8, device=device)  # first the old one goes
            self._buffers[index] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._buffers[index][:num_bytes].view(dtype).view(tuple(shape))

    def holds(self, tensor: object) -> bool:
        """Tell whether something is a tensor that lives in this memory."""
        if type(tensor) is not torch.Tensor or not torch._C._has_storage(tensor):
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(buffer.untyped_storage().data_ptr() == address for buffer in self._buffers if buffer.numel())


@dataclass(frozen=True)
class View:
    """A view that is taken of the numbers once they are there."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class PackedWeight:
    """What a `Packed` stands for.

    Attributes:
        name: the parameter's.
        shape: of the whole weight.
        dtype: of the computation.
        parts: the tensors that keep it, as `packing` wants them.
        place: of a weight in a slot, its unit and its number there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    packing: Packing
    parts: Sequence[torch.Tensor]
    workspace: Workspace
    place: tuple[Any, int] | None = None

    @property
    def device(self) -> torch.device:
        return self.parts[0].device


class Packed(StandIn):
    """A quantized parameter, or a view of one; see [Packed weights and autograd].

    Memory: none; its numbers, for the time of an operation that reads them, in the workspace.
    """

    weight: PackedWeight
    views: tuple[View, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, weight: PackedWeight, views: tuple[View, ...] = ()) -> Packed:
        like = _apply(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), views)
        return cls._make(weight, views, like.shape, like.stride())

    @classmethod
    def _make(cls, weight: PackedWeight, views: tuple[View, ...], size: Sequence[int], stride: Sequence[int]) -> Packed:
        if torch.is_inference_mode_enabled():  # made there, it could be neither detached nor saved for a backward
            with torch.inference_mode(False):
                return cls._make(weight, views, size, stride)
        self = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=weight.dtype, device=weight.device, requires_grad=False
        )
        self.weight = weight
        self.views = views
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Packed):
            if (twin := first.answer(func, kwargs)) is not None:
                return twin
            if func is torch.ops.aten.set_.source_Tensor and first.is_same(args[1]):
                return first  # torch's parametrizations set a parameter to itself
            if func is torch.ops.aten.t.default and first.dim() == 2:  # a Linear's, spared the detour below
                size, stride = first.shape[::-1], first.stride()[::-1]
                return cls._make(first.weight, (*first.views, View(func, ())), size, stride)
            if func in _SPLITS and not kwargs:
                return [view.function(first, *view.arguments) for view in _SPLITS[func](first, *args[1:])]
            if func in _VIEWS and not kwargs:
                view = View(func, tuple(args[1:]))
                like = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
                like = func(like, *view.arguments)
                return cls._make(first.weight, (*first.views, view), like.shape, like.stride())
        refuse_writes(func, args, kwargs)
        workspaces: list[Workspace] = []

        def unpack(value: Any) -> Any:
            if not isinstance(value, Packed):
                return value
            workspaces.append(value.weight.workspace)
            return value._unpack(len(workspaces) - 1)

        def keep(value: Any) -> Any:
            # What an operation returns outlives it, and the workspace's next weight must not appear there.
            return value.clone() if any(workspace.holds(value) for workspace in workspaces) else value

        plain_args = [_map(unpack, value) for value in args]
        plain_kwargs = {name: _map(unpack, value) for name, value in kwargs.items()}
        return _map(keep, func(*plain_args, **plain_kwargs))

    def _unpack(self, index: int) -> torch.Tensor:
        weight, views = self.weight, self.views
        parts: Sequence[torch.Tensor] = weight.parts
        shape = weight.shape
        if views and views[0].function is torch.ops.aten.select.int and views[0].arguments[0] == 0:
            number = views[0].arguments[1]
            selected = weight.packing.select(parts, shape, number % shape[0])
            if selected is not None:
                parts, shape, views = selected, shape[1:], views[1:]
        out = weight.workspace.take(index, shape, weight.dtype, weight.device)
        weight.packing.unpack(parts, out)
        return _apply(out, views)

    def unpack(self) -> torch.Tensor:
        """Return the numbers, in memory of their own."""
        return self._unpack(0).clone()

    def viewed(self, views: tuple[View, ...]) -> Packed:
        """Return views of this."""
        return Packed(self.weight, (*self.views, *views))

    def is_same(self, other: object) -> bool:
        return isinstance(other, Packed) and other.weight is self.weight and other.views == self.views

    def twin(self) -> Packed:
        return Packed._make(self.weight, self.views, self.shape, self.stride())

    def read(self, what: str) -> torch.Tensor:
        return self.unpack()

    def refusal(self, what: str) -> ShardError:
        weight = self.weight
        return ShardError(
            f"base weight '{weight.name}' is quantized ({weight.packing.name}) and was {what}: it is read-only. Save "
            "adapters with save_pretrained; merge a saved one with `lorashard merge`; load with quantization='none' "
            "to change the base"
        )

    def data_ptr(self) -> int:
        raise ShardError(
            f"base weight '{self.weight.name}' is quantized ({self.weight.packing.name}) and has no address: a kernel "
            "that reads memory by itself cannot read it. Switch that kernel off, or load with quantization='none'"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        weight = self.weight
        return f"Packed({weight.name}, {weight.packing.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


_VIEWS = {
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten._unsafe_view.default,
}


def _unbind(tensor: torch.Tensor, dim: int = 0) -> list[View]:
    return [View(torch.ops.aten.select.int, (dim, index)) for index in range(tensor.shape[dim])]


def _split(tensor: torch.Tensor, size: int | Sequence[int], dim: int = 0) -> list[View]:
    length = tensor.shape[dim]
    if isinstance(size, int):
        begins = list(range(0, length, size)) if length else [0]
        ends = [min(begin + size, length) for begin in begins]
    else:
        ends = list(accumulate(size))
        begins = [0, *ends[:-1]]
    return [View(torch.ops.aten.slice.Tensor, (dim, *span)) for span in zip(begins, ends, strict=True)]


# What returns several views at once, as the views that these are.
_SPLITS: dict[Any, Callable[..., list[View]]] = {
    torch.ops.aten.unbind.int: _unbind,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.split_with_sizes.default: _split,
}


def _apply(tensor: torch.Tensor, views: Sequence[View]) -> torch.Tensor:
    for view in views:
        tensor = view.function(tensor, *view.arguments)
    return tensor


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        return torch.utils._pytree.tree_map(function, value)
    return function(value)
