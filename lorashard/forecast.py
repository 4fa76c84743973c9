"""The plan of a run: its options, turned into what `lorashard.plan` computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import psutil
import torch
from peft import LoraConfig
from trl import SFTConfig

from .config import RunConfig
from .devices import count_cores, find_gpus
from .errors import ConfigError
from .plan.auto import BaseModel, Training, plan_training
from .plan.choose import Plan
from .plan.hardware import (
    Cluster,
    HardwareOptions,
    find_gpu_type,
    guess_gpu_type,
    known_gpu_types,
    usable_bytes,
)
from .plan.probe import measure_free_bytes, probe
from .plan.trace import Microbatch


def plan_run(
    config: RunConfig, cluster: Cluster, *, epoch_tokens: int | None = None, notes: Sequence[str] = ()
) -> Plan:
    """Return what each placement would cost a run on `cluster`, and the one to take.

    Reads the model's config and headers alone.

    Args:
        epoch_tokens: of the data, where it is known.
        notes: what the reader should know of `cluster`.

    Raises:
        UserError: the model cannot be found or planned, or there is no length to plan for.
    """
    if config.dataset and epoch_tokens is None:
        notes = [*notes, "the dataset is not read here: give the tokens of an epoch with --epoch_tokens for its time"]
    training = describe_training(config, cluster.hardware.device_type, epoch_tokens=epoch_tokens)
    return plan_training(describe_base(config), training, cluster, config, notes)


def describe_base(config: RunConfig) -> BaseModel:
    """Return what a run loads."""
    return BaseModel(
        config.model_name_or_path,
        LoraConfig(**config.lora_options()),
        getattr(torch, config.dtype),
        config.model_revision,
        config.trust_remote_code,
        config.attn_implementation,
    )


def describe_training(
    config: RunConfig, device_type: str, longest_tokens: int | None = None, epoch_tokens: int | None = None
) -> Training:
    """Return how a run trains; a microbatch is the largest that can come.

    Args:
        longest_tokens: of the data's rows, where it is known; else `max_length` is planned for.
        epoch_tokens: of the data, where it is known.

    Raises:
        ConfigError: there is no length to plan for.
    """
    options: dict[str, Any] = {field.name: field.default for field in fields(SFTConfig)} | config.trainer_options
    optimizer = options["optim"]
    return Training(
        microbatch=_describe_microbatch(config, options, device_type, longest_tokens),
        accumulation_steps=options["gradient_accumulation_steps"],
        optimizer=str(getattr(optimizer, "value", optimizer)),
        dataset_tokens=round(epoch_tokens * options["num_train_epochs"]) if epoch_tokens else None,
    )


def _describe_microbatch(
    config: RunConfig, options: dict[str, Any], device_type: str, longest_tokens: int | None
) -> Microbatch:
    lengths = [config.max_length] if config.packing else [config.max_length, longest_tokens]
    known = [length for length in lengths if length]
    if not known:
        raise ConfigError("max_length: planning needs the length of a row; give --max_length")
    num_rows, row_tokens = options["per_device_train_batch_size"], min(known)
    is_flash = "flash" in (config.attn_implementation or "")
    if options["padding_free"] or (config.packing and is_flash):
        num_rows, row_tokens = 1, num_rows * row_tokens
    return Microbatch(
        num_rows=num_rows,
        row_tokens=row_tokens,
        device_type=device_type,
        has_mask=not is_flash and (config.packing or num_rows > 1),
        # Smoothing needs whole logits; TRL's trainer keeps its loss fused in every other case.
        loss="model" if options["label_smoothing_factor"] else "fused",
        checkpointing=dict(config.activation_checkpointing_kwargs or {}) if config.activation_checkpointing else None,
        is_offloading=bool(options["activation_offloading"]),
        layer_rows=config.layer_microbatch_size,
    )


def find_cluster(config: RunConfig, wanted: HardwareOptions) -> tuple[Cluster, Sequence[str]]:
    """Return the machines to plan for, those asked for or else this one, and what had to be assumed.

    Raises:
        ConfigError: the options ask for GPUs, and neither are they here nor is a type or an amount of memory given.
    """
    if config.cpu is not None:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, count_cores() // config.cpu))  # as the launcher gives to each rank
        hardware = probe(device, getattr(torch, config.dtype))
        return Cluster(hardware, config.cpu, wanted.nodes, measure_free_bytes(device, config.cpu)), ()
    ids = config.gpus if isinstance(config.gpus, list) else None
    num_gpus = len(ids) if ids else config.gpus if isinstance(config.gpus, int) else None
    visible = find_gpus()
    given_bytes = wanted.memory_bytes()
    if wanted.gpu_type is None and visible.count and (num_gpus or 1) <= visible.count:
        device = torch.device("cuda", ids[0] if ids else 0)
        hardware = wanted.apply(probe(device, getattr(torch, config.dtype)))
        free_bytes = usable_bytes(given_bytes) if given_bytes else measure_free_bytes(device, 1)
        host_bytes = psutil.virtual_memory().available
        return Cluster(hardware, num_gpus or visible.count, wanted.nodes, free_bytes, host_bytes), ()
    if wanted.gpu_type is None and given_bytes is None:
        raise ConfigError(
            f"{num_gpus or 1} GPUs are to be planned for, but {visible.count} are visible: give --gpu_type "
            f"({', '.join(known_gpu_types())}), or --gpu_memory, or --cpu N"
        )
    gpu_type = wanted.gpu_type or guess_gpu_type("", given_bytes or 0)
    hardware = wanted.apply(find_gpu_type(gpu_type))
    cluster = Cluster(hardware, num_gpus or 1, wanted.nodes, usable_bytes(hardware.memory_bytes))
    notes = ["the host memory of machines that are not here is not known: compare what is needed with what they have"]
    if wanted.gpu_type is None:
        notes.append(f"no such GPUs are here, so their speeds are those of {gpu_type}; give --gpu_type for another")
    return cluster, notes
