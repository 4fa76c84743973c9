"""What it takes to unpack a quantized weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..quantization.format import Quantizer
from .tracker import Tracker, Unpacking, Work


def measure_unpacking(quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, device_type: str) -> Unpacking:
    """Return what unpacking a weight takes, measured on tensors without values.

    On a GPU every format is assumed to have a kernel that reads the parts and writes the values, and no more than that.
    The memory is that of torch's own operations, should there be no kernel after all.
    """
    parts = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in quantizer.parts(shape)]
    out = torch.empty(tuple(shape), dtype=dtype, device="meta")
    item = None
    if len(shape) > 2 and quantizer.select(parts, shape, 0) is not None:
        item = measure_unpacking(quantizer, shape[1:], dtype, device_type)
    with Tracker([*parts, out]) as tracker:
        quantizer.unpack(parts, out)
    moved_bytes = sum(tensor.nbytes for tensor in (*parts, out))
    work = Work(0.0, moved_bytes, 1) if device_type == "cuda" else tracker.work
    return Unpacking(math.prod(shape), out.nbytes, tracker.peak_bytes, work, item)
