"""One run, as every rank lives it: data, model, TRL's trainer, the adapter saved and read back."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from peft import LoraConfig, PeftModel
from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import is_liger_kernel_available

from . import api, dist
from .checkpoint import check_adapter, save_adapter
from .config import RunConfig
from .data.options import DataOptions
from .data.prepare import Prepared, prepare
from .data.tokenizer import load_tokenizer
from .errors import ConfigError
from .forecast import describe_base, describe_training
from .loraplus import make_loraplus_optimizer
from .nodes import check_nodes
from .plan.auto import plan_here
from .plan.choose import Plan, PlanError
from .plan.costs import Row
from .profiling import StepProfiler
from .rewards import Reward, load_rewards
from .runs import Run, measure_rank

_CHECKED_TOKENS = 64


def finetune(config: RunConfig) -> None:
    """Train a LoRA adapter on this rank; leave it, checked, in `config.output_dir`.

    Raises:
        UserError: a mistake in options, data or model; all ranks raise alike.

    Ranks: run by every rank. The data is prepared before the ranks form a group, so that no collective waits for it.
    """
    env = dist.read_launcher_env()
    rank, world_size = (env.rank, env.world_size) if env else (0, 1)
    checkpoint = _find_checkpoint(config)
    run = Run(Path(config.output_dir), rank, world_size)
    run.set_status("tokenise", error=None)
    try:
        _finetune(config, run, rank, checkpoint)
    except KeyboardInterrupt:
        run.set_status("stopped", error="KeyboardInterrupt")
        raise
    except BaseException as error:
        run.set_status("failed", error=f"{type(error).__name__}: {error}")
        raise


def _finetune(config: RunConfig, run: Run, rank: int, checkpoint: str | None) -> None:
    tokenizer = load_tokenizer(
        config.model_name_or_path,
        config.model_revision,
        config.trust_remote_code,
        config.chat_template_path,
        config.eos_token,
    )
    prepared = prepare(DataOptions(**config.data_options()), tokenizer, method=config.trl_method)
    _say(rank, f"dataset: {prepared.report.summary()}")
    run.set_status("load")
    arguments = build_arguments(config, dist.is_cpu_requested())
    rewards = load_rewards(config.reward_funcs or [], config.reward_model_name_or_path)
    is_shared = check_nodes(run.folder, arguments, prepared.path.name, checkpoint)
    placement, plan = _place(config, prepared, run, rank)
    set_seed(arguments.seed)
    begin_s = time.perf_counter()
    model = api.load(
        config.model_name_or_path,
        LoraConfig(**config.lora_options()),
        dtype=getattr(torch, config.dtype),
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=config.attn_implementation,
        torch_compile=config.compile_options(),
        num_labels=1 if config.trl_method.is_classifier else None,
        **placement,
    )
    if checkpoint is not None:
        base = api.base_of(model)
        assert base is not None
        base.identity.check(Path(checkpoint), config.model_name_or_path, config.allow_base_mismatch)
    base_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    stats = api.stats(model)
    _say(
        rank,
        f"model: {base_bytes / 2**30:.3f} GiB of frozen base; each of {dist.get_world_size()} ranks holds "
        f"{stats.bytes_at_rest / 2**30:.3f} GiB of it on its device and {stats.host_bytes_at_rest / 2**30:.3f} GiB in "
        f"host memory; loaded in {time.perf_counter() - begin_s:.1f} s; "
        f"{model.get_nb_trainable_parameters()[0]:,} trainable parameters",
    )
    trainer = build_trainer(config, model, tokenizer, arguments, prepared, rewards)
    # First, so that trackers and the progress bar see what it adds to a log line.
    trainer.callback_handler.callbacks.insert(0, _RunCallback(run, model, base_bytes))
    if config.profile_range is not None:
        profiler = StepProfiler(run.folder / "profile", api.engine_of(model), *config.profile_range)
        trainer.add_callback(_ProfileCallback(profiler))
    if config.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(config.early_stopping_patience, config.early_stopping_threshold))
    if config.sample_prompts is not None:
        from .generation import SampleCallback

        as_chat = tokenizer.chat_template is not None and prepared.report.is_chat
        sampler = SampleCallback(model, tokenizer, config.sample_prompts, run.folder, as_chat=as_chat)
        trainer.callback_handler.callbacks.insert(0, sampler)  # before the run's own, which leaves the pause out
    run.begin(config.to_yaml(), is_resumed=config.resumes_in_place)
    trainer.train(resume_from_checkpoint=checkpoint)
    run.set_status("save", step=trainer.state.global_step)
    if rank == 0 or (not is_shared and arguments.local_process_index == 0):
        save_adapter(model, tokenizer, run.folder)
    trainer.accelerator.wait_for_everyone()
    verdict = check_adapter(model, run.folder, _take_tokens(prepared.train, tokenizer, arguments.device))
    _say(rank, f"adapter: saved to {run.folder} and read back: {verdict}")
    measured = measure_rank(api.engine_of(model), base_bytes)
    run.add_rank_line({"step": trainer.state.global_step} | measured)
    if plan is not None:
        _say(rank, _compare_with_plan(plan.choice, measured))
    run.set_status("done", step=trainer.state.global_step)
    trainer.accelerator.end_training()


def _place(config: RunConfig, prepared: Prepared, run: Run, rank: int) -> tuple[dict[str, Any], Plan | None]:
    """Return the arguments of `load` that say where the base rests; what is left to `auto` is planned.

    Raises:
        ConfigError: nothing fits.

    Ranks: collective over all ranks where there is something to plan; all get one plan.
    """
    options = config.placement_options()
    if not config.is_placement_open:
        return options, None
    device = api.join_launch()
    training = describe_training(
        config, device.type, prepared.report.longest_tokens, epoch_tokens=prepared.report.num_tokens
    )
    try:
        plan = plan_here(describe_base(config), training, device, config)
    except PlanError as error:
        _say(rank, f"placement: {error}; taking shard, give --placement for another")
        return options | {"placement": "shard", "activation_checkpointing_layers": "all"}, None
    run.save_plan(plan.to_json())
    _say(rank, f"placement: {plan.reason}")
    return {"placement": plan.choice.placement}, plan


def _compare_with_plan(row: Row, measured: dict[str, Any]) -> str:
    if "device_peak_bytes" in measured:
        name, predicted_bytes, found_bytes = "peak", row.peak_bytes, measured["device_peak_bytes"]
    else:  # nothing counts what a CPU's operations allocate
        name, predicted_bytes = "base at rest and slots", row.rest_bytes + row.slot_bytes
        found_bytes = measured["bytes_at_rest"] + measured["slot_bytes"]
    return f"memory: {name} predicted {predicted_bytes / 2**30:.3f} GiB, measured {found_bytes / 2**30:.3f} GiB"


def build_arguments(config: RunConfig, use_cpu: bool, world_size: int | None = None) -> TrainingArguments:
    """Return the trainer's arguments: the user's, and what lorashard's way of preparing and sharding decides.

    Making them also makes accelerate's state, and with it the process group.

    Args:
        world_size: How many ranks the arguments are for, where they are checked in one process.

    Raises:
        ConfigError: TRL or transformers refuses an option.
    """
    if use_cpu and (config.activation_checkpointing_kwargs or {}).get("offload"):
        raise ConfigError(
            "activation_checkpointing_kwargs: offload moves activations from a GPU; leave it out with --cpu"
        )
    if use_cpu and config.trainer_options.get("activation_offloading"):
        raise ConfigError("activation_offloading: it moves activations from a GPU; leave it out with --cpu")
    if config.trainer_options.get("use_liger_kernel"):
        if use_cpu:
            raise ConfigError("use_liger_kernel: Liger's kernels run on GPUs; leave it out with --cpu")
        if not is_liger_kernel_available():
            raise ConfigError("use_liger_kernel: Liger's kernels are not installed: pip install liger-kernel")
    method = config.trl_method
    decided: dict[str, Any] = {
        "output_dir": config.output_dir,
        "use_cpu": use_cpu,
        "trust_remote_code": config.trust_remote_code,
        "ddp_find_unused_parameters": False,
    }
    if method.is_prepared_here:
        names = ("packing", "packing_strategy", "eval_packing", "max_length")
        decided |= {name: getattr(config, name) for name in names}
        decided["dataset_kwargs"] = {"skip_prepare_dataset": True}
    config_class = getattr(trl, method.config_class)
    if world_size is not None:
        config_class = type(method.config_class, (config_class,), {"world_size": world_size})
    try:
        arguments = config_class(**config.trainer_options | decided)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"TRL's {method.config_class} refuses the options: {' '.join(str(error).split())}") from error
    if arguments.optim_target_modules is None:  # the others are made for a model
        try:
            Trainer.get_optimizer_cls_and_kwargs(arguments)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"optim: {' '.join(str(error).split())}") from error
    if arguments.mixed_precision != "no" and not (arguments.bf16 or arguments.fp16):
        raise ConfigError(
            f"accelerate is told mixed precision {arguments.mixed_precision}, but the run is to compute in "
            f"{config.dtype}: answer no to mixed precision in `accelerate config`, where dtype is what counts, or give "
            "the dtype that is meant"
        )
    return arguments


def build_trainer(
    config: RunConfig,
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    prepared: Prepared,
    rewards: Sequence[Reward],
) -> Trainer:
    """Return TRL's trainer of the method, unmodified.

    Args:
        rewards: Of a method that generates; empty otherwise.

    Raises:
        ConfigError: TRL refuses the model, the rows or the options.

    Ranks: collective over all ranks where the trainer tokenises: rank 0 does so first, the others take its results.
    """
    method = config.trl_method
    optimizer = None
    if config.loraplus_lr_ratio is not None:
        optimizer = make_loraplus_optimizer(model, arguments, config.loraplus_lr_ratio)
    try:
        return getattr(trl, method.trainer_class)(
            model=model,
            args=arguments,
            train_dataset=prepared.train,
            eval_dataset=prepared.eval,
            processing_class=tokenizer,
            optimizers=(optimizer, None),
            **({"reward_funcs": list(rewards)} if method.generates else {}),
        )
    except (ValueError, NotImplementedError, OSError) as error:
        raise ConfigError(f"TRL's {method.trainer_class} refuses the run: {' '.join(str(error).split())}") from error


class _ProfileCallback(TrainerCallback):
    """Tells a profiler of the trainer's steps, which a resumed run goes on counting."""

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler

    def on_step_begin(self, args, state, control, **kwargs):
        self._profiler.begin_step(state.global_step + 1)

    def on_step_end(self, args, state, control, **kwargs):
        self._profiler.end_step(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self._profiler.close()


class _RunCallback(TrainerCallback):
    """Adds tokens per second to what the trainer logs, and writes it down."""

    def __init__(self, run: Run, model: PeftModel, base_bytes: int) -> None:
        self._run = run
        self._engine = api.engine_of(model)
        self._base_bytes = base_bytes
        self._last: tuple[float, float] | None = None
        self._step_end_s = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = (time.perf_counter(), 0.0)
        self._run.set_status("train", step=state.global_step, max_steps=state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self._step_end_s = time.perf_counter()

    def on_evaluate(self, args, state, control, **kwargs):
        self._leave_out_pause()

    def on_save(self, args, state, control, **kwargs):
        self._leave_out_pause()

    def _leave_out_pause(self) -> None:
        now_s = time.perf_counter()
        if self._last is not None:
            last_s, num_tokens = self._last
            self._last = (last_s + now_s - self._step_end_s, num_tokens)
        self._step_end_s = now_s

    def on_log(self, args, state, control, logs=None, **kwargs):
        now_s = time.perf_counter()
        if "loss" in logs and "num_tokens" in logs and self._last is not None:
            last_s, last_tokens = self._last
            num_tokens = logs["num_tokens"]
            logs["tokens_per_s"] = round((num_tokens - last_tokens) / (now_s - last_s), 1)
            self._last = (now_s, num_tokens)
        self._run.add_metrics({"step": state.global_step, "time": time.time()} | logs)
        self._run.add_rank_line({"step": state.global_step} | measure_rank(self._engine, self._base_bytes))
        self._run.set_status("train", step=state.global_step, max_steps=state.max_steps)


def _find_checkpoint(config: RunConfig) -> str | None:
    wanted = config.resume_from_checkpoint
    if not wanted:
        return None
    if isinstance(wanted, str):
        if not os.path.isdir(wanted):
            raise ConfigError(f"resume_from_checkpoint: expected a checkpoint's folder, found nothing at {wanted}")
        return wanted
    found = get_last_checkpoint(config.output_dir) if os.path.isdir(config.output_dir) else None
    if found is None:
        raise ConfigError(
            f"resume_from_checkpoint: expected a checkpoint in {config.output_dir}, found none; leave the option out "
            "to start anew"
        )
    return found


def _take_tokens(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> torch.Tensor:
    """Return tokens to compare logits on; where no row is tokenised, those of the row as Python writes it."""
    input_ids = rows[0].get("input_ids") or tokenizer(str(rows[0]))["input_ids"]
    return torch.tensor([input_ids[:_CHECKED_TOKENS]], device=device)


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(f"lorashard: {line}", flush=True)
