"""Four bits for each value: the 16 codes of NF4, scaled by the largest magnitude of 64 values; bitsandbytes' format.

Note [Differences from bitsandbytes]
    The bytes are those of bitsandbytes 0.50's `quantize_4bit(quant_type="nf4")`, the values those of its
    `dequantize_4bit`: a code times its block's scale in float32, rounded once to the dtype of the computation.
    bitsandbytes' CPU and CUDA code differ in places. Here every device gives the same bytes and values:

    - Its CUDA kernels are built with --use_fast_math: their 1 / absmax may be off by an ulp, so that a value within an
      ulp of the midpoint of two codes may be rounded differently; products below 1.2e-38 become 0. Here as on its CPU:
      the rounded quotient, 1 / max(absmax, 1e-38), times the value.
    - The last block, if it is not complete, is scaled as on CUDA, like any other. Its CPU code divides there.
    - A block of zeros has code 7, which is zero, as on its CPU, so that it is zero for any scale; on CUDA it has code
      0, which is -1.
    - A block with a NaN has the scale NaN, one with an infinity the scale infinity, and its values are not finite after
      dequantizing, as on its CPU. On CUDA a NaN vanishes.
    - The mean of the scales, their offset, is summed in float64, so that it does not depend on the order. bitsandbytes
      sums in float32, in an order that depends on device and threads: its offset may differ by some ulps.
    - Quantized scales (`compress_statistics`) are rounded to the nearest of the map's values, as on CUDA. Its CPU code
      takes the next one for about one in a thousand that lie near a midpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ..engine import Part
from .chunks import iterate_chunks
from .kernels import SAMPLE_SCALES, Kernels, Unpack
from .nf4_kernel import Kernel, find_kernel
from .nf4_tables import Tables

_SMALLEST_SCALE = 1e-38


@dataclass(frozen=True)
class Nf4:
    """NF4; see [Differences from bitsandbytes].

    The first of two codes is in the high half of a byte; the last of an odd number has its own byte.

    Memory: 4 bits a value, and for each block 4 bytes, or with `double_quant` 1 byte and 4 for `nested_block_size`
        blocks: 4.5 or 4.127 bits a value in all.

    Attributes:
        double_quant: whether the scales are quantized too.
        block_size: how many values share a scale; a checkpoint may have any power of two from 32 to 4096.
        nested_block_size: how many scales share a scale, with `double_quant`.
    """

    double_quant: bool = False
    block_size: int = 64
    nested_block_size: int = 256
    _devices: dict[torch.device, tuple[Tables, Kernel | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kernels: Kernels = field(default_factory=Kernels, init=False, repr=False, compare=False)
    name = "nf4"

    @property
    def scales_are_separate(self) -> bool:
        return not self.double_quant

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        """Return the parts, under their names in bitsandbytes' checkpoints."""
        numel = math.prod(shape)
        num_blocks = math.ceil(numel / self.block_size)
        codes = Part("", torch.uint8, (math.ceil(numel / 2),))
        if not self.double_quant:
            return codes, Part("absmax", torch.float32, (num_blocks,))
        return (
            codes,
            Part("absmax", torch.uint8, (num_blocks,)),
            Part("nested_absmax", torch.float32, (math.ceil(num_blocks / self.nested_block_size),)),
            Part("nested_offset", torch.float32, (1,)),
        )

    def block_numel(self, shape: Sequence[int]) -> int:
        return self.block_size

    def quantize(self, values: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tables, _ = self._on(values.device)
        numel = values.numel()
        num_blocks = math.ceil(numel / self.block_size)
        packed = torch.empty(math.ceil(numel / 2), dtype=torch.uint8, device=values.device)
        scales = torch.empty(num_blocks, dtype=torch.float32, device=values.device)
        for first, last in iterate_chunks(num_blocks, self.block_size, values.device):
            begin, end = first * self.block_size, last * self.block_size
            blocks = _pad(values[begin:end].float(), end - begin).view(-1, self.block_size)
            torch.amax(blocks.abs(), dim=1, out=scales[first:last])
            codes = tables.round(_scale_down(blocks, scales[first:last]).view(-1))
            target = packed[begin // 2 : end // 2]
            target.copy_((codes[::2] << 4 | codes[1::2])[: target.numel()])
        return packed, scales

    def keep_scales(self, scales: torch.Tensor) -> list[torch.Tensor]:
        if not self.double_quant:
            return [scales]
        return self.quantize_scales(scales, scales.double().mean().float())

    def quantize_scales(self, scales: torch.Tensor, offset: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts after the first, with `double_quant`: codes of the scales, their scales, the offset.

        Args:
            scales: of all blocks (float32).
            offset: subtracted from each first (float32).
        """
        tables, _ = self._on(scales.device)
        num_nested = math.ceil(scales.numel() / self.nested_block_size)
        blocks = _pad(scales - offset, num_nested * self.nested_block_size).view(num_nested, -1)
        nested = blocks.abs().amax(dim=1)
        codes = tables.round_scales(_scale_down(blocks, nested)).view(-1)
        return [codes[: scales.numel()], nested, offset.view(1)]

    def unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values to `out`.

        On a GPU bitsandbytes' kernel is used if it is installed, else Triton's; the values are the same without either.

        Args:
            parts: those of `parts()`, or of `select()`.
            out: contiguous, of any floating type.

        Memory: a chunk of the values in float32 and the scales of a chunk: 1.5 MiB on a CPU, 24 MiB on a GPU; with
            bitsandbytes' kernel 20 MiB for `double_quant`, else nothing; with Triton's nothing.
        """
        _, kernel = self._on(out.device)
        unpack = None if kernel else self._kernels.find(self, out.device, out.dtype)
        (unpack or self.unpack_in_chunks)(parts, out)

    def unpack_in_chunks(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        flat = out.view(-1)
        tables, kernel = self._on(out.device)
        num_blocks = math.ceil(flat.numel() / self.block_size)
        iterate = kernel.iterate_chunks if kernel else iterate_chunks
        for first, last in iterate(num_blocks, self.block_size, out.device):
            begin, end = first * self.block_size, last * self.block_size
            packed, target = parts[0][begin // 2 : (end + 1) // 2], flat[begin:end]
            scales = self._unpack_scales(parts[1:], first, last)
            if kernel:
                kernel.unpack(packed, scales, self.block_size, target)
            else:
                _scale_up(tables.look_up(packed)[: target.numel()], scales, self.block_size, target)

    def select(self, parts: Sequence[torch.Tensor], shape: Sequence[int], index: int) -> list[torch.Tensor] | None:
        """Return the codes and the scales of `weight[index]`; quantized scales are dequantized to new memory."""
        numel = math.prod(shape[1:])
        if len(shape) < 2 or numel % self.block_size:
            return None
        first, last = index * numel // self.block_size, (index + 1) * numel // self.block_size
        return [parts[0][index * numel // 2 : (index + 1) * numel // 2], self._unpack_scales(parts[1:], first, last)]

    def load_kernel(self, device: torch.device) -> Unpack:
        from .triton_kernels import unpack_nf4

        tables, _ = self._on(device)
        return partial(
            unpack_nf4,
            block_size=self.block_size,
            nested_block_size=self.nested_block_size,
            nf4_code=tables.nf4_code,
            scale_code=tables.scale_code,
        )

    def make_sample(self, device: torch.device) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        num_blocks = 4 * len(SAMPLE_SCALES)
        numel = num_blocks * self.block_size - 7
        packed = torch.arange(math.ceil(numel / 2), device=device).to(torch.uint8)
        scales = torch.tensor(SAMPLE_SCALES, dtype=torch.float32, device=device).repeat(4)
        if not self.double_quant:
            return [packed, scales], (numel,)
        codes = torch.arange(0, 6 * num_blocks, 6, device=device).to(torch.uint8)
        num_nested = math.ceil(num_blocks / self.nested_block_size)
        return [packed, codes, scales[4 : 4 + num_nested].abs(), scales[:1]], (numel,)

    def _unpack_scales(self, parts: Sequence[torch.Tensor], first: int, last: int) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0][first:last]
        codes, nested, offset = parts
        tables, _ = self._on(codes.device)
        low = first // self.nested_block_size
        skipped = first - low * self.nested_block_size
        values = tables.look_up_scales(codes[first - skipped : last])
        _scale_up(values, nested[low:], self.nested_block_size, values)
        return values.add_(offset)[skipped:]

    def _on(self, device: torch.device) -> tuple[Tables, Kernel | None]:
        if device not in self._devices:
            tables = Tables(device)
            self._devices[device] = (tables, find_kernel(tables, self.block_size, device))
        return self._devices[device]


def _pad(values: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, numel - values.numel())) if values.numel() < numel else values


def _scale_down(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (blocks * (1.0 / scales.clamp(min=_SMALLEST_SCALE)).unsqueeze(1)).clamp_(-1, 1)


def _scale_up(values: torch.Tensor, scales: torch.Tensor, block_size: int, out: torch.Tensor) -> None:
    """Write to `out` the values times the scale of their block; the last block may have fewer."""
    num_complete = values.numel() // block_size
    numel = num_complete * block_size
    torch.mul(
        values[:numel].view(num_complete, block_size),
        scales[:num_complete].unsqueeze(1),
        out=out[:numel].view(num_complete, block_size),
    )
    if numel < values.numel():
        torch.mul(values[numel:], scales[num_complete], out=out[numel:])
