"""Eight bits for each number in e4m3, and one scale for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..engine import Part
from .pieces import cut_pieces

_LARGEST = 448.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Fp8:
    """Numbers in e4m3 (OCP FP8, without infinities), scaled so that the largest of their row is 448.

    The scale is the row's largest magnitude / 448 in float32, the numbers are divided by it and rounded to the nearest,
    of two as near to the even one, and a number is its byte times the scale in float32, rounded once to the dtype of
    the computation: torchao's rowwise float8 recipe. Scales below float32's normal numbers are raised to the smallest
    of these. A row of zeros stays zero, and a row with a NaN or an infinity comes back without a finite number.

    Memory: 8 bits a number, and 4 bytes a row.
    """

    _tables: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    name = "fp8"
    scales_are_separate = True

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        return (
            Part("", torch.float8_e4m3fn, tuple(shape)),
            Part("scale", torch.float32, tuple(shape[:-1])),
        )

    def block_numel(self, shape: Sequence[int]) -> int:
        return shape[-1]

    def quantize(self, values: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.view(-1, shape[-1])
        numbers = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
        scales = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        for first, last in cut_pieces(rows.shape[0], shape[-1], rows.device):
            piece = rows[first:last].float()
            torch.amax(piece.abs(), dim=1, out=scales[first:last])
            scales[first:last].div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
            # What is above 448 would become NaN, and the quotient may be by an ulp.
            numbers[first:last].copy_((piece / scales[first:last].unsqueeze(1)).clamp_(-_LARGEST, _LARGEST))
        return numbers.view(-1).view(torch.uint8), scales

    def keep_scales(self, scales: torch.Tensor) -> list[torch.Tensor]:
        return [scales]

    def unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the numbers to `out`, a contiguous tensor of any floating type.

        Memory: a piece of the numbers in float32 and, on a CPU, in int32: 2 MiB there, 16 MiB on a GPU.
        """
        rows = out.view(-1, out.shape[-1])
        numbers, scales = parts[0].view(rows.shape), parts[1].view(-1, 1)
        for first, last in cut_pieces(rows.shape[0], rows.shape[1], rows.device):
            torch.mul(self._to_float(numbers[first:last]), scales[first:last], out=rows[first:last])

    def select(self, parts: Sequence[torch.Tensor], shape: Sequence[int], index: int) -> list[torch.Tensor] | None:
        return [part[index] for part in parts] if len(shape) > 1 else None

    def _to_float(self, numbers: torch.Tensor) -> torch.Tensor:
        if numbers.device.type != "cpu":
            return numbers.float()
        # torch converts one number after another there; a lookup is seven times as fast.
        if numbers.device not in self._tables:
            with torch.inference_mode(False):  # a tensor made in that mode could not be used everywhere outside of it
                codes = torch.arange(256, dtype=torch.uint8, device=numbers.device)
                self._tables[numbers.device] = codes.view(torch.float8_e4m3fn).float()
        table = self._tables[numbers.device]
        return table.index_select(0, numbers.view(torch.uint8).view(-1).int()).view(numbers.shape)
