"""Which weights of a base are quantized, and how a rank's part of one is quantized while it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..config.quantization_options import Quantization
from ..engine import Placeholder
from ..quantization.format import Quantizer, make_quantizer
from ..weights.weights import BaseWeights
from .units import LAYER, FoundWeight, Structure, find_structure

# Values that are quantized at a time.
PIECE_NUMEL = 4 * 2**20
_SCALE_BYTES = 4  # float32
# Where rows are shorter, their scales take the bytes that 8 bits save; models clamp some such weights in place.
_LEAST_ROW_NUMEL = 16

# For the index of a part: bytes [begin, end) of it, and where they go.
Wanted = Mapping[int, tuple[int, int, torch.Tensor]]


def quantize_structure(structure: Structure, quantization: Quantization | None) -> None:
    """Set the format that each weight is to be kept in: of linear weights of decoder layers, and of experts.

    A weight is linear if an `nn.Linear` (or GPT-2's `Conv1D`) owns it that is no router. It is experts' if it has three
    dimensions and its owner says that it holds experts. Convolutions, norms, biases, routers, other towers and weights
    with rows of fewer than 16 values stay as they are.
    """
    if quantization is None:
        return
    quantizer = make_quantizer(quantization)
    layers = [visit for visit in structure.visits if visit.unit.kind == LAYER]
    routers = {router for visit in layers for layer in visit.modules for router in _find_routers(layer)}
    vocabulary = _find_vocabulary(structure.roots) if quantization.has_vocabulary else set()
    for unit in structure.units:
        for weight in unit.weights:
            owners = {owner.module for owner in weight.owners}
            is_chosen = unit.kind == LAYER and (_is_linear(weight) or _is_experts(weight)) and not owners & routers
            is_chosen = is_chosen and weight.parameter.shape[-1] >= _LEAST_ROW_NUMEL
            if is_chosen or (weight.parameter.dim() == 2 and owners & vocabulary):
                weight.quantizer = quantizer


def is_stored_quantized(weights: BaseWeights) -> bool:
    """Return whether a checkpoint holds quantized weights whose bytes are kept as they are."""
    return weights.stored_format is not None and weights.stored_format.quantization is not None


def choose_quantizers(
    skeleton: nn.Module,
    weights: BaseWeights,
    quantization: Quantization | None,
    own: Mapping[str, nn.Parameter],
) -> dict[str, Quantizer]:
    """Return the formats that the weights of a base are kept in, by name: those of its files, if they are quantized.

    Modules that a quantized checkpoint leaves unquantized stay so.

    Args:
        skeleton: with placeholders, and without adapters.
        own: embeddings that come from an adapter's file, by name.
    """
    if is_stored_quantized(weights):
        return {name: quantizer for name, quantizer in weights.stored_quantizers().items() if name not in own}
    own_parameters = set(own.values())
    return find_quantizers(skeleton, quantization, lambda p: isinstance(p, Placeholder) or p in own_parameters)


def find_quantizers(
    model: nn.Module, quantization: Quantization | None, is_base: Callable[[nn.Parameter], bool] = lambda _: True
) -> dict[str, Quantizer]:
    """Return the formats of the weights of a model that are to be kept in one, by name.

    Args:
        model: without adapters, which may share or wrap modules.
        is_base: returns whether a parameter may be quantized.
    """
    if quantization is None:
        return {}
    structure = find_structure(model, is_base)
    quantize_structure(structure, quantization)
    weights = [weight for unit in structure.units for weight in unit.weights]
    return {weight.name: weight.quantizer for weight in weights if weight.quantizer is not None}


def _is_linear(weight: FoundWeight) -> bool:
    return weight.parameter.dim() == 2 and all(isinstance(o.module, (nn.Linear, Conv1D)) for o in weight.owners)


def _is_experts(weight: FoundWeight) -> bool:
    return weight.parameter.dim() == 3 and all(_holds_experts(owner.module) for owner in weight.owners)


def _holds_experts(module: nn.Module) -> bool:
    return hasattr(module, "num_experts") or "expert" in type(module).__name__.lower()


def _find_routers(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear modules beside experts with an output for each expert, or one for a shared expert."""
    for parent in layer.modules():
        counts = {child: _count_experts(child) for child in parent.children()}
        if any(counts.values()):
            for child in (child for child, count in counts.items() if not count):
                for module in child.modules():
                    if isinstance(module, nn.Linear) and module.out_features in {1, *counts.values()}:
                        yield module


def _count_experts(module: nn.Module) -> int:
    """Return how many experts a module holds, as a list of modules or in weights of three dimensions."""
    if isinstance(module, nn.ModuleList):
        return len(module) if all(any(True for _ in expert.children()) for expert in module) else 0
    module = _strip(module)
    sizes = [weight.shape[0] for weight in module.parameters(recurse=False) if weight.dim() == 3]
    return sizes[0] if sizes and _holds_experts(module) else 0


def _find_vocabulary(roots: Sequence[nn.Module]) -> set[nn.Module]:
    """Return the embedding and the LM head."""
    found: set[nn.Module] = set()
    for root in roots:
        for name in ("get_input_embeddings", "get_output_embeddings"):
            get = getattr(root, name, None)
            module = get() if get is not None else None
            found |= {_strip(module)} if module is not None else set()
    return found


def _strip(module: nn.Module) -> nn.Module:
    """Return a module without the adapters and trained copies around it."""
    for name in ("base_layer", "original_module"):
        if isinstance(inner := getattr(module, name, None), nn.Module):
            return _strip(inner)
    return module


def quantize_parts(
    quantizer: Quantizer,
    shape: Sequence[int],
    dtype: torch.dtype,
    wanted: Wanted,
    read: Callable[[int, int, torch.Tensor], None],
    device: torch.device,
    piece_numel: int = PIECE_NUMEL,
) -> None:
    """Quantize what a rank keeps of a weight, reading only the blocks that this needs.

    A rank needs the blocks of the values that it keeps, and those whose scales it keeps. If it keeps any scales that
    are quantized too, it needs all blocks, for their mean. Where a rank's bytes end inside a block, which a row of int8
    or fp8 may be, both ranks read that block.

    Args:
        wanted: what is kept of which part.
        read: reads bytes [begin, end) of the weight as it is before into a uint8 tensor on the host.
        device: where to compute.
        piece_numel: how many values to read and quantize at a time.

    Memory: `piece_numel` values at a time or one block if that is larger, and the scales of the weight.
    """
    block = quantizer.block_numel(shape)
    numel = math.prod(shape)
    values, *_ = quantizer.parts(shape)
    values_bytes = math.prod(values.shape) * values.dtype.itemsize
    per_byte = math.ceil(numel / values_bytes)  # 2 or 1; the last byte may have fewer
    kept_begin, kept_end, kept = wanted.get(0, (0, 0, torch.empty(0, dtype=torch.uint8)))
    own = range(kept_begin * per_byte // block, math.ceil(min(numel, kept_end * per_byte) / block))
    scaled = _find_scaled(quantizer, wanted, math.ceil(numel / block))
    scales = torch.zeros(math.ceil(numel / block), dtype=torch.float32, device=device) if scaled else None
    for first, last in _split([span for span in (own, scaled) if span], max(1, piece_numel // block)):
        begin, end = first * block, min(last * block, numel)
        raw = torch.empty((end - begin) * dtype.itemsize, dtype=torch.uint8)
        read(begin * dtype.itemsize, end * dtype.itemsize, raw)
        packed, of_blocks = quantizer.quantize(raw.view(dtype).to(device), shape)
        if scales is not None:
            scales[first:last] = of_blocks
        begin_byte = begin // per_byte
        low, high = max(kept_begin, begin_byte), min(kept_end, begin_byte + packed.numel())
        if low < high:
            kept[low - kept_begin : high - kept_begin].copy_(packed[low - begin_byte : high - begin_byte])
    if scales is not None:
        for index, part in enumerate(quantizer.keep_scales(scales), start=1):
            if index in wanted:
                begin, end, out = wanted[index]
                out.copy_(part.contiguous().reshape(-1).view(torch.uint8)[begin:end])


def _find_scaled(quantizer: Quantizer, wanted: Wanted, num_blocks: int) -> range:
    """Return the blocks whose scales are needed."""
    if not any(index > 0 for index in wanted):
        return range(0)
    if not quantizer.scales_are_separate:
        return range(num_blocks)
    begin, end, _ = wanted[1]
    return range(begin // _SCALE_BYTES, math.ceil(end / _SCALE_BYTES))


def _split(spans: Sequence[range], step: int) -> Iterator[tuple[int, int]]:
    """Yield what is in any of the spans as ranges of at most `step`, in order, nothing twice."""
    done = 0
    for span in sorted(spans, key=lambda span: span.start):
        for first in range(max(done, span.start), span.stop, step):
            yield first, min(first + step, span.stop)
        done = max(done, span.stop)
