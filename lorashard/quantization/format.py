"""What every quantized format can do, and which one an option means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..config.quantization_options import Quantization
from ..engine import Part


class Quantizer(Protocol):
    """A format that weights can be brought into.

    Values that share a scale, a block, follow one another in a weight's row-major order. So any stretch of whole
    blocks can be quantized by itself, and the values' bytes come in the same order.

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
        """Quantize whole blocks.

        Args:
            values: consecutive values of a weight, flat, of any floating type, from the beginning of a block on.
            shape: of the whole weight.

        Returns:
            Their bytes (uint8, flat), and the scale of each block (float32).
        """
        ...

    def keep_scales(self, scales: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts after the first, given the scales of all blocks of a weight (float32)."""
        ...

    @property
    def scales_are_separate(self) -> bool:
        """Whether the scales are kept as they are, so that each is known from its own block alone."""
        ...


def make_quantizer(quantization: Quantization) -> Quantizer:
    """Return the format that is meant."""
    from .fp8 import Fp8
    from .int8 import Int8
    from .nf4 import Nf4

    if quantization.format == "nf4":
        return Nf4(quantization.double_quant)
    return Int8() if quantization.format == "int8" else Fp8()
