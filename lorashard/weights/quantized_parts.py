"""The stored parts of a weight that the files hold in a format in which a base can be kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..quantization.format import Quantizer
from .computed_tensors import QuantizedTensor, count_numel
from .segments import Segment, SegmentedTensor


@dataclass(frozen=True)
class QuantizedParts:
    """A weight's format, and each of its parts."""

    quantizer: Quantizer
    parts: list[SegmentedTensor]


def find_quantized_parts(weight: SegmentedTensor) -> QuantizedParts | None:
    """Return the parts of a weight that consists of quantized tensors, one after another; None for other weights.

    Where several stored weights are one in the model, such as experts that are stored one by one, nested scales are
    dequantized while they are read: each weight has its own mean.
    """
    stored = [segment.stored for segment in weight.segments if isinstance(segment.stored, QuantizedTensor)]
    if len(stored) != len(weight.segments) or not stored:
        return None
    if len(stored) > 1 or math.prod(stored[0].shape) != weight.numel:
        stored = [tensor.plain or tensor for tensor in stored]
    quantizer = stored[0].quantizer
    if any(tensor.quantizer != quantizer for tensor in stored) or not _has_complete_blocks(weight, stored):
        return None
    parts = []
    for part in quantizer.parts(weight.shape):
        segments = []
        for segment, tensor in zip(weight.segments, stored, strict=True):
            ratio = count_numel(quantizer, tensor.shape, part.name)
            is_complete = segment.numel == math.prod(tensor.shape)
            numel = math.prod(tensor.parts[part.name].shape) if is_complete else math.ceil(segment.numel / ratio)
            segments.append(Segment(tensor.parts[part.name], segment.begin // ratio, numel))
        if sum(segment.numel for segment in segments) != math.prod(part.shape):
            return None
        if segments[0].stored.dtype != part.dtype:
            return None
        parts.append(SegmentedTensor(part.shape, segments))
    return QuantizedParts(quantizer, parts)


def _has_complete_blocks(weight: SegmentedTensor, stored: list[QuantizedTensor]) -> bool:
    """Tell whether every segment begins with a block, and all but the last end with one."""
    for segment, tensor in zip(weight.segments, stored, strict=True):
        block = tensor.quantizer.block_numel(tensor.shape)
        if block != tensor.quantizer.block_numel(weight.shape):
            return False
        if segment.begin % block or (segment.numel % block and segment is not weight.segments[-1]):
            return False
    return True
