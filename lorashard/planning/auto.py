"""From a model's name to a plan: for given machines, or collectively on the ranks that are running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from peft import LoraConfig, PeftModel
from torch.overrides import TorchFunctionMode

from ..config.placement import PlacementOptions, ResolvedPlacement, resolve_placement
from ..config.quantization_options import Quantization
from ..model.stacks import find_layers, name_units
from ..runtime import dist
from ..runtime.dtypes import name_of
from ..runtime.progress import told_work
from ..weights.stored_formats import StoredFormat, settle_quantization
from .choose import Plan, agree_on_plan, make_plan, name_placement
from .costs import Workload
from .hardware import Cluster
from .probe import measure_free_bytes, probe, recall_hardware
from .size import ModelSize, build_meta_model, compare_with_headers, find_stored, measure_model
from .trace import Microbatch, trace


@dataclass(frozen=True)
class BaseModel:
    """What is loaded, as in `lorashard.load`.

    Attributes:
        stored: the format of files whose quantized bytes are kept as they are; `settle` finds it.
    """

    model_name_or_path: str
    lora: LoraConfig
    dtype: torch.dtype = torch.bfloat16
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    quantization: Quantization | None = None
    stored: StoredFormat | None = None

    def build(self, unit_paths: Sequence[str] | None = None) -> PeftModel:
        """Return the model with its adapter on the meta device, from its config alone."""
        model = build_meta_model(
            self.model_name_or_path,
            self.lora,
            self.dtype,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=self.attn_implementation,
        )
        name_units(model, unit_paths)
        return model

    def settle(self) -> tuple[BaseModel, str | None]:
        """Return this with the quantization of files that are quantized already, and a note on these.

        Raises:
            CheckpointError: the config cannot be found, or the files are in a format that cannot be read.
            ConfigError: the files are quantized already, to another format than is asked for.
        """
        stored = find_stored(self.model_name_or_path, self.revision)
        if stored is None:
            return self, None
        quantization = settle_quantization(stored, self.quantization, self.model_name_or_path)
        kept = stored if stored.quantization is not None else None
        if kept is None:
            outcome = f"dequantized to {name_of(self.dtype)} while it is read"
        else:
            exceptions = " but the modules that its config names" if kept.skipped else ""
            outcome = f"assumed to hold all linear weights of decoder layers{exceptions} in it, which are kept so"
        note = f"{self.model_name_or_path} is stored in {stored.description}: {outcome}"
        return replace(self, quantization=quantization, stored=kept), note


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        optimizer: transformers' name of it.
        dataset_tokens: of all epochs, if known.
    """

    microbatch: Microbatch
    accumulation_steps: int = 1
    optimizer: str = "adamw_torch_fused"
    dataset_tokens: int | None = None


def plan_training(
    base: BaseModel,
    training: Training,
    cluster: Cluster,
    options: PlacementOptions | None = None,
    notes: Sequence[str] = (),
    given: ResolvedPlacement | None = None,
) -> Plan:
    """Return what each placement would cost, and the one to take among those that `options` leave open.

    Reads only the model's config and headers.

    Args:
        given: the placement to take, whatever it costs.

    Raises:
        UserError: the model cannot be found or planned.
    """
    options = options or PlacementOptions()
    base, stored = base.settle()
    with told_work("computing what a step of the model takes", dist.get_rank() == 0):
        size, workload = _measure(base, training, options)
    # A run whose placement is given reads the files next, so the hub is not asked for their headers. Those of quantized
    # files do not have the numbers of parameters.
    difference = compare_with_headers(size, base.revision) if given is None and stored is None else None
    notes = [*notes, *(note for note in (stored, difference) if note)]
    plan = make_plan(size, workload, cluster, options, notes, given)
    # Files that are quantized already are kept in their format.
    is_open = base.quantization is None or (stored is None and base.quantization.format != "nf4")
    if plan.chosen is None and is_open:
        return replace(plan, reason=f"{plan.reason}; {_describe_quantized(base, training, cluster, options)}")
    return plan


