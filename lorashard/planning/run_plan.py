"""The plan of a run: from its configuration to what the rest of `lorashard.planning` computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import psutil
import torch
from peft import LoraConfig

from ..config.initialization import without_rewriting
from ..config.methods import Method
from ..config.placement import SEQUENCE_PARALLEL_METHODS
from ..config.run_config import RunConfig
from ..config.sweep import read_jobs
from ..data.trl_tokens import fill_trainer_options
from ..errors import ConfigError
from ..model.loftq import make_lora
from ..runtime.devices import count_cores, find_gpus
from ..runtime.dtypes import settle_name
from .auto import BaseModel, Training, plan_training
from .choose import Plan
from .hardware import Cluster, HardwareOptions, find_gpu_type, guess_gpu_type, known_gpu_types, usable_bytes
from .probe import measure_free_bytes, probe
from .trace import Microbatch

_ASSUMED_PROMPT_TOKENS = 512


def forecast(
    config: RunConfig,
    wanted: HardwareOptions,
    *,
    epoch_tokens: int | None = None,
    longest_tokens: int | None = None,
) -> tuple[Plan, Cluster]:
    """Return the plan of a run on the machines that are given, or else on this one, and those machines.

    Args:
        epoch_tokens, longest_tokens: as for `describe_training`.

    Raises:
        UserError: as for `find_cluster` and `plan_run`.
    """
    is_asked = config.dtype != "auto"  # what is said of it then is what it costs
    config, about_dtype = settle_dtype_here(config, find_planned_device(config, wanted))
    cluster, notes = find_cluster(config, wanted)
    notes = notes if is_asked else [*about_dtype, *notes]
    known = {"epoch_tokens": epoch_tokens, "longest_tokens": longest_tokens}
    plan = plan_run(config, cluster, notes=notes, **known)
    return replace(plan, warnings=(*about_dtype, *plan.warnings)) if is_asked else plan, cluster


def plan_run(
    config: RunConfig,
    cluster: Cluster,
    *,
    epoch_tokens: int | None = None,
    longest_tokens: int | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Return what each placement would cost a run on `cluster`, and the one to take.

    Reads only the model's config and headers.

    Args:
        epoch_tokens, longest_tokens: as for `describe_training`.
        notes: what the reader should know about `cluster`.

    Raises:
        UserError: the model cannot be found or planned, or there is no length to plan for.
    """
    if config.dataset and epoch_tokens is None and longest_tokens is None:
        notes = [*notes, "the dataset is not read here: give the tokens of an epoch with --epoch_tokens for its time"]
    method = config.trl_method
    if method.uncounted:
        notes = [*notes, f"not counted for {method.name}: {method.uncounted}"]
    if method.generates:
        notes = [*notes, f"prompts are assumed to have {_ASSUMED_PROMPT_TOKENS} tokens"]
    device_type = cluster.hardware.device_type
    training = describe_training(config, device_type, cluster.num_ranks, longest_tokens, epoch_tokens)
    return plan_training(describe_base(config), training, cluster, config, notes)


def describe_base(config: RunConfig) -> BaseModel:
    """Return what a run loads; of a sweep, with the first job's adapter."""
    return BaseModel(
        config.model_name_or_path,
        _describe_lora(next((job.config for job in read_jobs(config)), config)),
        _read_settled_dtype(config),
        config.model_revision,
        config.trust_remote_code,
        config.attn_implementation,
        config.resolve_quantization(),
    )


def _describe_lora(config: RunConfig) -> LoraConfig:
    return without_rewriting(make_lora(config.lora_options()))


def describe_training(
    config: RunConfig,
    device_type: str,
    num_ranks: int,
    longest_tokens: int | None = None,
    epoch_tokens: int | None = None,
) -> Training:
    """Return how a run trains, or all jobs of a sweep; the microbatch is the largest that is possible.

    Args:
        longest_tokens: of the examples, or of the prompts where the method generates, where it is known; else
            `max_length` is planned for.
        epoch_tokens: tokens of an epoch, where they are known.

    Raises:
        ConfigError: there is no length to plan for.
    """
    if jobs := [job.config for job in read_jobs(config)]:
        first, *others = (describe_training(job, device_type, num_ranks, longest_tokens, epoch_tokens) for job in jobs)
        others_of = tuple(zip(map(_describe_lora, jobs[1:]), others, strict=True))
        return replace(first, others=others_of, may_share=False)
    options = fill_trainer_options(config) | config.count_accumulation(num_ranks)
    optimizer = options["optim"]
    return Training(
        microbatch=_describe_microbatch(config, options, device_type, longest_tokens),
        accumulation_steps=options["gradient_accumulation_steps"],
        optimizer=str(getattr(optimizer, "value", optimizer)),
        dataset_tokens=round(epoch_tokens * options["num_train_epochs"]) if epoch_tokens else None,
        is_fused=config.numerics == "fused" or config.compile_options() is not False,
        longest_tokens=_find_longest(config, options, longest_tokens),
        may_share=config.method in SEQUENCE_PARALLEL_METHODS,
        is_batch_global=config.global_batch_size is not None,
    )


