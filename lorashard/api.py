"""The Python API: load or shard a model, and read its statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, overload

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType

from .config.initialization import is_derived
from .config.placement import (
    PlacementOptions,
    ResolvedPlacement,
    explain_groups,
    explain_placement,
    parse_steps,
    read_placement,
    resolve_placement,
)
from .config.quantization_options import Quantization as Quantization
from .config.quantization_options import check_compiling, read_quantization
from .engine import HostCopies, Stats
from .errors import ConfigError
from .export.derived import derive
from .export.merge import merge as merge
from .model.adapters import base_test
from .model.added_adapters import follow_added_adapters, share_adapters
from .model.autocasting import warn_of_autocast
from .model.backward import end_backward_at_adapters
from .model.checkpointing import checkpoint_some
from .model.compiling import compile_layers, read_compile_options
from .model.embeddings import is_resized
from .model.fusing import Numerics, choose_numerics, put_liger_kernels, read_numerics
from .model.homes import ShardedHomes, choose_resident
from .model.loading import load_sharded
from .model.lora_linear import spare_lora_steps
from .model.micro_batching import split_layers
from .model.patches import on_release
from .model.profiling import StepProfiler
from .model.quantizing import quantize_structure
from .model.refusals import check_config, check_unquantized
from .model.saved import choose_quantization, find_adapter, find_base, read_config
from .model.sequence_rows import check_sequences, share_sequences
from .model.sharding import ENGINE_ATTRIBUTE, base_of, engine_of, remember_quantization, shard_structure
from .model.sources import MemorySource
from .model.stacks import find_layers, name_units
from .model.tiled_mlp import tile_mlps
from .model.units import find_structure
from .planning.auto import BaseModel, Training, plan_here
from .planning.choose import PlanError
from .planning.fusing import choose_for
from .planning.inference import plan_inference
from .planning.trace import Microbatch
from .runtime import dist
from .runtime.dtypes import choose_dtype, explain_slow_bfloat16, read_dtype
from .runtime.join import join_launch, with_index

_logger = logging.getLogger(__name__)


@overload
def load(
    model_name_or_path: str,
    lora: PeftConfig,
    placement: str | PlacementOptions | ResolvedPlacement = "auto",
    *,
    adapters: None = None,
    **options: Any,
) -> PeftModel: ...


@overload
def load(model_name_or_path: str, *, adapters: Mapping[str, PeftConfig], **options: Any) -> dict[str, PeftModel]: ...


def load(
    model_name_or_path: str,
    lora: PeftConfig | None = None,
    placement: str | PlacementOptions | ResolvedPlacement = "auto",
    *,
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: torch.device | None = None,
    quantization: str | Quantization | None = None,
    cache_quantized: bool = False,
    per_device_train_batch_size: int | None = None,
    max_length: int | None = None,
    activation_checkpointing: bool = True,
    num_labels: int | None = None,
    numerics: str | Numerics = "exact",
    torch_compile: bool | Mapping[str, Any] = False,
    profile_steps: str | None = None,
    profile_dir: str | Path = "profile",
    progress: Callable[[int, int | None, str], None] | None = None,
    adapters: Mapping[str, PeftConfig] | None = None,
    adapter_seeds: Mapping[str, int] | None = None,
    **placement_options: Any,
) -> PeftModel | dict[str, PeftModel]:
    """Load a checkpoint with its frozen base sharded and a new adapter on top.

    With the random seed set just before, the adapter equals the one that `get_peft_model` makes on the model from
    `from_pretrained`.

    Args:
        model_name_or_path: a local folder or a hub id, with safetensors files.
        lora: what PEFT puts on top. The auto class follows its `task_type`: causal LM, or sequence classification.
            PiSSA and OLoRA rewrite the base: a copy of it is derived once and kept, see docs/peft.md.
        placement: where the base rests: `shard` (1/W on each of W ranks), `replicate`, `host`, `file`, or `auto`;
            or a plan with nothing left to choose.
        dtype: the base's, and its compute dtype: torch's, or its name. `auto` is bfloat16 where the devices of all
            ranks have instructions for it, and float32 elsewhere, and is logged. The trainer's arguments must agree:
            with float32 `bf16=False`, which is not TRL's default.
        revision: branch, tag or commit of a hub model.
        device: where this rank computes; the default is the GPU of its local rank, or the CPU.
        quantization: `nf4`, `int8` or `fp8`: the linear weights of decoder layers, and experts, are quantized while
            they are read; or a `lorashard.Quantization`, for the rarer options.
        cache_quantized: keep the quantized base on the disk, and read that at the next start, which needs no option.
        per_device_train_batch_size: the trainer's batch size. With `max_length` it lets `auto` plan for the memory and
            speed of these ranks, and log the reason for its choice.
        max_length: the maximum sequence length, padding included.
        activation_checkpointing: whether the trainer will use it.
        num_labels: of sequence classification, 1 for a reward model; the default is the config's, mostly 2.
        numerics: `exact`, the kernels and the bits of plain PEFT; or `fused`, the faster ones that are possible on all
            ranks, compiled layers or else Liger's, within a tolerance (docs/kernels.md): logged. Or a `Numerics`.
        torch_compile: by hand, compile the `forward` of each decoder layer; or arguments of torch.compile, such as
            `{"mode": ..., "backend": ...}`. The trainer's own option would compile the sharding too.
        profile_steps: optimizer steps to trace on each rank, such as `3-5`, counted from 1. The traces and a summary
            are written when the last of them ends.
        profile_dir: the folder for them: `rank_K.json` of each rank, and `summary.md`.
        progress: called on this rank with how much is done, of how much, and of what: "bytes" while weights are
            downloaded, "bytes hashed" of its files, "units converted" and "units" of the model while they are read. By
            default rank 0 shows on stderr what takes longer than two seconds.
        adapters: in place of `lora`, several by name, for a `SweepTrainer`: each gets a model of its own, and all share
            one base. Each is drawn as if it were the only one.
        adapter_seeds: that `adapters` are drawn from, by name; by default all from the random numbers as they are.
        **placement_options: the other fields of `lorashard.config.placement.PlacementOptions`: `prefetch`,
            `cpu_offload`, `sharding_strategy`, `shard_group_size`, `resident_layers`, `layer_microbatch_size`,
            `activation_checkpointing_layers`, `sequence_parallel_size` and
            `mlp_tile_tokens` (docs/long.md), `unit_paths`, `wait_warning_s`.

    Raises:
        CheckpointError: files are missing, damaged or do not fit the model.
        ConfigError: a placement that is not possible, an unknown task, an adapter that rewrites the base in another
            way, or ranks that accelerate does not see.

    Ranks: collective over all ranks. Under a launcher it starts the process group if needed (nccl, or gloo on CPU).
    Memory: never more than one unit beyond this rank's shards and slots.
    """
    if (per_device_train_batch_size is None) != (max_length is None):
        raise ConfigError(
            option="per_device_train_batch_size and max_length", expected="both, to plan with, or neither", found="one"
        )
    if (lora is None) == (adapters is None) or adapters == {}:
        raise ConfigError(
            option="lora and adapters", expected="one of them, with an adapter", found="both" if lora else "none"
        )
    first, *others = [lora] if adapters is None else adapters.values()
    assert first is not None
    lora = first
    if len({config.task_type for config in (lora, *others)}) > 1:
        raise ConfigError(option="adapters", expected="one task_type", found="several")
    if num_labels is not None and lora.task_type != TaskType.SEQ_CLS:
        raise ConfigError(
            "it is for sequence classification",
            option="num_labels",
            expected="task_type SEQ_CLS",
            found=lora.task_type,
        )
    profiled = parse_steps(profile_steps) if profile_steps else None
    asked = read_placement(placement=placement, **placement_options) if isinstance(placement, str) else placement
    meant = read_quantization(quantization)
    device = _join(device)
    dtype = _settle_dtype(dtype, device)
    path = str(model_name_or_path)
    kernels = _settle_numerics(numerics, torch_compile, lambda: choose_for(path, revision, meant, device))
    compiling = read_compile_options(torch_compile or kernels == "compile", device, meant)
    if compiling is not None and others:
        raise ConfigError(
            "what one adapter's model compiles may replace another's graph between its forward and its backward",
            option="torch_compile",
            fix="leave it out where there are several adapters",
        )
    derived = None
    rewriting = [config for config in (lora, *others) if is_derived(getattr(config, "init_lora_weights", None))]
    if rewriting and others:
        raise ConfigError(
            "it rewrites the base, which several adapters share",
            option="init_lora_weights",
            found=repr(getattr(rewriting[0], "init_lora_weights", None)),
            fix="train that adapter alone, or give all another initialization",
        )
    if rewriting:
        derived = derive(
            str(model_name_or_path),
            cast(LoraConfig, lora),
            device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            num_labels=num_labels,
            progress=progress,
        )
        model_name_or_path, revision, lora = str(derived.folder), None, derived.lora
    if isinstance(asked, PlacementOptions) and asked.is_placement_open and per_device_train_batch_size and max_length:
        base = BaseModel(str(model_name_or_path), lora, dtype, revision, trust_remote_code, attn_implementation, meant)
        microbatch = Microbatch(
            per_device_train_batch_size,
            max_length,
            device.type,
            has_mask=per_device_train_batch_size > 1,
            checkpointing={} if activation_checkpointing else None,
            layer_rows=asked.layer_microbatch_size,
            tile_tokens=asked.mlp_tile_tokens,
        )
        one = Training(microbatch, is_fused=torch_compile is not False or kernels != "exact")
        training = replace(one, others=tuple((cast(LoraConfig, other), one) for other in others))
        asked = _plan(base, training, device, asked)
    resolved = _resolve(asked)
    if others and resolved.sequence_parallel_size > 1:
        raise ConfigError(
            "several adapters on one base take turns, and cannot share rows too",
            option="sequence_parallel_size",
            expected=1,
            found=resolved.sequence_parallel_size,
        )
    models = load_sharded(
        str(model_name_or_path),
        lora,
        resolved,
        device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        adapter=derived.initial_adapter if derived else None,
        num_labels=num_labels,
        quantization=meant,
        cache_quantized=cache_quantized,
        progress=progress,
        others=others,
        seeds=None if adapters is None or adapter_seeds is None else [adapter_seeds[name] for name in adapters],
    )
    for model in models:
        _finish(model, resolved, compiling, device, kernels)
    _profiled(models[0], profiled, profile_dir)
    return models[0] if adapters is None else dict(zip(adapters, models, strict=True))


def load_adapter(
    adapter: str | Path,
    base: str | None = None,
    placement: str | PlacementOptions = "auto",
    *,
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: torch.device | None = None,
    quantization: str | Quantization | None = None,
    is_trainable: bool = False,
    allow_base_mismatch: bool = False,
    num_cached_tokens: int = 8192,
    torch_compile: bool | Mapping[str, Any] = False,
    **placement_options: Any,
) -> PeftModel:
    """Load a saved adapter on its base, sharded as by `load`, to use it, or with `is_trainable` to train it further.

    Args:
        adapter: the folder of an adapter, of a run (its last checkpoint, if it has not ended), or a hub id.
        base: where the base is, if not where the adapter's config says.
        placement: as for `load`. With `auto` each device holds the base if it fits, and else as many layers as fit.
            On a CPU it is read from its own files; where these have another dtype it is in memory if it fits, and else
            in a copy on the disk, in `dtype`, which is logged.
        dtype: as for `load`.
        quantization: what the base is quantized to, as for `load`, or "none"; the default is that of training.
        num_cached_tokens: tokens of all sequences for which `auto` leaves room in a key-value cache.
        torch_compile: as for `load`; layers that fill a key-value cache, as in `generate`, run uncompiled.

    Raises:
        CheckpointError: files are missing, damaged or do not fit each other.
        ConfigError: the adapter was trained on another base (unless `allow_base_mismatch`), a prompt cannot be trained
            further, or as for `load`.

    Ranks: collective over all ranks.
    Memory: as for `load`.
    """
    asked = read_placement(placement=placement, **placement_options) if isinstance(placement, str) else placement
    folder = find_adapter(adapter)
    config = read_config(folder)
    check_config(config)
    base, revision = find_base(folder, config, base, revision)
    if config.is_prompt_learning and is_trainable:
        raise ConfigError(
            f"PEFT saves the prompt of a {config.peft_type} adapter, and not what it was computed with",
            option="is_trainable",
        )
    config.inference_mode = config.is_prompt_learning  # otherwise biases that train are tensors of the adapter
    device = join_launch(will_train=is_trainable) if device is None else with_index(device)
    dtype = _settle_dtype(dtype, device)
    meant = choose_quantization(folder, quantization)
    compiling = read_compile_options(torch_compile, device, meant)
    described = BaseModel(base, config, dtype, revision, trust_remote_code, attn_implementation, meant)
    resolved = plan_inference(described, asked, device, num_cached_tokens)
    (model,) = load_sharded(
        base,
        config,
        resolved,
        device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        adapter=folder,
        allow_base_mismatch=allow_base_mismatch,
        quantization=meant,
    )
    if not is_trainable:
        model.eval().requires_grad_(False)
    return _finish(model, resolved, compiling, device)


def shard(
    model: PeftModel,
    placement: str = "auto",
    *,
    device: torch.device | None = None,
    quantization: str | Quantization | None = None,
    numerics: str | Numerics = "exact",
    torch_compile: bool | Mapping[str, Any] = False,
    profile_steps: str | None = None,
    profile_dir: str | Path = "profile",
    **placement_options: Any,
) -> PeftModel:
    """Shard the frozen base of a PeftModel that is already in memory, in place, and return it.

    Args:
        model: every rank holds the same base; adapters may differ and are overwritten by rank 0's.
        placement: where the base rests: `shard` (1/W on each of W ranks), `replicate`, `host` or `auto`.
        device: where this rank computes; the default is the GPU of its local rank, or the CPU.
        quantization: as for `load`. What PEFT has computed from the base already (DoRA's magnitudes, modules that
            train) stays as it is.
        numerics, torch_compile, profile_steps, profile_dir: as for `load`.
        **placement_options: as for `load`.

    Raises:
        ConfigError: a placement that is not possible (`file` needs files: see `load`), a base that another library has
            quantized, or ranks that accelerate does not see.
        CheckpointError: the model's structure is not recognized.

    Ranks: collective over all ranks.
    Memory: the model as it is at first; unsharded weights are freed a unit at a time.
    """
    profiled = parse_steps(profile_steps) if profile_steps else None
    options = read_placement(placement=placement, **placement_options)
    if options.placement == "file":
        raise ConfigError(
            "'file' reads the base from its checkpoint, but this model is in memory",
            option="placement",
            fix="use lorashard.load, or another placement",
        )
    if any(ENGINE_ATTRIBUTE in module.__dict__ for module in model.modules()):
        raise ConfigError(f"this {type(model).__name__} is sharded already", fix="call lorashard.shard once")
    meant = read_quantization(quantization)
    for config in model.peft_config.values():
        check_config(config, is_in_memory=True, quantization=meant)
    check_unquantized(model, base_test(model))
    device = _join(device)
    model_type = getattr(getattr(model.get_base_model(), "config", None), "model_type", None)
    kernels = _settle_numerics(numerics, torch_compile, lambda: choose_numerics(device, model_type, meant))
    compiling = read_compile_options(torch_compile or kernels == "compile", device, meant)
    resolved = _resolve(options)
    if resolved.sequence_parallel_size > 1:
        check_sequences(model, resolved.sequence_parallel_size)
    name_units(model, resolved.unit_paths)
    structure = find_structure(model, base_test(model))
    quantize_structure(structure, meant)
    group = dist.ShardGroup.of_size(resolved.group_size, resolved.wait_warning_s)
    resident = choose_resident(structure, resolved.resident_layers)
    make_home = ShardedHomes(resolved.placement == "host", group, device, MemorySource(), resident, HostCopies(device))
    shard_structure(model, structure, make_home, group, device, resolved.prefetch, is_resized(model))
    remember_quantization(model, meant)
    return _profiled(_finish(model.to(device), resolved, compiling, device, kernels), profiled, profile_dir)


def _profiled(model: PeftModel, steps: tuple[int, int] | None, folder: str | Path) -> PeftModel:
    if steps is not None:
        StepProfiler(Path(folder), engine_of(model), *steps).follow_optimizer()
    return model


def _finish(
    model: PeftModel,
    resolved: ResolvedPlacement,
    compiling: Mapping[str, Any] | None,
    device: torch.device,
    kernels: str = "exact",
) -> PeftModel:
    if kernels == "liger":
        put_liger_kernels(model)
    if compiling is not None:
        base = base_of(model)
        check_compiling(base.quantization if base else None)  # files that are quantized already
        compile_layers(find_layers(model), compiling)
    if resolved.layer_microbatch_size is not None:
        split_layers(find_layers(model), resolved.layer_microbatch_size)
    if resolved.mlp_tile_tokens is not None:
        tile_mlps(find_layers(model), resolved.mlp_tile_tokens)
    if resolved.activation_checkpointing_layers != "all":
        checkpoint_some(model, resolved.activation_checkpointing_layers)
    if device.type == "cpu" and explain_slow_bfloat16(device) is not None:
        on_release(model.get_base_model(), warn_of_autocast(find_layers(model)[0]))
    if resolved.sequence_parallel_size > 1:
        share_sequences(model, resolved.sequence_parallel_size, resolved.wait_warning_s)
    end_backward_at_adapters(model)
    spare_lora_steps(model)
    follow_added_adapters(model, engine_of(model))
    share_adapters(model)
    return model


def stats(model: torch.nn.Module) -> Stats:
    """Return what the engine of a model from `load` or `shard` has gathered, waited for and holds on this rank."""
    return engine_of(model).stats()


def _join(device: torch.device | None) -> torch.device:
    """Start the process group if needed, and return where this rank computes."""
    own_device = join_launch(will_train=True)
    return own_device if device is None else with_index(device)


def _settle_dtype(asked: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in; rank 0 logs what `auto` became, and what a slow one costs.

    Raises:
        ConfigError: `asked` is no dtype that a base can have.

    Ranks: collective over all ranks.
    """
    dtype, sentence = choose_dtype(read_dtype(asked), device)
    if sentence is not None and dist.get_rank() == 0:
        _logger.warning("%s", sentence)
    return dtype


