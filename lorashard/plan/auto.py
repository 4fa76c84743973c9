"""From a model's name to a plan: for machines that are named, or together on the ranks that are running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from peft import LoraConfig, PeftModel

from .. import dist
from ..model.stacks import name_units
from ..placement import PlacementOptions
from .choose import Plan, agree_on_plan, make_plan
from .costs import Workload
from .hardware import Cluster
from .probe import measure_free_bytes, probe
from .size import build_meta_model, compare_with_headers, measure_model
from .trace import Microbatch, trace


@dataclass(frozen=True)
class BaseModel:
    """What is loaded: as in `lorashard.load`."""

    model_name_or_path: str
    lora: LoraConfig
    dtype: torch.dtype = torch.bfloat16
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

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


@dataclass(frozen=True)
class Training:
    """How it is trained.

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
) -> Plan:
    """Return what each placement would cost, and the one to take among those that `options` leave open.

    Reads the model's config and headers alone.

    Raises:
        UserError: the model cannot be found or planned.
    """
    options = options or PlacementOptions()
    model = base.build(options.unit_paths)
    size = measure_model(model)
    microbatch = training.microbatch
    saved_activations = None
    if microbatch.checkpointing is not None and options.activation_checkpointing_layers != "all":
        saved_activations = trace(base.build(options.unit_paths), replace(microbatch, checkpointing=None))
    workload = Workload(
        activations=trace(model, microbatch),
        microbatch_tokens=microbatch.num_tokens,
        saved_activations=saved_activations,
        accumulation_steps=training.accumulation_steps,
        optimizer=training.optimizer,
        dataset_tokens=training.dataset_tokens,
    )
    difference = compare_with_headers(size, base.revision)
    return make_plan(size, workload, cluster, options, [*notes, difference] if difference else notes)


def plan_here(base: BaseModel, training: Training, device: torch.device, options: PlacementOptions) -> Plan:
    """Return one plan on all ranks, for the memory that is free and the speeds that are measured on them.

    Raises:
        UserError: the model cannot be found or planned; on all ranks alike.

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
