"""The numbers that an adapter of a quantized base was trained on: quantized, and unpacked again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..config.quantization_options import Quantization
from ..model.quantizing import find_quantizers
from ..quantization.format import Quantizer


@dataclass(frozen=True)
class QuantizedBase:
    """Which of a base's weights were quantized, by name.

    Attributes:
        dtypes: for a dtype of the merged model, the one of training: what numbers have before they are quantized, and
            when they are computed with.
    """

    quantizers: Mapping[str, Quantizer] = field(default_factory=dict)
    dtypes: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)

    def restore(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the numbers that training computed with, in the dtype of `value`; others are returned as they are.

        Memory: the quantized weight, and what its format takes for a piece of it.
        """
        quantizer = self.quantizers.get(name)
        if quantizer is None:
            return value
        plain = value.to(self.dtypes.get(value.dtype, value.dtype))
        parts = quantize_weight(quantizer, plain)
        quantizer.unpack(parts, plain)
        return plain.to(value.dtype)


def find_tied_quantizers(
    skeleton: PreTrainedModel, quantization: Quantization | None, ties: Sequence[Sequence[str]]
) -> dict[str, Quantizer]:
    """Return what `find_quantizers` does, under all names of tied weights.

    Args:
        skeleton: without adapters.
    """
    found = find_quantizers(skeleton, quantization)
    for names in ties:
        chosen = [found[name] for name in names if name in found]
        found |= dict.fromkeys(names, chosen[0]) if chosen else {}
    return found


def dequantize_model(model: PreTrainedModel, quantization: Quantization | None) -> None:
    """Give a plain model, in place, the numbers that its weights have once they are quantized and unpacked again."""
    quantized = QuantizedBase(find_quantizers(model, quantization))
    for name in quantized.quantizers:
        parameter = model.get_parameter(name)
        parameter.data = quantized.restore(name, parameter.data)


def quantize_weight(quantizer: Quantizer, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a whole weight."""
    numbers, scales = quantizer.quantize(values.contiguous().view(-1), values.shape)
    first = quantizer.parts(values.shape)[0]
    return [numbers.view(first.dtype).view(first.shape), *quantizer.keep_scales(scales)]
