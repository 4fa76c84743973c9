"""One run, as every rank lives it: data, model, TRL's trainer, the adapter saved and read back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, PeftModel
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from . import api, dist
from .checkpoint import check_adapter, save_adapter
from .config import RunConfig
from .data.options import DataOptions
from .data.prepare import Prepared, prepare
from .data.tokenizer import load_tokenizer
from .errors import ConfigError
from .forecast import describe_base, describe_training
from .plan.auto import plan_here
from .plan.choose import Plan, PlanError
from .plan.costs import Row
from .profiling import StepProfiler
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
    prepared = prepare(DataOptions(**config.data_options()), tokenizer)
    _say(rank, f"dataset: {prepared.report.summary()}")
    run.set_status("load")
    arguments = build_arguments(config, dist.is_cpu_requested())
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
    trainer = build_trainer(model, tokenizer, arguments, prepared, run, base_bytes)
    if config.profile_range is not None:
        profiler = StepProfiler(run.folder / "profile", api.engine_of(model), *config.profile_range)
        trainer.add_callback(_ProfileCallback(profiler))
    if config.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(config.early_stopping_patience, config.early_stopping_threshold))
    if config.sample_prompts is not None:
        from .generation import SampleCallback

        is_text = prepared.report.format in ("prompt/completion", config.dataset_text_field)
        as_chat = tokenizer.chat_template is not None and not is_text
        sampler = SampleCallback(model, tokenizer, config.sample_prompts, run.folder, as_chat=as_chat)
        trainer.callback_handler.callbacks.insert(0, sampler)  # before the run's own, which leaves the pause out
    run.begin(config.to_yaml(), is_resumed=config.resumes_in_place)
    trainer.train(resume_from_checkpoint=checkpoint)
    run.set_status("save", step=trainer.state.global_step)
    if rank == 0:
        save_adapter(model, tokenizer, run.folder)
    trainer.accelerator.wait_for_everyone()
    verdict = check_adapter(model, run.folder, _take_tokens(prepared.train, arguments.device))
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
    device, world_size = api.join_launch(), dist.get_world_size()
    env = dist.read_launcher_env()
    training = describe_training(
        config, device.type, prepared.report.longest_tokens, epoch_tokens=prepared.report.num_tokens
    )
    ranks_per_node = env.local_world_size if env and env.local_world_size else world_size
    try:
        plan = plan_here(describe_base(config), training, device, ranks_per_node, config)
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


def build_arguments(config: RunConfig, use_cpu: bool) -> SFTConfig:
    """Return the trainer's arguments: the user's, and what lorashard's way of preparing and sharding decides.

    Making them also makes accelerate's state, and with it the process group.

    Raises:
        ConfigError: TRL or transformers refuses an option.
    """
    if use_cpu and (config.activation_checkpointing_kwargs or {}).get("offload"):
        raise ConfigError(
            "activation_checkpointing_kwargs: offload moves activations from a GPU; leave it out with --cpu"
        )
    if use_cpu and config.trainer_options.get("activation_offloading"):
        raise ConfigError("activation_offloading: it moves activations from a GPU; leave it out with --cpu")
    decided: dict[str, Any] = {
        "output_dir": config.output_dir,
        "use_cpu": use_cpu,
        "packing": config.packing,
        "packing_strategy": config.packing_strategy,
        "eval_packing": config.eval_packing,
        "max_length": config.max_length,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "ddp_find_unused_parameters": False,
    }
    try:
        return SFTConfig(**config.trainer_options | decided)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise ConfigError(f"TRL's SFTConfig refuses the options: {' '.join(str(error).split())}") from error


def build_trainer(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: SFTConfig,
    prepared: Prepared,
    run: Run,
    base_bytes: int,
) -> SFTTrainer:
    """Return TRL's trainer, unmodified, with a callback that writes the run's folder."""
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=prepared.train,
        eval_dataset=prepared.eval,
        processing_class=tokenizer,
    )
    # First, so that trackers and the progress bar see what it adds to a log line.
    trainer.callback_handler.callbacks.insert(0, _RunCallback(run, model, base_bytes))
    return trainer


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
        if "loss" in logs and self._last is not None:
            last_s, last_tokens = self._last
            num_tokens = logs.get("num_tokens", 0.0)
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


def _take_tokens(rows: datasets.Dataset, device: torch.device) -> torch.Tensor:
    return torch.tensor([rows[0]["input_ids"][:_CHECKED_TOKENS]], device=device)


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(f"lorashard: {line}", flush=True)
