"""Watch the operations that torch runs: how many bytes are alive at once, and how much work they are.

torch's MemTracker is private, has one peak for a whole session, and cannot add the bytes of unpacking; FlopCounterMode
counts neither bytes moved nor kernels. The formulas of the latter are used here.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# A matmul with fewer operations for each byte that it moves is bound by memory, such as LoRA's thin ones.
_MIN_FLOPS_PER_BYTE = 100

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)

# These copy no values.
_BOOKKEEPING = {_aten.detach.default, _aten.alias.default, _aten._unsafe_view.default}
# Not pointwise by torch's tags, and fused all the same: copies, and what reduces the rows of a norm or of attention.
_FUSED_TOO = {
    _aten._to_copy,
    _aten.copy_,
    _aten.cat,
    _aten.slice_backward,
    _aten.native_dropout,
    _aten.mean,
    _aten.sum,
    _aten._softmax,
    _aten._softmax_backward_data,
    _aten.native_layer_norm,
    _aten.native_layer_norm_backward,
}


class Amounts:
    """Base of dataclasses of numbers, which add up field by field."""

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))

    def __sub__(self, other: Self) -> Self:
        return self + other * -1

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(getattr(self, field.name) * factor for field in fields(self)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Work(Amounts):
    """What a device has to do: matmul operations, bytes that everything but large matmuls moves, kernels to start.

    Attributes:
        fusible_bytes, fusible_kernels: those of them that go where elementwise operations are fused (`ElementwiseRun`).
        exchanged_bytes, num_exchanges: what a rank brings to all-to-alls with those that it shares sequences with.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: float = 0.0
    fusible_bytes: float = 0.0
    fusible_kernels: float = 0.0
    exchanged_bytes: float = 0.0
    num_exchanges: float = 0.0


@dataclass(frozen=True)
class Unpacking:
    """What it takes to compute the values of a quantized weight, which each operation that reads it does.

    Attributes:
        unpacked_bytes: of the values, in the workspace.
        temporary_bytes: beside the workspace, until the values are there.
        item: the same for `weight[i]`, where that can be unpacked alone.
    """

    numel: int
    unpacked_bytes: int
    temporary_bytes: int
    work: Work
    item: Unpacking | None = None


class ElementwiseRun:
    """Elementwise operations with none of another kind between them, which a compiler makes one kernel of.

    That kernel reads what was there before once, and writes what is still there when the run ends: for the next
    operation, or for backward. The rest stays in registers. The model is inductor's "vertical" fusion (PyTorch 2,
    Ansel et al., 2024), without what it recomputes in backward to save less, and without runs it moves together.
    """

    def __init__(self) -> None:
        self._moved_bytes = 0
        self._num_kernels = 0
        self._read_bytes: dict[int, int] = {}
        self._made_bytes: dict[int, int] = {}

    def add(self, used: Iterable[torch.Tensor], made: Iterable[torch.Tensor]) -> None:
        """Note one operation by the tensors that it reads and writes."""
        self._num_kernels += 1
        for tensor in used:
            storage = tensor.untyped_storage()
            self._moved_bytes += tensor.nbytes
            if storage._cdata not in self._made_bytes:
                read_bytes = self._read_bytes.get(storage._cdata, 0) + tensor.nbytes
                self._read_bytes[storage._cdata] = min(read_bytes, storage.nbytes())
        for tensor in made:
            self._moved_bytes += tensor.nbytes
            self._made_bytes[tensor.untyped_storage()._cdata] = tensor.nbytes

    def count_fusible(self, live: Container[int]) -> Work:
        """Return what one kernel does less than the operations do.

        Args:
            live: the storages that are there now.
        """
        written_bytes = sum(num_bytes for key, num_bytes in self._made_bytes.items() if key in live)
        fusible_bytes = self._moved_bytes - sum(self._read_bytes.values()) - written_bytes
        return Work(fusible_bytes=max(0, fusible_bytes), fusible_kernels=max(0, self._num_kernels - 1))


def is_elementwise(func: Any) -> bool:
    """Return whether a compiler fuses an operation with elementwise ones before and after it."""
    return torch.Tag.pointwise in func.tags or func._overloadpacket in _FUSED_TOO


