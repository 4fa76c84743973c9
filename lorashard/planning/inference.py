"""Where a base rests when nothing is trained on it: as much of it on each device as fits."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from ..config.placement import PlacementOptions, ResolvedPlacement, choose_group_size, resolve_placement
from ..runtime import dist
from ..runtime.dtypes import name_of
from ..runtime.launch_env import read_launcher_env
from .auto import BaseModel
from .memory import add_resident_layers, place_base
from .probe import measure_free_bytes
from .size import ModelSize, find_stored_dtype, measure_model

_HEADROOM_BYTES = 2**30


def plan_inference(
    base: BaseModel, options: PlacementOptions, device: torch.device, num_cached_tokens: int
) -> ResolvedPlacement:
    """Return one placement on all ranks, for the memory that is free on them.

    Args:
        num_cached_tokens: tokens of all sequences in the key-value cache.

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
    """Return the bytes that a token of one sequence takes in a key-value cache that keeps all tokens of all layers."""
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

    A base that fits each device is replicated, and ranks need not wait for one another. On a CPU, whose parameters
    are the files' own pages, `file` does the same, unless a copy of the base would have to be written in another dtype.

    Args:
        free_bytes: of the device with the least.
        reserve_bytes: for the key-value cache and activations.
        is_cast: whether the base computes in another dtype than its files have.
    """
    spare_bytes = free_bytes - reserve_bytes - size.adapter_bytes - size.workspace_bytes - _HEADROOM_BYTES

    def fits(placement: ResolvedPlacement) -> bool:
        return place_base(size, placement, device_type).device_bytes <= spare_bytes

    def resolve(**chosen: Any) -> ResolvedPlacement:
        return resolve_placement(options.model_copy(update=chosen), world_size, node_size)

    meant = options.combine()
    resolved = None
    if meant["placement"] != "auto":
        resolved = resolve()
    elif device_type != "cpu" or is_cast:
        candidates: list[dict[str, Any]] = [{"placement": "replicate", "shard_group_size": None}]
        if device_type != "cpu":
            group_size = choose_group_size(meant["shard_group_size"], world_size, node_size)
            candidates += [{"placement": "shard"}] if group_size > 1 else []
            if meant["shard_group_size"] is None and world_size > group_size:
                # through the network, if a node cannot hold the base
                candidates.append({"placement": "shard", "shard_group_size": world_size})
        resolved = next(filter(fits, (resolve(**chosen) for chosen in candidates)), None)
    resolved = resolved or resolve(placement="file", shard_group_size=None)
    is_mapped = resolved.placement == "file" and device_type == "cpu"
    if meant["resident_layers"] != "auto" or resolved.placement == "replicate" or is_mapped:
        return resolved
    return add_resident_layers(size, resolved, fits) or resolved
