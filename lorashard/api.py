"""The door for scripts: load or shard a model, ask what it did."""

from __future__ import annotations

from typing import Literal

import torch
from peft import PeftModel

from . import dist
from .engine import Engine, Stats
from .errors import ConfigError
from .model.adapters import base_test
from .model.sharding import ENGINE_ATTRIBUTE, fill_from_memory, shard_structure
from .model.units import find_structure

Placement = Literal["shard", "replicate"]


def shard(
    model: PeftModel, placement: Placement = "shard", prefetch: int = 1, device: torch.device | None = None
) -> PeftModel:
    """Shard the frozen base of a PeftModel that is already in memory, in place, and return it.

    Args:
        model: every rank holds the same base; adapters may differ and are overwritten by rank 0's.
        placement: `shard` keeps 1/W of the base on each of W ranks; `replicate` keeps all of it on each.
        prefetch: how many units ahead to gather.
        device: where this rank computes; the default is the GPU of its local rank, or the CPU.

    Raises:
        ConfigError: an unknown placement, or ranks that accelerate does not see.
        CheckpointError: the model's structure is not recognised.

    Ranks: collective over all ranks.
    Memory: the model as it is at first; the whole weights are freed a unit at a time.
    """
    device = device or dist.choose_device()
    dist.init_from_launcher(device)
    dist.check_world_size()
    structure = find_structure(model, base_test(model))
    shard_structure(model, structure, fill_from_memory, make_group(placement), device, prefetch)
    model.to(device)
    dist.broadcast_(parameter.data for parameter in model.parameters() if parameter.requires_grad)
    return model


def stats(model: torch.nn.Module) -> Stats:
    """Return what the engine of a model from `load` or `shard` has gathered, waited for and holds on this rank."""
    return engine_of(model).stats()


def engine_of(model: torch.nn.Module) -> Engine:
    """Return the engine that runs `model`.

    Raises:
        ConfigError: the model did not come from `load` or `shard`.
    """
    for module in model.modules():
        engine = module.__dict__.get(ENGINE_ATTRIBUTE)
        if engine is not None:
            return engine
    raise ConfigError(
        f"this {type(model).__name__} is not sharded: expected one from lorashard.load or lorashard.shard"
    )


def make_group(placement: Placement) -> dist.ShardGroup:
    """Return the ranks that `placement` shards a unit over.

    Ranks: collective over all ranks.
    """
    if placement == "shard":
        return dist.ShardGroup.over_all_ranks()
    if placement == "replicate":
        return dist.ShardGroup()
    raise ConfigError(f"placement: expected 'shard' or 'replicate', found '{placement}'")