def _describe_microbatch(
    config: RunConfig, options: dict[str, Any], device_type: str, longest_tokens: int | None
) -> Microbatch:
    method = config.trl_method
    is_flash = "flash" in (config.attn_implementation or "")
    row_tokens = _find_row_tokens(config, options, longest_tokens)
    num_rows = options["per_device_train_batch_size"] * method.rows_per_example
    if method.is_prepared_here and (options["padding_free"] or (config.packing and is_flash)):
        num_rows, row_tokens = 1, num_rows * row_tokens
    return Microbatch(
        num_rows=num_rows,
        row_tokens=row_tokens,
        device_type=device_type,
        has_mask=not is_flash and (config.packing or num_rows > 1),
        loss=_find_loss(method, options),
        checkpointing=dict(config.activation_checkpointing_kwargs or {}) if config.activation_checkpointing else None,
        is_offloading=bool(options.get("activation_offloading")),
        layer_rows=config.layer_microbatch_size,
        tile_tokens=config.mlp_tile_tokens,
    )


def _find_loss(method: Method, options: dict[str, Any]) -> Literal["model", "fused", "score"]:
    if method.is_classifier:
        return "score"
    # Label smoothing needs all logits at once; TRL's trainers use their fused loss in every other case.
    return "model" if options["label_smoothing_factor"] else "fused"


def _find_row_tokens(config: RunConfig, options: dict[str, Any], longest_tokens: int | None) -> int:
    if config.trl_method.generates:
        return (longest_tokens or _ASSUMED_PROMPT_TOKENS) + options["max_completion_length"]
    max_length = config.max_length if config.trl_method.is_prepared_here else options["max_length"]
    known = [length for length in ([max_length] if config.packing else [max_length, longest_tokens]) if length]
    if not known:
        raise ConfigError("planning needs the length of a sequence", option="max_length", fix="give --max_length")
    return min(known)


def _find_longest(config: RunConfig, options: dict[str, Any], longest_tokens: int | None) -> int | None:
    """Return the tokens that positions count at most, if they are known: they begin anew with each packed example."""
    if config.packing and config.packing_strategy != "wrapped":
        return longest_tokens and min(longest_tokens, _find_row_tokens(config, options, longest_tokens))
    if longest_tokens is None and "max_length" not in (*config.model_fields_set, *config.trainer):
        return None
    return _find_row_tokens(config, options, longest_tokens)


def _read_settled_dtype(config: RunConfig) -> torch.dtype:
    assert config.dtype != "auto", "settle_dtype_here comes first"
    return getattr(torch, config.dtype)


def settle_dtype_here(
    config: RunConfig,
    device: torch.device | None,
    explain: Callable[[torch.device], str | None] | None = None,
) -> tuple[RunConfig, Sequence[str]]:
    """Return the configuration with what `dtype: auto` becomes on this machine, and notes on it.

    Args:
        device: None for GPUs that are not here: all known ones have bfloat16.
        explain: as for `choose_dtype`.
    """
    if device is None:
        return config.with_dtype("bfloat16") if config.dtype == "auto" else config, ()
    name, sentence = settle_name(config.dtype, device, explain)
    return config.with_dtype(name), (sentence,) if sentence else ()


def find_planned_device(config: RunConfig, wanted: HardwareOptions) -> torch.device | None:
    """Return the device of this machine that a plan is for, or None if it is for GPUs that are not here."""
    if config.cpu is not None:
        return torch.device("cpu")
    visible = find_gpus()
    if wanted.gpu_type is None and visible.count and (_count_gpus(config) or 1) <= visible.count:
        return torch.device("cuda", config.gpus[0] if isinstance(config.gpus, list) else 0)
    return None


def _count_gpus(config: RunConfig) -> int | None:
    return len(config.gpus) if isinstance(config.gpus, list) else config.gpus


def find_cluster(config: RunConfig, wanted: HardwareOptions) -> tuple[Cluster, Sequence[str]]:
    """Return the machines to plan for, those given or else this one, and notes on what had to be assumed.

    Args:
        config: its dtype is not `auto`; this machine's speed is measured in it.

    Raises:
        ConfigError: the GPUs of the options are not here, and neither a type nor an amount of memory is given.
    """
    device, num_gpus = find_planned_device(config, wanted), _count_gpus(config)
    if config.cpu is not None and device is not None:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(max(1, count_cores() // config.cpu))  # as the launcher gives to each rank
        try:
            hardware = probe(device, _read_settled_dtype(config))
        finally:
            torch.set_num_threads(num_threads)
        return Cluster(hardware, config.cpu, wanted.nodes, measure_free_bytes(device, config.cpu)), ()
    visible = find_gpus()
    given_bytes = wanted.memory_bytes()
    if device is not None:
        hardware = wanted.apply(probe(device, _read_settled_dtype(config)))
        free_bytes = usable_bytes(given_bytes) if given_bytes else measure_free_bytes(device, 1)
        host_bytes = psutil.virtual_memory().available
        return Cluster(hardware, num_gpus or visible.count, wanted.nodes, free_bytes, host_bytes), ()
    if wanted.gpu_type is None and given_bytes is None:
        raise ConfigError(
            option="gpus",
            expected=f"{num_gpus or 1} GPUs to plan for",
            found=f"{visible.count}",
            fix=f"give --gpu_type ({', '.join(known_gpu_types())}), or --gpu_memory, or --cpu N",
        )
    gpu_type = wanted.gpu_type or guess_gpu_type("", given_bytes or 0)
    hardware = wanted.apply(find_gpu_type(gpu_type))
    cluster = Cluster(hardware, num_gpus or 1, wanted.nodes, usable_bytes(hardware.memory_bytes))
    notes = ["the host memory of other machines is not known: compare it with what is needed"]
    if wanted.gpu_type is None:
        notes.append(f"no such GPUs are here, so their speeds are those of {gpu_type}; give --gpu_type for another")
    return cluster, notes
