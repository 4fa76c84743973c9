"""Tensors that are computed from several stored ones: quantized values and their scales, read by range.

Each is a `StoredTensor` with the shape and dtype of its dequantized values, so that code for stored tensors, from
finding the model's names to fusing experts, handles it unchanged.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ..quantization.format import Quantizer
from .safetensors_files import StoredTensor

# Reads elements [begin, end) of a stored tensor, flat and in its own dtype.
ReadElements = Callable[[StoredTensor, int, int], torch.Tensor]

MXFP4_BLOCK_NUMEL = 32  # values that share a scale


@dataclass(frozen=True)
class ComputedTensor(StoredTensor):
    """A tensor that no file holds as it is; `num_bytes` is 0, and it begins where its main tensor does."""

    @classmethod
    def at(cls, main: StoredTensor, key: str, dtype: torch.dtype, shape: Sequence[int], *fields: Any) -> Self:
        """Return a tensor at the place of its main tensor; `fields` are those of the subclass."""
        return cls(key, main.file, dtype, tuple(shape), main.begin_byte, 0, *fields)

    @abstractmethod
    def compute(self, begin: int, end: int, dtype: torch.dtype, read: ReadElements) -> torch.Tensor:
        """Return elements [begin, end), flat."""


@dataclass(frozen=True)
class Constant(ComputedTensor):
    """Values from a stored tensor of another kind, such as text."""

    values: tuple[float, ...] = ()

    def compute(self, begin: int, end: int, dtype: torch.dtype, read: ReadElements) -> torch.Tensor:
        return torch.tensor(self.values[begin:end], dtype=dtype)


@dataclass(frozen=True)
class NestedScales(ComputedTensor):
    """The scales of nf4 that are quantized themselves: bitsandbytes' `dequantize_blockwise`, plus the mean."""

    codes: StoredTensor
    scales: StoredTensor
    code_values: torch.Tensor
    block_numel: int
    offset: float

    def compute(self, begin: int, end: int, dtype: torch.dtype, read: ReadElements) -> torch.Tensor:
        first, last = begin // self.block_numel, math.ceil(end / self.block_numel)
        scales = read(self.scales, first, last).repeat_interleave(self.block_numel)
        values = self.code_values[read(self.codes, begin, end).int()]
        start = begin - first * self.block_numel
        mean = torch.tensor(self.offset, dtype=torch.float32)
        return (values * scales[start : start + end - begin] + mean).to(dtype)


@dataclass(frozen=True)
class QuantizedTensor(ComputedTensor):
    """A weight that the files hold in a format in which a base can be kept.

    Attributes:
        quantizer: that format.
        parts: the stored tensors, by the names of the format's parts.
        plain: the same weight with scales that are not nested, if these are.
    """

    quantizer: Quantizer
    parts: dict[str, StoredTensor]
    plain: QuantizedTensor | None = None

    def compute(self, begin: int, end: int, dtype: torch.dtype, read: ReadElements) -> torch.Tensor:
        if self.plain is not None:
            return self.plain.compute(begin, end, dtype, read)
        block = self.quantizer.block_numel(self.shape)
        first, last = begin // block, math.ceil(end / block)
        low, high = first * block, min(last * block, math.prod(self.shape))
        # Complete blocks are treated as a weight of their own, of rows if each row has a scale.
        shape = (high - low,) if len(self.shape) < 2 or block != self.shape[-1] else (last - first, block)
        parts = []
        for part in self.quantizer.parts(shape):
            ratio = count_numel(self.quantizer, self.shape, part.name)
            stored = read(self.parts[part.name], low // ratio, math.ceil(high / ratio))
            parts.append(stored.view(part.dtype).view(part.shape))
        out = torch.empty(shape, dtype=dtype)
        self.quantizer.unpack(parts, out)
        return out.view(-1)[begin - low : end - low]


def count_numel(quantizer: Quantizer, shape: Sequence[int], part_name: str) -> int:
    """Return how many values of a weight share an element of one of its format's parts."""
    (part,) = [part for part in quantizer.parts(shape) if part.name == part_name]
    if part_name:
        return quantizer.block_numel(shape)
    return math.ceil(math.prod(shape) / max(1, math.prod(part.shape)))


@dataclass(frozen=True)
class BlockFp8(ComputedTensor):
    """fp8 with a scale for each block of rows and columns, as in DeepSeek-V3; the last blocks may be smaller.

    transformers' own dequantizer takes a block's size from the number of scales, and so refuses smaller last blocks.
    Leading dimensions, such as experts, have blocks of their own.
    """

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    def compute(self, begin: int, end: int, dtype: torch.dtype, read: ReadElements) -> torch.Tensor:
        values = read(self.values, begin, end).float()
        if begin == end:
            return values.to(dtype)
        num_rows, num_columns = self.shape[-2:]
        num_scale_rows, num_scale_columns = (math.ceil(n / b) for n, b in zip(self.shape[-2:], self.block, strict=True))
        rows = torch.arange(begin // num_columns, math.ceil(end / num_columns))
        scale_rows = rows // num_rows * num_scale_rows + rows % num_rows // self.block[0]
        low, high = int(scale_rows[0]), int(scale_rows[-1]) + 1
        scales = read(self.scales, low * num_scale_columns, high * num_scale_columns).float()
        scales = scales.view(-1, num_scale_columns)[scale_rows - low]  # [rows, blocks of columns]
        scales = scales.repeat_interleave(self.block[1], dim=1)[:, :num_columns].reshape(-1)
        start = begin % num_columns
        return (values * scales[start : start + end - begin]).to(dtype)


@dataclass(frozen=True)
class MxFp4Experts(ComputedTensor):
    """Experts in MXFP4 as in GPT-OSS: stored as [experts, columns, blocks of rows, 16], the transpose of the weight.

    Memory: the stored bytes of one expert, and the requested values.
    """

    blocks: StoredTensor
    scales: StoredTensor

    def compute(self, begin: int, end: int, dtype: torch.dtype, read: ReadElements) -> torch.Tensor:
        _, num_rows, num_columns = self.shape
        numel = num_rows * num_columns
        found = [torch.empty(0, dtype=dtype)]
        for expert in range(begin // numel, math.ceil(end / numel)):
            offset = expert * numel
            low, high = max(begin, offset) - offset, min(end, offset + numel) - offset
            first, last = low // num_columns // MXFP4_BLOCK_NUMEL, math.ceil(high / num_columns / MXFP4_BLOCK_NUMEL)
            values = self._compute_blocks(expert, first, last, dtype, read).view(-1)
            skipped = first * MXFP4_BLOCK_NUMEL * num_columns
            found.append(values[low - skipped : high - skipped])
        return torch.cat(found)

    def _compute_blocks(
        self, expert: int, first: int, last: int, dtype: torch.dtype, read: ReadElements
    ) -> torch.Tensor:
        """Return the rows of blocks [first, last) of an expert: [rows, columns]."""
        _, num_columns, num_blocks, size = self.blocks.shape
        step = num_columns * num_blocks
        scales = read(self.scales, expert * step, (expert + 1) * step).view(1, num_columns, num_blocks)
        blocks = read(self.blocks, expert * step * size, (expert + 1) * step * size)
        blocks = blocks.view(1, num_columns, num_blocks, size)
        return convert_moe_packed_tensors(blocks[:, :, first:last], scales[:, :, first:last], dtype=dtype)[0]