def _measure(base: BaseModel, training: Training, options: PlacementOptions) -> tuple[ModelSize, Workload]:
    """Return how large a model is, and what a step of its training takes under any placement."""
    model = base.build(options.unit_paths)
    size = measure_model(model, base.quantization, base.stored)
    microbatch = training.microbatch
    saved_activations = None
    if options.num_recomputed != "all" and _can_recompute_some(model, microbatch):
        saving = replace(microbatch, checkpointing=None)
        saved_activations = trace(base.build(options.unit_paths), saving, base.quantization)
    return size, Workload(
        activations=trace(model, microbatch, base.quantization),
        microbatch_tokens=microbatch.num_tokens,
        saved_activations=saved_activations,
        accumulation_steps=training.accumulation_steps,
        optimizer=training.optimizer,
        dataset_tokens=training.dataset_tokens,
    )


def _can_recompute_some(model: PeftModel, microbatch: Microbatch) -> bool:
    """Tell whether layers may keep their activations, and on the device: not where they are sent to host memory."""
    checkpointing = microbatch.checkpointing
    if checkpointing is None or microbatch.is_offloading or checkpointing.get("every_n_layers", 1) != 1:
        return False
    return all(hasattr(layer, "gradient_checkpointing") for layer in find_layers(model))


def _describe_quantized(base: BaseModel, training: Training, cluster: Cluster, options: PlacementOptions) -> str:
    """Return what would fit with nf4, where nothing fits without."""
    size, workload = _measure(replace(base, quantization=Quantization("nf4")), training, options)
    plan = make_plan(size, workload, cluster, options)
    if plan.chosen is None:
        return "nor does anything with quantization: nf4"
    row = plan.choice
    room = f"{row.peak_bytes / 2**30:.1f} of {cluster.free_bytes / 2**30:.1f} GiB"
    return f"with quantization: nf4, {name_placement(row.placement, cluster.num_ranks)} fits ({room})"


def plan_given(
    base: BaseModel,
    training: Training,
    device: torch.device,
    options: PlacementOptions,
    world_size: int,
    node_size: int | None,
    longest_s: float = 60.0,
) -> Plan:
    """Return what the placement that `options` give costs, beside the others, without asking other ranks.

    Measures nothing: the speeds were measured here before, or are those of a known device.

    Args:
        node_size: ranks on this node, where that is known.
        longest_s: seconds after which it gives up, since the other ranks wait.

    Raises:
        Exception: the model or the placement cannot be planned: see `explained_planning`.

    Ranks: local.
    """
    placement = resolve_placement(options, world_size, node_size)
    ranks_per_node = node_size or world_size
    hardware, note = recall_hardware(device, base.dtype)
    free_bytes = measure_free_bytes(device, ranks_per_node)
    host_bytes = psutil.virtual_memory().available
    cluster = Cluster(hardware, ranks_per_node, max(1, world_size // ranks_per_node), free_bytes, host_bytes)
    with _Deadline(longest_s):
        return plan_training(base, training, cluster, options, [note] if note else (), placement)


class _Deadline(TorchFunctionMode):
    """Stops planning that takes too long: a model whose code loops over the tokens of a sequence takes minutes."""

    def __init__(self, longest_s: float) -> None:
        super().__init__()
        self._longest_s = longest_s
        self._end_s = time.monotonic() + longest_s

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"it takes longer than {self._longest_s:.0f} s")
        return func(*args, **(kwargs or {}))


def plan_here(base: BaseModel, training: Training, device: torch.device, options: PlacementOptions) -> Plan:
    """Return one plan on all ranks, for the memory that is free and the speeds that are measured on them.

    Raises:
        UserError: the model cannot be found or planned, on all ranks alike.

    Ranks: collective over all ranks.
    """
    ranks_per_node = dist.find_node_size() or dist.get_world_size()
    num_nodes = dist.get_world_size() // ranks_per_node
    host_bytes = min(dist.gather_objects(psutil.virtual_memory().available))
    cluster = Cluster(probe(device, base.dtype), ranks_per_node, num_nodes, 0, host_bytes)
    return agree_on_plan(
        measure_free_bytes(device, ranks_per_node),
        lambda free_bytes: plan_training(base, training, replace(cluster, free_bytes=free_bytes), options),
    )
