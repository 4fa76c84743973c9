"""The values that an adapter of a quantized base was trained on: the base's own, quantized and dequantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..config.quantization_options import Quantization
from ..model.quantizing import find_quantizers
from ..quantization.format import Quantizer
from ..weights.stored_formats import settle_quantization
from ..weights.weights import BaseWeights


@dataclass(frozen=True)
class QuantizedBase:
    """Which of a base's weights were quantized, by name.

    Attributes:
        dtypes: for a dtype of the merged model, the one of training: that of weights before they are quantized, and of
            their dequantized values.
    """

    quantizers: Mapping[str, Quantizer] = field(default_factory=dict)
    dtypes: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)

    def restore(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the values that training computed with, in the dtype of `value`; others are returned as they are.

        Memory: the quantized weight, and what its format takes for a piece of it.
        """
        quantizer = self.quantizers.get(name)
        if quantizer is None:
            return value
        plain = value.to(self.dtypes.get(value.dtype, value.dtype))
        parts = quantize_weight(quantizer, plain)
        quantizer.unpack(parts, plain)
        return plain.to(value.dtype)


def find_quantized(
    skeleton: PreTrainedModel,
    weights: BaseWeights,
    quantization: Quantization | None,
    ties: Sequence[Sequence[str]],
    dtypes: Mapping[torch.dtype, torch.dtype] | None = None,
) -> QuantizedBase:
    """Return which weights of a base were quantized when they were read, under all names of tied ones.

    Args:
        skeleton: without adapters.
        weights: of the base's files; where these are stored quantized, reading dequantizes them.
        ties: names that stand for one tensor.
        dtypes: see `QuantizedBase`.
    """
    stored = weights.stored_format
    quantization = settle_quantization(stored, quantization, skeleton.config.name_or_path)
    if stored is not None and stored.quantization is not None:
        return QuantizedBase()
    found = find_quantizers(skeleton, quantization)
    for names in ties:
        chosen = [found[name] for name in names if name in found]
        found |= dict.fromkeys(names, chosen[0]) if chosen else {}
    return QuantizedBase(found, dtypes or {})


def dequantize_model(model: PreTrainedModel, quantization: Quantization | None) -> None:
    """Give a plain model, in place, the values that its weights have once they are quantized and dequantized."""
    quantized = QuantizedBase(find_quantizers(model, quantization))
    for name in quantized.quantizers:
        parameter = model.get_parameter(name)
        parameter.data = quantized.restore(name, parameter.data)


def quantize_weight(quantizer: Quantizer, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a weight."""
    numbers, scales = quantizer.quantize(values.contiguous().view(-1), values.shape)
    first = quantizer.parts(values.shape)[0]
    return [numbers.view(first.dtype).view(first.shape), *quantizer.keep_scales(scales)]
