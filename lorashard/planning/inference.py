"""Where a base rests when nothing is trained on it: whole if it fits, else as much of it as does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from ..config.placement import PlacementOptions, ResolvedPlacement, choose_group_size, resolve_placement
from ..runtime import dist
from ..runtime.dtypes import name_of
from ..runtime.launch_env import read_launcher_env
from .auto import BaseModel
from .probe import measure_free_bytes
from .size import ModelSize, find_stored_dtype, measure_model

_HEADROOM_BYTES = 2**30


def plan_inference(
    base: BaseModel, options: PlacementOptions, device: torch.device, num_cached_tokens: int
) -> ResolvedPlacement:
    """Return one placement on all ranks, for the memory that is free on them.

    Args:
        num_cached_tokens: tokens of all rows in the key-value cache.

    Ranks: collective over all ranks.
    """
    base, _ = base.settle()
    model = base.build(options.unit_paths)
    env = read_launcher_env()
    world_size = dist.get_world_size()
    free_bytes = measure_free_bytes(device, (env and env.local_world_size) or world_size)
    return place_for_inference(
        options,
        measure_model(model, base.quantization, base.stored),
        device.type,
        min(dist.gather_objects(free_bytes)),
        num_cached_tokens * count_cache_bytes(model.config, base.dtype),
        world_size,
        dist.find_node_size(),
        is_cast=find_stored_dtype(base.model_name_or_path, base.revision) not in (None, name_of(base.dtype)),
    )


def count_cache_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes that a token of one row takes in a key-value cache that keeps all tokens of all layers."""
    text = config.get_text_config()
    queries = getattr(text, "num_attention_heads", 0)
    if not queries:  # a model without attention keeps a state, however many tokens there are
        return 0
    heads = getattr(text, "num_key_value_heads", None) or queries
    width = getattr(text, "head_dim", None) or text.hidden_size // queries
    return 2 * text.num_hidden_layers * heads * width * dtype.itemsize


def place_for_inference(
    options: PlacementOptions,
    size: ModelSize,
    device_type: str,
    free_bytes: int,
    reserve_bytes: int,
    world_size: int,
    node_size: int | None,
    *,
    is_cast: bool = False,
) -> ResolvedPlacement:
    """Return the placement with the fewest gathers that fits, among those that `options` leave open.

    A base that fits each device is whole there, and ranks need not wait for one another. On a CPU, whose parameters
    are the files' own pages, `file` is that, unless a copy of the base would have to be written in another dtype.

    Args:
        free_bytes: of the device with the least.
        reserve_bytes: for the key-value cache and activations.
        is_cast: whether the base computes in another dtype than its files have.
    """
    spare_bytes = free_bytes - reserve_bytes - size.adapter_bytes - size.workspace_bytes - _HEADROOM_BYTES
    if options.combine()["placement"] == "auto":
        groups = [choose_group_size(options.combine()["shard_group_size"], world_size, node_size)]
        if options.combine()["shard_group_size"] is None:
            groups.append(world_size)  # through the network, if a node cannot hold the base
        chosen, group_size = _choose(size, device_type, spare_bytes, groups, is_cast)
        if chosen in ("replicate", "file") or group_size != groups[0]:
            options = options.model_copy(update={"shard_group_size": group_size})
        options = options.model_copy(update={"placement": chosen})
    if options.combine()["resident_layers"] == "auto" and options.combine()["placement"] != "replicate":
        group_size = resolve_placement(options, world_size, node_size).group_size
        is_in_memory = options.combine()["placement"] == "shard"
        count = _count_resident(size, spare_bytes, group_size, is_in_memory, options.prefetch)
        is_free = options.combine()["placement"] == "file" and device_type == "cpu"
        options = options.model_copy(update={"resident_layers": 0 if is_free else count})
    return resolve_placement(options, world_size, node_size)


def _choose(
    size: ModelSize, device_type: str, spare_bytes: int, groups: Sequence[int], is_cast: bool
) -> tuple[str, int | None]:
    """Return a placement, and the first of `groups` that it fits, if it shards."""
    if device_type == "cpu" and not is_cast:
        return "file", None
    if size.base_bytes <= spare_bytes:
        return "replicate", None
    if device_type == "cpu":
        return "file", None
    for group_size in groups:
        shard_bytes = sum(unit.shard_bytes(group_size) for unit in size.units)
        if group_size > 1 and shard_bytes + _slot_bytes(size, 1) <= spare_bytes:
            return "shard", group_size
    return "file", None


def _count_resident(size: ModelSize, spare_bytes: int, group_size: int, is_in_memory: bool, prefetch: int) -> int:
    """Return how many decoder layers can stay whole beside what rests on the device and the slots."""
    rest_bytes = sum(unit.shard_bytes(group_size) for unit in size.units) if is_in_memory else 0
    spare_bytes -= rest_bytes + _slot_bytes(size, prefetch)
    largest = max(size.layers, key=lambda unit: unit.total_bytes(1))
    extra_bytes = largest.total_bytes(1) - (largest.shard_bytes(group_size) if is_in_memory else 0)
    return max(0, min(len(size.layers), spare_bytes // max(1, extra_bytes)))


def _slot_bytes(size: ModelSize, prefetch: int) -> int:
    layers = [unit.total_bytes(1) for unit in size.layers]
    others = [unit.total_bytes(1) for unit in size.units if unit not in size.layers]
    return (2 + prefetch) * max(layers) + max(others, default=0)
