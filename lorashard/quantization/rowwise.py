"""Eight bits for each value and one float32 scale for each row: int8 as bitsandbytes has it, and fp8."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ..engine import Part
from .chunks import iterate_chunks
from .kernels import SAMPLE_SCALES, Kernels, Unpack

_INT8_STEP = 7.874015718698502e-3  # 1 / 127 as in bitsandbytes' `int8_vectorwise_dequant`
_LARGEST_FP8 = 448.0
_SMALLEST_FP8_SCALE = torch.finfo(torch.float32).tiny


class _Rowwise(ABC):
    """What int8 and fp8 share.

    Memory: 8 bits a value, and 4 bytes a row.
    """

    name: str
    scales_are_separate = True
    _dtype: torch.dtype
    _scales_name: str
    _int8_step: float
    _kernels: Kernels

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        return (
            Part("", self._dtype, tuple(shape)),
            Part(self._scales_name, torch.float32, tuple(shape[:-1])),
        )

    def block_numel(self, shape: Sequence[int]) -> int:
        return shape[-1]

    def quantize(self, values: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.view(-1, shape[-1])
        codes = torch.empty(rows.shape, dtype=self._dtype, device=rows.device)
        scales = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        for first, last in iterate_chunks(rows.shape[0], rows.shape[1], rows.device):
            self._quantize_rows(rows[first:last], codes[first:last], scales[first:last])
        return codes.view(-1).view(torch.uint8), scales

    def keep_scales(self, scales: torch.Tensor) -> list[torch.Tensor]:
        return [scales]

    def unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values to `out`, a contiguous tensor of any floating type.

        On a GPU Triton's kernel is used if it can be; the values are the same without it.

        Memory: none with Triton's kernel. Otherwise a chunk of the values in float32 and, for fp8 on a CPU, in int32: 1
            or 2 MiB there, 16 MiB on a GPU.
        """
        kernel = self._kernels.find(self, out.device, out.dtype)
        (kernel or self.unpack_in_chunks)(parts, out)

    def unpack_in_chunks(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        rows = out.view(-1, out.shape[-1])
        codes, scales = parts[0].view(rows.shape), parts[1].view(-1, 1)
        for first, last in iterate_chunks(rows.shape[0], rows.shape[1], rows.device):
            self._unpack_rows(codes[first:last], scales[first:last], rows[first:last])

    def select(self, parts: Sequence[torch.Tensor], shape: Sequence[int], index: int) -> list[torch.Tensor] | None:
        return [part[index] for part in parts] if len(shape) > 1 else None

    def load_kernel(self, device: torch.device) -> Unpack:
        from .triton_kernels import unpack_rows

        return partial(unpack_rows, int8_step=self._int8_step)

    def make_sample(self, device: torch.device) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        scales = torch.tensor(SAMPLE_SCALES, dtype=torch.float32, device=device)
        shape = (len(SAMPLE_SCALES), 4 * 256 + 7)
        codes = torch.arange(shape[1], device=device).to(torch.uint8).expand(shape).contiguous()
        return [codes.view(self._dtype), scales], shape

    @abstractmethod
    def _quantize_rows(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes and scales of rows [rows, columns]."""

    @abstractmethod
    def _unpack_rows(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of codes [rows, columns] with scales [rows, 1]."""


@dataclass(frozen=True)
class Int8(_Rowwise):
    """Integers from -127 to 127, scaled by the largest magnitude of their row (`SCB`).

    The bytes are those of bitsandbytes 0.50's `int8_vectorwise_quant` without outliers, the values those of its
    `int8_vectorwise_dequant`, rounded once to the dtype of the computation. (Its CUDA kernel divides approximately, so
    that it may round a value halfway between two integers differently; and its Linear8bitLt casts the weight to float16
    first.) A row of zeros stays zero, and a row with a NaN or an infinity has no finite value after dequantizing.
    """

    _kernels: Kernels = field(default_factory=Kernels, init=False, repr=False, compare=False)
    name = "int8"
    _dtype = torch.int8
    _scales_name = "SCB"
    _int8_step = _INT8_STEP

    def _quantize_rows(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        scales.copy_(rows.abs().amax(dim=1))
        scaled = rows * (127.0 / scales).unsqueeze(1)
        codes.copy_(scaled.round_().nan_to_num_(0.0, 127.0, -127.0))

    def _unpack_rows(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes.float().mul_(scales).mul_(_INT8_STEP))


@dataclass(frozen=True)
class Fp8(_Rowwise):
    """Values in e4m3 (OCP FP8, without infinities), scaled so that the largest of their row is 448.

    The scale is the row's largest magnitude / 448 in float32; values are divided by it and rounded to the nearest, ties
    to even. A dequantized value is its byte times the scale in float32, rounded once to the dtype of the computation:
    torchao's rowwise float8 recipe. Scales below float32's normal range are raised to its smallest number. A row of
    zeros stays zero, and a row with a NaN or an infinity has no finite value after dequantizing.
    """

    _kernels: Kernels = field(default_factory=Kernels, init=False, repr=False, compare=False)
    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    name = "fp8"
    _dtype = torch.float8_e4m3fn
    _scales_name = "scale"
    _int8_step = 0.0

    def _quantize_rows(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        values = rows.float()
        torch.amax(values.abs(), dim=1, out=scales)
        scales.div_(_LARGEST_FP8).clamp_(min=_SMALLEST_FP8_SCALE)
        # Values above 448 would become NaN, and the quotient may exceed it by an ulp.
        codes.copy_((values / scales.unsqueeze(1)).clamp_(-_LARGEST_FP8, _LARGEST_FP8))

    def _unpack_rows(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(self._to_float(codes), scales, out=out)

    def _to_float(self, codes: torch.Tensor) -> torch.Tensor:
        if codes.device.type != "cpu":
            return codes.float()
        # torch converts value by value there; a lookup is seven times as fast.
        if codes.device not in self._tables:
            with torch.inference_mode(False):  # a tensor created in that mode cannot be saved for backward
                every_byte = torch.arange(256, dtype=torch.uint8, device=codes.device)
                self._tables[codes.device] = every_byte.view(torch.float8_e4m3fn).float()
        table = self._tables[codes.device]
        return table.index_select(0, codes.view(torch.uint8).view(-1).int()).view(codes.shape)
