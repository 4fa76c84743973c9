"""Put the units of a model under an engine: fill this rank's shards, replace the weights by placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from peft import PeftModel
from torch import nn

from ..dist import ShardGroup
from ..engine import DeviceHome, Engine, Layout, Placeholder, Unit, Visit, Weight, plan_layout
from .units import EMBEDDING, HEAD, LAYER, FoundUnit, FoundWeight, Structure

# (weight, begin byte, end byte, uint8 tensor on the host to fill)
Fill = Callable[[FoundWeight, int, int, torch.Tensor], None]

ENGINE_ATTRIBUTE = "_lorashard_engine"


def shard_structure(
    model: nn.Module,
    structure: Structure,
    fill: Fill,
    group: ShardGroup,
    device: torch.device,
    prefetch: int,
    around_unit: Callable[[FoundUnit], AbstractContextManager] = lambda unit: nullcontext(),
) -> Engine:
    """Give every unit of `structure` a home, fill it, and let an engine run `model`.

    Args:
        fill: writes a range of a weight's bytes; asked only for this rank's ranges, one unit after another.
        around_unit: entered while a unit is filled, for sources that prepare and drop things a unit at a time.

    Ranks: local, but every rank must do the same.
    Memory: the shards, and never more than one unit beside them.
    """
    units: dict[int, Unit] = {}
    for index, found in enumerate(structure.units):
        layout = plan_layout([(w.name, w.parameter.dtype, w.parameter.shape) for w in found.weights], group.size)
        home = DeviceHome(layout, group, device)
        with around_unit(found):
            _fill_shard(home.shard, layout, {w.name: w for w in found.weights}, fill, group.rank)
        weights = [Weight(_placeholder_for(w, device), w.owners) for w in found.weights]
        size_class = LAYER if found.kind == LAYER else "vocabulary"
        units[id(found)] = Unit(found.name, index, size_class, weights, home)
        found.weights = []  # the whole weights are free to go
    visits = [
        Visit(units[id(v.unit)], tuple(v.modules), holds=v.kind == HEAD, has_backward=v.kind != EMBEDDING)
        for v in structure.visits
    ]
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine = Engine(visits, structure.roots, trainable, group, device, prefetch)
    setattr(model, ENGINE_ATTRIBUTE, engine)
    if isinstance(model, PeftModel):
        # PEFT's default also writes an embedding that an adapter targets; a frozen one is in the base's own files.
        model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False)
    # accelerate and Trainer may wrap the model in DDP: it must neither broadcast nor look at the base.
    model._ddp_params_and_buffers_to_ignore = list(_base_names(model, engine))  # type: ignore[assignment]
    return engine


def fill_from_memory(weight: FoundWeight, begin_byte: int, end_byte: int, out: torch.Tensor) -> None:
    """Fill from the parameter itself, for a model that is already in memory."""
    flat = weight.parameter.detach().contiguous().view(-1).view(torch.uint8)
    out.copy_(flat[begin_byte:end_byte])


def _fill_shard(shard: torch.Tensor, layout: Layout, weights: dict[str, FoundWeight], fill: Fill, rank: int) -> None:
    for piece in layout.pieces(rank):
        num_bytes = piece.end_byte - piece.begin_byte
        target = shard[piece.shard_byte : piece.shard_byte + num_bytes]
        staging = target if shard.device.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8)
        fill(weights[piece.field.name], piece.begin_byte, piece.end_byte, staging)
        if staging is not target:
            target.copy_(staging)


def _placeholder_for(weight: FoundWeight, device: torch.device) -> Placeholder:
    return Placeholder(weight.name, weight.parameter.shape, weight.parameter.dtype, device)


def _base_names(model: nn.Module, engine: Engine) -> Iterator[str]:
    base = {(owner.module, owner.attribute) for unit in engine.units for w in unit.weights for owner in w.owners}
    adapter_modules = {module for module in model.modules() if any(p.requires_grad for p in module.parameters(False))}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for attribute in module._parameters:
            if (module, attribute) in base:
                yield prefix + attribute
        if module not in adapter_modules:
            for attribute in module._buffers:
                yield prefix + attribute