class Tracker(TorchDispatchMode):
    """While active, counts the bytes of storages that operations allocate, for as long as a tensor holds them.

    Works on real tensors, and on fake ones, which have every property but values.

    Attributes:
        live_bytes: now.
        peak_bytes: the most at once since `take_peak`.
        work: of all operations so far.
        workspace_bytes: the most that the quantized weights of one operation were unpacked to.
    """

    def __init__(
        self,
        ignored: Iterable[torch.Tensor] = (),
        is_for_cuda: bool = False,
        quantized: Iterable[tuple[torch.Tensor, Unpacking]] = (),
    ) -> None:
        """Start with nothing allocated.

        Args:
            ignored: their storages are not counted.
            is_for_cuda: whether attention's backward takes the workspace that its CUDA kernel takes.
            quantized: tensors that stand for quantized weights.
        """
        super().__init__()
        self._unpackings = {tensor.untyped_storage()._cdata: unpacking for tensor, unpacking in quantized}
        self.workspace_bytes = 0
        self._is_for_cuda = is_for_cuda
        self.live_bytes = 0
        self.peak_bytes = 0
        self.work = Work()
        self._run = ElementwiseRun()
        self._num_bytes: dict[int, int] = {}
        for tensor in ignored:
            self._num_bytes[tensor.untyped_storage()._cdata] = 0

    def take_peak(self) -> int:
        """Return the peak since the last call, and start a new one."""
        peak_bytes, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak_bytes

    def end_run(self) -> None:
        """Count what fusing the elementwise operations since the last others removes; the next begin another run."""
        self.work += self._run.count_fusible(self._num_bytes)
        self._run = ElementwiseRun()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if not (func.is_view or func in _BOOKKEEPING or is_elementwise(func)):
            self.end_run()  # before it runs, while what it reads is there
        if self._unpackings and not func.is_view and func not in _BOOKKEEPING:
            self._unpack(tree_leaves((args, kwargs)))
        output = func(*args, **kwargs)
        made = [tensor for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor)]
        for tensor in made:
            self._add(tensor)
        if self._is_for_cuda and func._overloadpacket is _ATTENTION[1]:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + _count_attention_workspace(*args[1:3]))
        if not func.is_view and made:
            self._add_work(func, args, kwargs, output, made)
        return output

    def _unpack(self, leaves: Iterable[Any]) -> None:
        unpacked_bytes = 0
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue
            unpacking = self._unpackings.get(leaf.untyped_storage()._cdata)
            if unpacking is None:
                continue
            if unpacking.item is not None and leaf.numel() == unpacking.item.numel:
                unpacking = unpacking.item
            unpacked_bytes += unpacking.unpacked_bytes
            self.work += unpacking.work
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + unpacking.temporary_bytes)
        self.workspace_bytes = max(self.workspace_bytes, unpacked_bytes)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._num_bytes:
            return
        self._num_bytes[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live_bytes -= self._num_bytes.pop(key)

    def _add_work(self, func: Any, args: Any, kwargs: Any, output: Any, made: list[torch.Tensor]) -> None:
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        moved_bytes = sum(tensor.nbytes for tensor in used + made)
        flops = _count_flops(func, args, kwargs, output)
        if is_elementwise(func):
            self._run.add(used, made)
        is_thin = flops < moved_bytes * _MIN_FLOPS_PER_BYTE
        self.work += Work(flops, moved_bytes if is_thin else 0, 1)


def _count_attention_workspace(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return what flash attention's backward allocates: the query's gradient in fp32, and grouped heads' one by one."""
    each_head = 2 * query.nbytes if key.shape[1] < query.shape[1] else 0
    return 4 * query.numel() + each_head


def _count_flops(func: Any, args: Any, kwargs: Any, output: Any) -> float:
    packet = func._overloadpacket
    if packet in _ATTENTION:
        is_backward = packet is _ATTENTION[1]
        query, key = args[1:3] if is_backward else args[:2]
        is_causal = kwargs.get("is_causal", False) or any(argument is True for argument in args)
        # Two matmuls forward, five backward; a causal kernel skips half.
        return query.numel() * key.shape[-2] * (10 if is_backward else 4) * (0.5 if is_causal else 1)
    if packet is getattr(_aten, "_grouped_mm", None):
        return 2 * args[0].numel() * args[1].shape[-1]
    count = flop_registry.get(packet)
    return count(*args, **kwargs, out_val=output) if count else 0.0
