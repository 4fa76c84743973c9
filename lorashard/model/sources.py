"""Where the values of a base come from, and how a rank's shard of a unit is filled with them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import nn

from ..engine import Layout, Placeholder, plan_layout
from ..quantization.format import Quantizer
from ..weights.weights import BaseWeights
from .quantizing import PIECE_NUMEL, quantize_parts
from .units import LAYER, FoundUnit, FoundWeight


class MemorySource:
    """Gives any range of any weight's bytes: those of a model in memory."""

    def unit(self, unit: FoundUnit) -> AbstractContextManager[None]:
        """Return a context to fill a unit in, for what is converted a unit at a time."""
        return nullcontext()

    def has_parts(self, weight: FoundWeight) -> bool:
        """Return whether a weight is stored in the format that it is to be kept in."""
        return False

    def fill(self, weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor, part: int = 0) -> None:
        """Write bytes [begin_byte, end_byte) of a weight to `out`, uint8 on the host.

        Args:
            part: the index of the part, of a weight that is stored quantized.
        """
        flat = weight.parameter.detach().contiguous().view(-1).view(torch.uint8)
        out.copy_(flat[begin_byte:end_byte])


class CheckpointSource(MemorySource):
    """A checkpoint's files, and the model in memory for what they lack: a new head."""

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
    """Return the places of a unit's weights, or of the parts of those that are quantized, in its buffer."""
    parts = [
        (w.name if not p.name else f"{w.name}.{p.name}", p.dtype, p.shape) for w in unit.weights for p in w.parts()
    ]
    return plan_layout(parts, num_shards)


def fill_shard(
    shard: torch.Tensor,
    layout: Layout,
    unit: FoundUnit,
    source: MemorySource,
    rank: int,
    device: torch.device | None = None,
    piece_numel: int = PIECE_NUMEL,
) -> None:
    """Fill the shard of `rank`, reading only what its bytes are made of.

    These are the same bytes of the source, or, of weights that are quantized while they are read, the blocks of its
    values and of its scales. Shards end at multiples of 256 bytes, so no block of nf4 straddles two; a row of int8 or
    fp8 may, and both ranks read it. Scales lie behind the values of their weight: a rank may have scales of values that
    others keep, so all ranks together read a unit at most twice, and a row at each boundary.

    Args:
        device: where weights are quantized; the default is where the shard is.
        piece_numel: how many values are quantized at a time.

    Memory: on CUDA one weight's part on the host at a time; of a weight that is quantized while it is read, see
        `quantize_parts`.
    """
    parts_of_fields = [(weight, part) for weight in unit.weights for part in range(len(weight.parts()))]
    place_of = dict(zip(layout.fields, parts_of_fields, strict=True))
    wanted: dict[str, dict[int, tuple[int, int, torch.Tensor]]] = {}
    for piece in layout.pieces(rank):
        weight, part = place_of[piece.field]
        target = shard[piece.shard_byte : piece.shard_byte + piece.end_byte - piece.begin_byte]
        wanted.setdefault(weight.name, {})[part] = (piece.begin_byte, piece.end_byte, target)
    with source.unit(unit):
        for weight in unit.weights:
            parts = wanted.get(weight.name, {})
            if weight.quantizer is None or source.has_parts(weight):
                for part, (begin, end, target) in parts.items():
                    staging = target if shard.device.type == "cpu" else torch.empty(end - begin, dtype=torch.uint8)
                    source.fill(weight, begin, end, staging, part)
                    if staging is not target:
                        target.copy_(staging)
            elif parts:
                like = weight.parameter
                read = partial(source.fill, weight)
                place = device or shard.device
                quantize_parts(weight.quantizer, like.shape, like.dtype, parts, read, place, piece_numel)


def read_weight(weight: FoundWeight, source: MemorySource, device: torch.device) -> torch.Tensor:
    """Return the values that a weight is computed with: those of a quantized one are what it dequantizes to.

    Memory: the weight, and what it is read from.
    """
    unit = FoundUnit(weight.name, LAYER, [weight])
    layout = plan_unit(unit, 1)
    buffer = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    fill_shard(buffer, layout, unit, source, 0, device)
    parts = [buffer[f.begin_byte : f.begin_byte + f.num_bytes].view(f.dtype).view(f.shape) for f in layout.fields]
    if weight.quantizer is None:
        return parts[0]
    out = torch.empty(weight.parameter.shape, dtype=weight.parameter.dtype, device=device)
    weight.quantizer.unpack(parts, out)
    return out


def read_as_quantized(
    skeleton: nn.Module, quantizers: Mapping[str, Quantizer], weights: BaseWeights, device: torch.device
) -> None:
    """Let the readers of weights that are to be quantized return the values that are computed with.

    Adapters that read the base when they are made, such as DoRA and `modules_to_save`, begin from these.
    """
    source = CheckpointSource(weights)
    for placeholder in skeleton.parameters():
        if isinstance(placeholder, Placeholder) and placeholder.full_name in quantizers:
            name = placeholder.full_name
            weight = FoundWeight(name, cast(nn.Parameter, placeholder), quantizer=quantizers[name])
            placeholder.reader = partial(read_weight, weight, source, device)
