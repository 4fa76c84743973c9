"""Where the numbers of a base come from, and how a rank's part of a unit is filled with them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ..engine import Layout, Placeholder, plan_layout
from .units import FoundUnit, FoundWeight
from .weights import BaseWeights


class Source(Protocol):
    """Gives any range of any weight's bytes."""

    def unit(self, unit: FoundUnit) -> AbstractContextManager[None]:
        """Entered while a unit is filled, for what is prepared and dropped a unit at a time."""
        ...

    def fill(self, weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor) -> None:
        """Write bytes [begin_byte, end_byte) of a weight to `out`, uint8 on the host."""
        ...


class MemorySource:
    """A model that is already in memory."""

    def unit(self, unit: FoundUnit) -> AbstractContextManager[None]:
        return nullcontext()

    def fill(self, weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor) -> None:
        flat = weight.parameter.detach().contiguous().view(-1).view(torch.uint8)
        out.copy_(flat[begin_byte:end_byte])


class CheckpointSource(MemorySource):
    """A checkpoint's files, for all but what the model has in memory and they have not: a new head."""

    def __init__(self, weights: BaseWeights) -> None:
        self._weights = weights

    def unit(self, unit: FoundUnit) -> AbstractContextManager[None]:
        return self._weights.unit([w.name for w in unit.weights if isinstance(w.parameter, Placeholder)])

    def fill(self, weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor) -> None:
        if isinstance(weight.parameter, Placeholder):
            self._weights.read_range(weight.name, begin_byte, end_byte, out)
        else:
            super().fill(weight, begin_byte, end_byte, out)


def plan_unit(unit: FoundUnit, num_shards: int) -> Layout:
    """Return where the weights of a unit sit in its buffer."""
    return plan_layout([(w.name, w.parameter.dtype, w.parameter.shape) for w in unit.weights], num_shards)


def fill_shard(shard: torch.Tensor, layout: Layout, unit: FoundUnit, source: Source, rank: int) -> None:
    """Fill the shard of `rank`, reading nothing but its bytes.

    Memory: on CUDA one weight's part on the host at a time.
    """
    weights = {weight.name: weight for weight in unit.weights}
    with source.unit(unit):
        for piece in layout.pieces(rank):
            num_bytes = piece.end_byte - piece.begin_byte
            target = shard[piece.shard_byte : piece.shard_byte + num_bytes]
            staging = target if shard.device.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8)
            source.fill(weights[piece.field.name], piece.begin_byte, piece.end_byte, staging)
            if staging is not target:
                target.copy_(staging)
