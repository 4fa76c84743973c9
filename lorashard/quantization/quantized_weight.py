"""A weight that rests in fewer bytes than it is computed with, and has values only inside of an operation.

Note [Quantized weights and autograd]
    A module holds a `QuantizedWeight` where an unquantized base has a parameter: true name, shape, dtype and device,
    and no storage of its own, only views of the slot that its bytes are in. torch's dispatcher calls it below autograd,
    so what autograd saves is the `QuantizedWeight`, never the values: the engine's saved-tensor hooks make a handle of
    it like of any other tensor in a slot, and backward unpacks it again. The values exist in a workspace during
    one operation. Views (the transposed weight of a Linear, one expert's of many) are remembered and applied when it is
    unpacked, so the operations that run, forward and backward, are those of plain weights, bit for bit.

    The idea of a tensor subclass that unpacks on use is torchao's (`NF4Tensor`); bitsandbytes' own `MatMul4Bit` keeps
    the quantized weight on `ctx`, which no hook sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..engine import FrozenWeight, Part, Placeholder
from ..errors import ShardError
from .format import Quantizer


class Workspace:
    """The memory that weights are unpacked to, reused by one operation after another.

    Memory: the largest weight, or the largest expert that is read by itself, in the dtype of the computation; as
        many times as one operation reads quantized weights, which is once.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """The bytes that are held."""
        return sum(buffer.numel() for buffer in self._buffers)

    @torch.inference_mode(False)  # a tensor created in that mode cannot be written outside of it
    def take(self, index: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory for quantized weight number `index` of an operation; what was there before is lost."""
        num_bytes = math.prod(shape) * dtype.itemsize
        while len(self._buffers) <= index:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device=device))
        if self._buffers[index].numel() < num_bytes:
            self._buffers[index] = torch.empty(0, dtype=torch.uint8, device=device)  # first the old one goes
            self._buffers[index] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._buffers[index][:num_bytes].view(dtype).view(tuple(shape))


@dataclass(frozen=True)
class QuantizedFormat:
    """The engine's `WeightFormat`: how weights are quantized, and the workspace that they share."""

    quantizer: Quantizer
    workspace: Workspace

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        return self.quantizer.parts(shape)

    def bind(
        self, placeholder: Placeholder, parts: Sequence[torch.Tensor], place: tuple[Any, int] | None
    ) -> QuantizedWeight:
        shape, dtype = tuple(placeholder.shape), placeholder.dtype
        stored = StoredWeight(placeholder.full_name, shape, dtype, self.quantizer, parts, self.workspace, place)
        return QuantizedWeight(stored)


@dataclass(frozen=True)
class View:
    """A view that is taken of the values once they are there."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class StoredWeight:
    """What a `QuantizedWeight` is made of.

    Attributes:
        name: the parameter's.
        shape: of the weight.
        dtype: of the computation.
        parts: the tensors that keep it, in the format of `quantizer`.
        place: of a weight in a slot, its unit and its index there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer
    parts: Sequence[torch.Tensor]
    workspace: Workspace
    place: tuple[Any, int] | None = None


class QuantizedWeight(FrozenWeight):
    """A quantized parameter, or a view of one; see [Quantized weights and autograd].

    Memory: none; its values, for the time of an operation that reads them, in the workspace.
    """

    stored: StoredWeight
    views: tuple[View, ...]
    reuses_memory = True

    @staticmethod
    def __new__(cls, stored: StoredWeight, views: tuple[View, ...] = ()) -> QuantizedWeight:
        like = _apply(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), views)
        return cls._make(stored, views, like.shape, like.stride())

    @classmethod
    def _make(
        cls, stored: StoredWeight, views: tuple[View, ...], size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedWeight:
        if torch.is_inference_mode_enabled():  # created there, it could be neither detached nor saved for backward
            with torch.inference_mode(False):
                return cls._make(stored, views, size, stride)
        self = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=stored.dtype, device=stored.parts[0].device, requires_grad=False
        )
        self.stored = stored
        self.views = views
        self.place = stored.place
        return self

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (twin := super().answer(func, args, kwargs)) is not None:
            return twin
        if func is torch.ops.aten.set_.source_Tensor and self.is_same(args[1]):
            return self  # torch's parametrizations set a parameter to itself
        if func is torch.ops.aten.t.default and self.dim() == 2:  # a Linear's, spared the detour below
            return self._make(self.stored, (*self.views, View(func, ())), self.shape[::-1], self.stride()[::-1])
        if func in _SPLITS and not kwargs:
            return [view.function(self, *view.arguments) for view in _SPLITS[func](self, *args[1:])]
        if func in _VIEWS and not kwargs:
            view = View(func, tuple(args[1:]))
            like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            like = func(like, *view.arguments)
            return self._make(self.stored, (*self.views, view), like.shape, like.stride())
        return None

    def lend(self, function: Any, index: int) -> torch.Tensor:
        stored, views = self.stored, self.views
        parts, shape = stored.parts, stored.shape
        if views and views[0].function is torch.ops.aten.select.int and views[0].arguments[0] == 0:
            selected = stored.quantizer.select(parts, shape, views[0].arguments[1] % shape[0])
            if selected is not None:
                parts, shape, views = selected, shape[1:], views[1:]
        out = stored.workspace.take(index, shape, stored.dtype, self.device)
        stored.quantizer.unpack(parts, out)
        return _apply(out, views)

    def unpack(self) -> torch.Tensor:
        """Return the values, in memory of their own."""
        return self.lend(None, 0).clone()

    def read(self, what: str) -> torch.Tensor:
        return self.unpack()

    def viewed(self, views: tuple[View, ...]) -> QuantizedWeight:
        return QuantizedWeight(self.stored, (*self.views, *views))

    def is_same(self, other: object) -> bool:
        return isinstance(other, QuantizedWeight) and other.stored is self.stored and other.views == self.views

    def twin(self) -> QuantizedWeight:
        return self._make(self.stored, self.views, self.shape, self.stride())

    def refuse(self, what: str, kind: type[ShardError] = ShardError) -> ShardError:
        return kind(
            f"it is quantized ({self.stored.quantizer.name}), so read-only, and was {what}",
            where=f"base weight '{self.stored.name}'",
            fix="save adapters with save_pretrained; merge a saved one with `lorashard merge`; load with "
            "quantization='none' to change the base",
        )

    def data_ptr(self) -> int:
        raise ShardError(
            f"it is quantized ({self.stored.quantizer.name}) and has no address: a kernel that reads memory by itself "
            "cannot read it",
            where=f"base weight '{self.stored.name}'",
            fix="switch that kernel off, or load with quantization='none'",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stored = self.stored
        return f"QuantizedWeight({stored.name}, {stored.quantizer.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


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
