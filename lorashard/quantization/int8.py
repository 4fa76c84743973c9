"""Eight bits for each number, and one scale for each row: bitsandbytes' `int8_vectorwise_quant`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..engine import Part
from .pieces import cut_pieces

# 1 / 127 as bitsandbytes' `int8_vectorwise_dequant` has it.
_STEP = 7.874015718698502e-3


@dataclass(frozen=True)
class Int8:
    """Numbers from -127 to 127, scaled by the largest of their row (`SCB`).

    The bytes are those of bitsandbytes 0.50's `int8_vectorwise_quant` without outliers, the numbers those of its
    `int8_vectorwise_dequant`, rounded once to the dtype of the computation. (Its CUDA kernel divides approximately, so
    that a number in the middle of two may go the other way there; and its Linear8bitLt takes the weight to float16
    first.) A row of zeros stays zero, and a row with a NaN or an infinity comes back without a finite number.

    Memory: 8 bits a number, and 4 bytes a row.
    """

    name = "int8"
    scales_are_separate = True

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        return (
            Part("", torch.int8, tuple(shape)),
            Part("SCB", torch.float32, tuple(shape[:-1])),
        )

    def block_numel(self, shape: Sequence[int]) -> int:
        return shape[-1]

    def quantize(self, values: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.view(-1, shape[-1])
        numbers = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
        scales = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        for first, last in cut_pieces(rows.shape[0], shape[-1], rows.device):
            scales[first:last].copy_(rows[first:last].abs().amax(dim=1))
            scaled = rows[first:last] * (127.0 / scales[first:last]).unsqueeze(1)
            numbers[first:last].copy_(scaled.round_().nan_to_num_(0.0, 127.0, -127.0))
        return numbers.view(-1).view(torch.uint8), scales

    def keep_scales(self, scales: torch.Tensor) -> list[torch.Tensor]:
        return [scales]

    def unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the numbers to `out`, a contiguous tensor of any floating type.

        Memory: a piece of the numbers in float32: 1 MiB on a CPU, 16 MiB on a GPU.
        """
        rows = out.view(-1, out.shape[-1])
        numbers, scales = parts[0].view(rows.shape), parts[1].view(-1, 1)
        for first, last in cut_pieces(rows.shape[0], rows.shape[1], rows.device):
            values = numbers[first:last].float().mul_(scales[first:last]).mul_(_STEP)
            rows[first:last].copy_(values)

    def select(self, parts: Sequence[torch.Tensor], shape: Sequence[int], index: int) -> list[torch.Tensor] | None:
        return [part[index] for part in parts] if len(shape) > 1 else None
