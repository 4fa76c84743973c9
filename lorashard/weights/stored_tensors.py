"""Tensors that several stored ones make together: quantized numbers and their scales, read by range.

Each is a `StoredTensor` of the shape and dtype that it has when it is dequantized, so that all that is done with stored
tensors, from finding the model's names to fusing experts, is done with them unchanged.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..quantization.format import Quantizer
from .safetensors_files import StoredTensor

# Reads elements [begin, end) of a stored tensor, flat and in its own dtype.
Read = Callable[[StoredTensor, int, int], torch.Tensor]

# MXFP4's sixteen numbers (OCP Microscaling Formats, 2023: E2M1), and how many share a scale.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_BLOCK_NUMEL = 32


@dataclass(frozen=True)
class MadeTensor(StoredTensor):
    """A tensor that is in no file as it is; `num_bytes` is 0, and it begins where its main tensor does."""

    @abstractmethod
    def make(self, begin: int, end: int, dtype: torch.dtype, read: Read) -> torch.Tensor:
        """Return elements [begin, end), flat."""


@dataclass(frozen=True)
class Constant(MadeTensor):
    """Numbers that stood in a stored tensor of another kind, such as text."""

    values: tuple[float, ...] = ()

    def make(self, begin: int, end: int, dtype: torch.dtype, read: Read) -> torch.Tensor:
        return torch.tensor(self.values[begin:end], dtype=dtype)


@dataclass(frozen=True)
class NestedScales(MadeTensor):
    """The scales of nf4, which are quantized themselves: bitsandbytes' `dequantize_blockwise`, plus the mean."""

    numbers: StoredTensor
    scales: StoredTensor
    code: torch.Tensor
    block_numel: int
    offset: float

    def make(self, begin: int, end: int, dtype: torch.dtype, read: Read) -> torch.Tensor:
        first, last = begin // self.block_numel, math.ceil(end / self.block_numel)
        scales = read(self.scales, first, last).repeat_interleave(self.block_numel)
        numbers = self.code[read(self.numbers, begin, end).int()]
        start = begin - first * self.block_numel
        mean = torch.tensor(self.offset, dtype=torch.float32)
        return (numbers * scales[start : start + end - begin] + mean).to(dtype)


@dataclass(frozen=True)
class PackedTensor(MadeTensor):
    """A weight that the files hold in a format that it can be kept in.

    Attributes:
        quantizer: that format.
        parts: what is stored of it, by the names of the format's parts.
        plain: the same with scales that are no longer quantized, where they are.
    """

    quantizer: Quantizer
    parts: dict[str, StoredTensor]
    plain: PackedTensor | None = None

    def make(self, begin: int, end: int, dtype: torch.dtype, read: Read) -> torch.Tensor:
        if self.plain is not None:
            return self.plain.make(begin, end, dtype, read)
        block = self.quantizer.block_numel(self.shape)
        first, last = begin // block, math.ceil(end / block)
        low, high = first * block, min(last * block, math.prod(self.shape))
        # Whole blocks are a weight of their own; rows where each has a scale.
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
    """Return how many numbers of a weight share an element of one of its format's parts."""
    (part,) = [part for part in quantizer.parts(shape) if part.name == part_name]
    if part_name:
        return quantizer.block_numel(shape)
    return math.ceil(math.prod(shape) / max(1, math.prod(part.shape)))


@dataclass(frozen=True)
class BlockFp8(MadeTensor):
    """fp8 with a scale for each block of rows and columns, as DeepSeek-V3 is stored; the last blocks may be smaller.

    Leading dimensions, such as experts, have blocks of their own.
    """

    numbers: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]

    def make(self, begin: int, end: int, dtype: torch.dtype, read: Read) -> torch.Tensor:
        num_rows, num_columns = self.shape[-2:]
        rows_of_scales, columns_of_scales = (math.ceil(n / b) for n, b in zip(self.shape[-2:], self.block, strict=True))
        numbers = read(self.numbers, begin, end).float()
        first, last = begin // num_columns, math.ceil(end / num_columns)
        rows = torch.arange(first, last)
        of_row = rows // num_rows * rows_of_scales + rows % num_rows // self.block[0]
        if not len(rows):
            return numbers.to(dtype)
        low, high = int(of_row[0]), int(of_row[-1]) + 1
        scales = read(self.scales, low * columns_of_scales, high * columns_of_scales).float()
        scales = scales.view(-1, columns_of_scales)[of_row - low]  # [rows, blocks of columns]
        scales = scales.repeat_interleave(self.block[1], dim=1)[:, :num_columns].reshape(-1)
        start = begin - first * num_columns
        return (numbers * scales[start : start + end - begin]).to(dtype)


@dataclass(frozen=True)
class MxFp4Experts(MadeTensor):
    """Experts in MXFP4 as GPT-OSS is stored: [experts, columns, blocks of rows, 16], the transpose of what they are.

    Memory: the stored bytes of one expert, and the numbers asked for.
    """

    blocks: StoredTensor
    scales: StoredTensor

    def make(self, begin: int, end: int, dtype: torch.dtype, read: Read) -> torch.Tensor:
        _, num_rows, num_columns = self.shape
        numel = num_rows * num_columns
        pieces = [torch.empty(0, dtype=dtype)]
        for expert in range(begin // numel, math.ceil(end / numel)):
            offset = expert * numel
            low, high = max(begin, offset) - offset, min(end, offset + numel) - offset
            first, last = low // num_columns, math.ceil(high / num_columns)  # rows
            made = self._make_rows(expert, first, last, dtype, read).view(-1)
            pieces.append(made[low - first * num_columns : high - first * num_columns])
        return torch.cat(pieces)

    def _make_rows(self, expert: int, first: int, last: int, dtype: torch.dtype, read: Read) -> torch.Tensor:
        _, num_rows, num_columns = self.shape
        num_blocks, size = num_rows // MXFP4_BLOCK_NUMEL, MXFP4_BLOCK_NUMEL // 2
        low, high = first // MXFP4_BLOCK_NUMEL, math.ceil(last / MXFP4_BLOCK_NUMEL)
        step = num_columns * num_blocks
        scales = read(self.scales, expert * step, (expert + 1) * step).view(num_columns, num_blocks)[:, low:high]
        blocks = read(self.blocks, expert * step * size, (expert + 1) * step * size)
        blocks = blocks.view(num_columns, num_blocks, size)[:, low:high]
        values = torch.tensor(_E2M1, dtype=torch.float32)
        # Two numbers for each byte, the first in its low half, moved as one: the lookup is what this costs.
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1).view(torch.float64).view(-1)
        numbers = pairs.index_select(0, blocks.reshape(-1).int()).view(torch.float32)
        numbers = numbers.view(num_columns, high - low, MXFP4_BLOCK_NUMEL)
        powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        rows = numbers.mul_(powers.unsqueeze(-1)).to(dtype).view(num_columns, -1).t()  # [rows, columns]
        return rows[first - low * MXFP4_BLOCK_NUMEL : last - low * MXFP4_BLOCK_NUMEL].contiguous()
