"""Where the numbers of a base come from, and how a rank's part of a unit is filled with them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch

from ..engine import Layout, Placeholder, plan_layout
from ..weights.weights import BaseWeights
from .quantizing import PIECE_NUMEL, quantize_parts
from .units import LAYER, FoundUnit, FoundWeight


class Source(Protocol):
    """Gives any range of any weight's bytes."""

    def unit(self, unit: FoundUnit) -> AbstractContextManager[None]:
        """Entered while a unit is filled, for what is prepared and dropped a unit at a time."""
        ...

    def fill(self, weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor, part: int = 0) -> None:
        """Write bytes [begin_byte, end_byte) of a weight to `out`, uint8 on the host.

        Args:
            part: of a weight that rests quantized where it comes from, which of its parts.
        """
        ...

    def has_parts(self, weight: FoundWeight) -> bool:
        """Tell whether a weight rests in its own format where it comes from."""
        ...


class MemorySource:
    """A model that is already in memory."""

    def unit(self, unit: FoundUnit) -> AbstractContextManager[None]:
        return nullcontext()

    def has_parts(self, weight: FoundWeight) -> bool:
        return False

    def fill(self, weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor, part: int = 0) -> None:
        flat = weight.parameter.detach().contiguous().view(-1).view(torch.uint8)
        out.copy_(flat[begin_byte:end_byte])


class CheckpointSource(MemorySource):
    """A checkpoint's files, for all but what the model has in memory and they have not: a new head."""

    def __init__(self, weights: BaseWeights) -> None:
        self._weights = weights

    def unit(self, unit: FoundUnit) -> AbstractContextManager[None]:
        return self._weights.unit([w.name for w in unit.weights if isinstance(w.parameter, Placeholder)])

    def fill(self, weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor, part: int = 0) -> None:
        if self.has_parts(weight):
            self._weights.read_part_range(weight.name, part, begin_byte, end_byte, out)
        elif isinstance(weight.parameter, Placeholder):
            self._weights.read_range(weight.name, begin_byte, end_byte, out)
        else:
            super().fill(weight, begin_byte, end_byte, out)

    def has_parts(self, weight: FoundWeight) -> bool:
        return weight.quantizer is not None and self._weights.stored_quantizer(weight.name) == weight.quantizer


def plan_unit(unit: FoundUnit, num_shards: int) -> Layout:
    """Return where the weights of a unit, or the parts of those that are quantized, sit in its buffer."""
    parts = [
        (w.name if not p.name else f"{w.name}.{p.name}", p.dtype, p.shape) for w in unit.weights for p in w.parts()
    ]
    return plan_layout(parts, num_shards)


def fill_shard(
    shard: torch.Tensor,
    layout: Layout,
    unit: FoundUnit,
    source: Source,
    rank: int,
    device: torch.device | None = None,
    piece_numel: int = PIECE_NUMEL,
) -> None:
    """Fill the shard of `rank`, reading nothing but what its bytes are made of.

    That are these bytes themselves, or, of weights that are quantized while they are read, the blocks of its numbers
    and of its scales. Shards are cut at multiples of 256 bytes, so no block of nf4 straddles; a row of int8 or fp8 may,
    and both ranks read it. Scales lie behind the numbers of their weight: a rank may have some of numbers that others
    keep, so all ranks together read a unit at most twice, and a row at each cut.

    Args:
        device: where weights are quantized; the default is where the shard is.
        piece_numel: how many numbers are quantized at a time.

    Memory: on CUDA one weight's part on the host at a time; of a weight that is quantized while it is read, see
        `quantize_parts`.
    """
    numbered = [(weight, number) for weight in unit.weights for number in range(len(weight.parts()))]
    place_of = dict(zip(layout.fields, numbered, strict=True))
    wanted: dict[str, dict[int, tuple[int, int, torch.Tensor]]] = {}
    for piece in layout.pieces(rank):
        weight, number = place_of[piece.field]
        target = shard[piece.shard_byte : piece.shard_byte + piece.end_byte - piece.begin_byte]
        wanted.setdefault(weight.name, {})[number] = (piece.begin_byte, piece.end_byte, target)
    with source.unit(unit):
        for weight in unit.weights:
            parts = wanted.get(weight.name, {})
            if weight.quantizer is None or source.has_parts(weight):
                for number, (begin, end, target) in parts.items():
                    staging = target if shard.device.type == "cpu" else torch.empty(end - begin, dtype=torch.uint8)
                    source.fill(weight, begin, end, staging, number)
                    if staging is not target:
                        target.copy_(staging)
            elif parts:
                like = weight.parameter
                read = partial(source.fill, weight)
                place = device or shard.device
                quantize_parts(weight.quantizer, like.shape, like.dtype, parts, read, place, piece_numel)


def read_weight(weight: FoundWeight, source: Source, device: torch.device) -> torch.Tensor:
    """Return the numbers that a weight is computed with: of one that is quantized, what its parts unpack to.

    Memory: the weight, and what it is read from.
    """
    unit = FoundUnit(weight.name, LAYER, [weight])
    layout = plan_unit(unit, 1)
    whole = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    fill_shard(whole, layout, unit, source, 0, device)
    parts = [whole[f.begin_byte : f.begin_byte + f.num_bytes].view(f.dtype).view(f.shape) for f in layout.fields]
    if weight.quantizer is None:
        return parts[0]
    out = torch.empty(weight.parameter.shape, dtype=weight.parameter.dtype, device=device)
    weight.quantizer.unpack(parts, out)
    return out
