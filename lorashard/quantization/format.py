"""The interface of every quantized format, and the format that an option means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..config.quantization_options import Quantization
from ..engine import Part


class Quantizer(Protocol):
    """A format to which weights can be quantized.

    The values that share a scale, a block, are consecutive in a weight's row-major order. So any range of complete
    blocks can be quantized by itself, and its bytes are in the same order.

    Attributes:
        name: as the option calls it.
    """

    name: str

    def parts(self, shape: Sequence[int]) -> tuple[Part, ...]:
        """Return the tensors that keep a weight of `shape`: first the quantized values, then what scales them."""
        ...

    def unpack(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values to `out`, a contiguous tensor of the weight's shape in the dtype of the computation."""
        ...

    def select(self, parts: Sequence[torch.Tensor], shape: Sequence[int], index: int) -> list[torch.Tensor] | None:
        """Return the parts of `weight[index]`, views of these; None where its blocks are not its own."""
        ...

    def block_numel(self, shape: Sequence[int]) -> int:
        """Return how many values share a scale; the last block of a weight may have fewer."""
        ...

    def quantize(self, values: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize complete blocks.

        Args:
            values: consecutive values of a weight, flat, of any floating type, from the beginning of a block on.
            shape: of the complete weight.

        Returns:
            Their bytes (uint8, flat), and the scale of each block (float32).
        """
        ...

    def keep_scales(self, scales: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts after the first, given the scales of all blocks of a weight (float32)."""
        ...

    @property
    def scales_are_separate(self) -> bool:
        """Whether the scales are not quantized themselves, so that each depends on its own block alone."""
        ...


def make_quantizer(quantization: Quantization) -> Quantizer:
    """Return the format that an option means."""
    from .nf4 import Nf4
    from .rowwise import Fp8, Int8

    if quantization.format == "nf4":
        return Nf4(quantization.double_quant)
    return Int8() if quantization.format == "int8" else Fp8()
