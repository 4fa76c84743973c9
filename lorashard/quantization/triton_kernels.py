"""Triton's kernels that unpack a weight in one launch. Importing this file imports Triton; `kernels.py` does it.

Note [Equal bits]
    Each value is what torch's operations give: products in float32, in the same order, rounded once to the dtype of
    the output. Multiply and add are not fused, which would round once less. bfloat16 is rounded by integer arithmetic:
    Triton's interpreter, with which the tests run these kernels on a CPU, truncates instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS = 1024
_NF4_VALUES = 2048


@triton.jit
def _store(pointers, values, mask, IS_BF16: tl.constexpr):
    if IS_BF16:
        bits = tl.where(values == values, values.to(tl.uint32, bitcast=True), 0x7FC00000)
        values = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_rows(codes, scales, out, num_columns, INT8_STEP: tl.constexpr, IS_BF16: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    mask = column < num_columns
    index = row * num_columns + column
    code = tl.load(codes + index, mask=mask, other=0)
    scale = tl.load(scales + row)
    if INT8_STEP != 0:
        values = code.to(tl.float32) * scale * INT8_STEP
    else:
        # e4m3's exponent and mantissa moved to float32's; 2**120 is the difference of the biases.
        byte = code.to(tl.uint32)
        bits = tl.where((byte & 0x7F) == 0x7F, 0x7FC00000, ((byte & 0x80) << 24) | ((byte & 0x7F) << 20))
        values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale
    _store(out + index, values, mask, IS_BF16)


@triton.jit
def _unpack_nf4(
    packed,
    scales,
    nested,
    offset,
    nf4_code,
    scale_code,
    out,
    numel,
    num_pairs,
    NESTED_SIZE: tl.constexpr,
    IS_BF16: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    begin = block * SIZE
    scale = tl.load(scales + block, mask=begin < numel, other=0)
    if NESTED_SIZE:
        nested_scale = tl.load(nested + block // NESTED_SIZE, mask=begin < numel, other=0)
        scale = tl.load(scale_code + scale.to(tl.int32)) * nested_scale + tl.load(offset)
    pair = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]  # [blocks, values / 2]
    byte = tl.load(packed + pair, mask=pair < num_pairs, other=0).to(tl.int32)
    code = tl.reshape(tl.join(byte >> 4, byte & 15), (BLOCKS, SIZE))
    index = begin[:, None] + tl.arange(0, SIZE)[None, :]
    _store(out + index, tl.load(nf4_code + code) * scale[:, None], index < numel, IS_BF16)


def unpack_rows(parts: Sequence[torch.Tensor], out: torch.Tensor, int8_step: float) -> None:
    """Write codes times the scale of their row.

    Args:
        parts: codes of `out`'s shape, int8 or e4m3, and float32 scales.
        out: contiguous, of any floating type.
        int8_step: what int8 is multiplied with besides; 0 for e4m3.
    """
    codes = parts[0] if int8_step else parts[0].view(torch.uint8)
    num_columns = out.shape[-1]
    size = min(_COLUMNS, triton.next_power_of_2(num_columns))
    grid = (out.numel() // num_columns, triton.cdiv(num_columns, size))
    arguments = (codes, parts[1], _as_stored(out), num_columns, int8_step, out.dtype is torch.bfloat16, size)
    _launch(_unpack_rows, grid, out, arguments)


def unpack_nf4(
    parts: Sequence[torch.Tensor],
    out: torch.Tensor,
    block_size: int,
    nested_block_size: int,
    nf4_code: torch.Tensor,
    scale_code: torch.Tensor,
) -> None:
    """Write NF4's codes times the scale of their block.

    Args:
        parts: of `Nf4.parts`, or of `Nf4.select`; scales are quantized if there are four.
        out: contiguous, of any floating type.
        block_size: a power of two.
        nested_block_size: how many quantized scales share a scale.
        nf4_code: the 16 values (float32).
        scale_code: the 256 values of quantized scales (float32).
    """
    is_nested = len(parts) > 2
    nested, offset = parts[2:] if is_nested else (nf4_code, nf4_code)  # not read
    blocks = max(1, _NF4_VALUES // block_size)
    arguments = (*parts[:2], nested, offset, nf4_code, scale_code, _as_stored(out), out.numel(), parts[0].numel())
    sizes = (nested_block_size if is_nested else 0, out.dtype is torch.bfloat16, block_size, blocks)
    _launch(_unpack_nf4, (math.ceil(out.numel() / (block_size * blocks)),), out, (*arguments, *sizes))


def _as_stored(out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int16) if out.dtype is torch.bfloat16 else out


def _launch(kernel: Any, grid: tuple[int, ...], out: torch.Tensor, arguments: tuple[Any, ...]) -> None:
    with torch.cuda.device_of(out):  # Triton launches on the current device
        kernel[grid](*arguments, enable_fp_fusion=False)