def _settle_numerics(
    asked: str | Numerics, torch_compile: bool | Mapping[str, Any], choose: Callable[[], Numerics]
) -> str:
    """Return the kernels of decoder layers, as in `Numerics`; rank 0 logs what `fused` became.

    Ranks: as `read_numerics`.
    """
    numerics = read_numerics(asked, torch_compile, choose)
    if asked == "fused" and dist.get_rank() == 0:
        _logger.warning("numerics: %s", numerics)
    return numerics.kernels


def _plan(
    base: BaseModel, training: Training, device: torch.device, options: PlacementOptions
) -> ResolvedPlacement | PlacementOptions:
    try:
        plan = plan_here(base, training, device, options)
    except PlanError as error:
        chosen: ResolvedPlacement | PlacementOptions
        chosen, taken = options.settle_unplanned()
        lines = [f"placement: {error}; taking {taken}"]
    else:
        chosen = plan.choice.placement
        lines = [f"placement: {plan.reason}", *([str(plan.checkpointing)] if plan.checkpointing else [])]
    if dist.get_rank() == 0:
        for line in lines:
            _logger.warning("%s", line)
    return chosen


def _resolve(options: PlacementOptions | ResolvedPlacement) -> ResolvedPlacement:
    if isinstance(options, ResolvedPlacement):
        return options
    world_size, node_size = dist.get_world_size(), dist.find_node_size()
    resolved = resolve_placement(options, world_size, node_size)
    for line in (explain_placement(options), explain_groups(options, resolved.group_size, world_size, node_size)):
        if line and dist.get_rank() == 0:
            _logger.warning(line)
    return resolved
