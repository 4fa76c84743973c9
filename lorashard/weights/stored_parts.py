"""The parts of a weight that the files hold in a format that a base can be kept in, wherever they lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..quantization.format import Quantizer
from .segments import Run, Runs
from .stored_tensors import PackedTensor, count_numel


@dataclass(frozen=True)
class StoredParts:
    """A weight's format, and each of its parts as runs of stored elements."""

    quantizer: Quantizer
    runs: list[Runs]


def find_parts(source: Runs) -> StoredParts | None:
    """Return the parts of a weight that is made of packed ones, one after another; None where it is not.

    Of several weights in one, such as experts that are stored one by one, scales that are quantized are dequantized
    while they are read: each has a mean of its own.
    """
    packed = [run.stored for run in source.runs if isinstance(run.stored, PackedTensor)]
    if len(packed) != len(source.runs) or not packed:
        return None
    if len(packed) > 1 or math.prod(packed[0].shape) != source.numel:
        packed = [tensor.plain or tensor for tensor in packed]
    quantizer = packed[0].quantizer
    if any(tensor.quantizer != quantizer for tensor in packed) or not _has_whole_blocks(source, packed):
        return None
    parts = []
    for part in quantizer.parts(source.shape):
        runs = []
        for run, tensor in zip(source.runs, packed, strict=True):
            ratio = count_numel(quantizer, tensor.shape, part.name)
            whole = run.numel == math.prod(tensor.shape)
            numel = math.prod(tensor.parts[part.name].shape) if whole else math.ceil(run.numel / ratio)
            runs.append(Run(tensor.parts[part.name], run.begin // ratio, numel))
        if sum(run.numel for run in runs) != math.prod(part.shape) or runs[0].stored.dtype != part.dtype:
            return None
        parts.append(Runs(part.shape, runs))
    return StoredParts(quantizer, parts)


def _has_whole_blocks(source: Runs, packed: list[PackedTensor]) -> bool:
    """Tell whether every run begins with a block, and all but the last end with one."""
    for run, tensor in zip(source.runs, packed, strict=True):
        block = tensor.quantizer.block_numel(tensor.shape)
        if block != tensor.quantizer.block_numel(source.shape):
            return False
        if run.begin % block or (run.numel % block and run is not source.runs[-1]):
            return False
    return True
