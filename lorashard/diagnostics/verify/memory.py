"""How much of a model fits as a whole beside its gradients, and memory given back between two models."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from ...config.placement import ResolvedPlacement
from ...errors import ConfigError, UserError
from ...planning.auto import BaseModel
from ...planning.probe import measure_free_bytes
from ...planning.size import ModelSize, measure_model
from ...planning.trace import Microbatch, trace
from ...runtime import dist
from ...runtime.launch_env import read_launcher_env

_HEADROOM_BYTES = 2**30


@dataclass(frozen=True)
class Fit:
    """How many decoder layers are compared.

    Attributes:
        whole_bytes: what comparing all of them would take, at the fullest moment.
        note: what the arithmetic does not know.
    """

    num_layers: int
    num_whole_layers: int
    whole_bytes: int
    free_bytes: int
    note: str | None = None


def fit_layers(base: BaseModel, microbatch: Microbatch, placement: ResolvedPlacement, device: torch.device) -> Fit:
    """Return how many layers fit, unsharded on rank 0 and then sharded on all ranks; the same on all ranks.

    Raises:
        UserError: not even one layer does, or the model cannot be found.

    Ranks: collective over all ranks; rank 0 reckons.
    """
    free_bytes = min(dist.gather_objects(measure_free_bytes(device, 1)))
    outcome: Fit | UserError | None = None
    if dist.get_rank() == 0:
        try:
            outcome = _fit(base, microbatch, placement, device.type, free_bytes)
        except UserError as error:
            outcome = error
    outcome = dist.broadcast_object(outcome)
    if isinstance(outcome, UserError):
        raise outcome
    assert outcome is not None
    return outcome


def _fit(
    base: BaseModel, microbatch: Microbatch, placement: ResolvedPlacement, device_type: str, free_bytes: int
) -> Fit:
    env = read_launcher_env()
    ranks_per_node = (env and env.local_world_size) or dist.get_world_size()
    ranks_on_device = ranks_per_node if device_type == "cpu" else 1
    size = measure_model(base.build(placement.unit_paths))
    note = None
    try:
        activation_bytes = trace(base.build(placement.unit_paths), microbatch).peak_bytes
    except ConfigError as error:
        activation_bytes, note = 0, f"activations could not be foreseen: {error}"
    beside_bytes = activation_bytes + 2 * size.adapter_bytes  # each adapter parameter has a gradient

    def measure(num_layers: int) -> int:
        plain_bytes = _base_bytes(size, num_layers) + beside_bytes
        sharded_bytes = _rest_bytes(size, num_layers, placement, device_type) + beside_bytes
        return max(plain_bytes, ranks_on_device * sharded_bytes)

    total = len(size.layers)
    fitting = [count for count in range(1, total + 1) if measure(count) <= free_bytes - _HEADROOM_BYTES]
    if not fitting:
        raise ConfigError(
            f"{base.model_name_or_path}: the embedding, one layer and the head take {_gib(measure(1))} with "
            f"activations, and {_gib(free_bytes)} are free (1 GiB of it for the rest): nothing can be compared with an "
            "unsharded model here; give fewer --num_rows, or free memory"
        )
    return Fit(fitting[-1], total, measure(total), free_bytes, note)


def _base_bytes(size: ModelSize, num_layers: int) -> int:
    layers = size.layers[:num_layers]
    return sum(unit.total_bytes(1) for unit in size.units if unit not in size.layers or unit in layers)


def _rest_bytes(size: ModelSize, num_layers: int, placement: ResolvedPlacement, device_type: str) -> int:
    """Return what a rank holds of the sharded base where it computes: shards, resident layers and slots."""
    base_bytes = _base_bytes(size, num_layers)
    if placement.placement == "replicate" or placement.resident_layers == "all":
        return base_bytes
    if placement.placement == "file" and device_type == "cpu":
        return 0  # pages of the files, which the kernel drops when it must
    layer_bytes = max(unit.total_bytes(1) for unit in size.layers)
    other_bytes = max((unit.total_bytes(1) for unit in size.units if unit not in size.layers), default=0)
    is_elsewhere = placement.placement == "file" or (placement.placement == "host" and device_type == "cuda")
    shard_bytes = 0 if is_elsewhere else base_bytes // placement.group_size
    num_whole = min(placement.resident_layers, num_layers) + 2 + placement.prefetch
    return shard_bytes + num_whole * layer_bytes + other_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def describe_fit(fit: Fit) -> str:
    """Say in words how much of the model is compared."""
    if fit.num_layers == fit.num_whole_layers:
        text = f"whole, {fit.num_layers} layers"
    else:
        text = (
            f"its first {fit.num_layers} of {fit.num_whole_layers} layers: all would take {_gib(fit.whole_bytes)}, "
            f"{_gib(fit.free_bytes)} are free"
        )
    return f"{text} ({fit.note})" if fit.note else text


def free(device: torch.device) -> None:
    """Give back the memory of a model that nobody holds any more; its hooks and modules hold one another."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
