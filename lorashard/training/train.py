"""One run, as every rank lives it: data, model, TRL's trainer, the adapter saved and read back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

from .. import api
from ..config.placement import PlacementOptions, ResolvedPlacement
from ..config.quantization_options import describe_quantization
from ..config.run_config import RunConfig
from ..data.prepare import Prepared, prepare
from ..data.tokenizer import load_tokenizer
from ..errors import ConfigError, RunStopped, TrainingError, UserError
from ..export.save import check_adapter, save_adapter
from ..model.fusing import Numerics
from ..model.loftq import make_lora
from ..model.sharding import base_of, engine_of
from ..planning.auto import Training, plan_given, plan_here
from ..planning.choose import Plan, PlanError, explained_planning
from ..planning.costs import Row
from ..planning.fusing import choose_for
from ..planning.run_plan import describe_base, describe_training, settle_dtype_here
from ..runs.checkpoints import clear_leftovers, delete, list_checkpoints, read_step, set_aside
from ..runs.folder import Run
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..runtime.failures import Failure
from ..runtime.heartbeat import Heartbeat
from ..runtime.join import join_launch
from ..runtime.launch_env import is_cpu_requested, read_launcher_env
from ..runtime.rank_store import is_timeout
from ..runtime.signals import StopRequest
from ..weights.fingerprint import check_quantization
from .arguments import build_arguments
from .callbacks import add_callbacks
from .console import Console
from .loraplus import make_loraplus_optimizer
from .meter import RankMeter
from .nodes import check_nodes
from .nonfinite import NonfiniteRule
from .resume import check_resume, choose_checkpoint, describe_run, name_kernels, read_saved_facts
from .resume_request import check_wanted, read_progress
from .rewards import Reward, check_reward_model, load_rewards
from .trainer import RunHooks, make_checkpointing
from .trusted_files import check_checkpoint

_CHECKED_TOKENS = 64


def finetune(config: RunConfig, stop: StopRequest) -> None:
    """Train a LoRA adapter on this rank; leave it, checked, in `config.output_dir`.

    Args:
        stop: looked at between phases, and at the end of each step, where a checkpoint is written first.

    Raises:
        UserError: a mistake in options, data or model; all ranks raise alike.
        TrainingError: a loss or the gradient's norm was not finite; all ranks raise alike.
        RunStopped: `stop` was asked for.

    Ranks: run by every rank. The data is prepared before the ranks form a group, so that no collective waits for it.
    """
    env = read_launcher_env()
    rank, world_size = (env.rank, env.world_size) if env else (0, 1)
    check_wanted(config)
    console = Console(rank, has_bar=not config.trainer_options.get("disable_tqdm"))
    run = Run(Path(config.output_dir), rank, world_size, console.show)
    status = run.status
    status.enter("tokenize", world_size=world_size)
    with Heartbeat(
        env,
        config.heartbeat_timeout,
        lambda reason, rank: status.end("failed", Failure(1, reason, "hang", rank, is_crash=True)),
        lambda: status.place,
    ) as heartbeat:
        try:
            _finetune(config, run, rank, stop, console, heartbeat.describe_ranks)
        except BaseException as error:
            if is_timeout(error):
                error.add_note(heartbeat.describe_ranks())
            failure = Failure.of_error(error)
            status.end("stopped" if failure.is_stop else "failed", failure)
            raise


def _finetune(
    config: RunConfig, run: Run, rank: int, stop: StopRequest, console: Console, describe_ranks: Callable[[], str]
) -> None:
    status, log = run.status, console.log
    tokenizer = load_tokenizer(**config.tokenizer_options())
    prepared = prepare(config.data_options(), tokenizer, method=config.trl_method, progress=status.advance)
    log(f"dataset: {prepared.report.summary()}")
    stop.check()
    status.enter("load")
    device = join_launch(config.trainer.get("ddp_backend"))
    env = read_launcher_env()
    checkpoint = choose_checkpoint(config, env is None or env.local_rank == 0, run.emit, log)
    config = settle_dtype(config, device, checkpoint, log)
    arguments = build_arguments(config, is_cpu_requested())
    numerics = settle_numerics(config, device, checkpoint, log)
    dist.set_timeout(arguments.ddp_timeout)
    rewards = load_rewards(config.reward_funcs or [], config.reward_model_name_or_path)
    if config.reward_model_name_or_path is not None:
        check_reward_model(config.reward_model_name_or_path, config.trust_remote_code)
    raise_on_all_ranks(lambda: check_checkpoint(checkpoint) if checkpoint else None)
    is_shared = check_nodes(run.folder, arguments, prepared.path.name, checkpoint)
    facts = describe_run(config, arguments, prepared, name_kernels(config, numerics))
    hooks = RunHooks(
        stop=stop,
        facts=asdict(facts),
        nonfinite=NonfiniteRule(
            skips=config.on_nonfinite == "skip",
            name_rows=lambda rows, num_rows: prepared.name_rows(rows, num_rows, tokenizer),
            log=log,
            emit=run.events.emit,
        ),
        rows_per_step=config.global_batch_size,
        saved_world_size=raise_on_all_ranks(
            lambda: check_resume(config, arguments, checkpoint, facts, log) if checkpoint else None
        ),
        log=log,
        emit=run.emit,
        enter=lambda phase, step: status.enter(phase, step=step),
        wait_warning_s=config.wait_warning_s,
        describe_ranks=describe_ranks,
    )
    placement, plan = _place(config, prepared, device, run, log)
    set_seed(arguments.seed)
    model, base_bytes = _load(config, placement, numerics, run, log)
    if checkpoint is not None:
        base = base_of(model)
        assert base is not None
        base.identity.check(checkpoint, config.model_name_or_path, config.allow_base_mismatch)
        check_quantization(checkpoint, base.quantization, config.model_name_or_path, config.allow_base_mismatch)
    stop.check()
    engine_of(model).follow_ranks(describe_ranks)
    meter = RankMeter(engine_of(model), base_bytes)
    if not config.trl_method.is_prepared_here:
        status.enter("tokenize")  # which TRL does
    trainer = build_trainer(config, model, tokenizer, arguments, prepared, rewards, hooks)
    add_callbacks(
        trainer,
        config,
        run,
        meter,
        model,
        tokenizer,
        samples_chat=tokenizer.chat_template is not None and prepared.report.is_chat,
        console=console,
    )
    writes = rank == 0 or (not is_shared and arguments.local_process_index == 0)
    is_in_place = checkpoint is not None and checkpoint.resolve().parent == run.folder.resolve()
    resumed_step = read_progress(checkpoint) if checkpoint and is_in_place else None

    def begin() -> None:
        if writes:
            clear_leftovers(run.folder)
            _set_aside(run, resumed_step, config.overwrite_output_dir)
        run.begin(config.to_yaml(), resumed_step)

    raise_on_all_ranks(begin)
    if checkpoint is not None:
        run.emit("resumed", checkpoint=str(checkpoint), step=read_progress(checkpoint))
    _train(trainer, checkpoint)
    status.enter("save", step=trainer.state.global_step)
    raise_on_all_ranks(lambda: save_adapter(model, tokenizer, run.folder) if writes else None)
    verdict = check_adapter(model, run.folder, _take_tokens(prepared.train, tokenizer, arguments.device))
    log(f"adapter: saved to {run.folder} and read back: {verdict}")
    measured = meter.read()
    run.add_rank_line({"step": trainer.state.global_step} | measured)
    if plan is not None:
        log(_compare_with_plan(plan.choice, measured))
    status.end("done")
    _end_group(trainer)


def settle_dtype(
    config: RunConfig,
    device: torch.device,
    checkpoint: Path | None,
    log: Callable[[str], None],
    explain: Callable[[torch.device], str | None] | None = None,
) -> RunConfig:
    """Return the configuration with what `dtype: auto` becomes; an explicit one is as it was asked for.

    A run continues in the dtype that it began in, whatever this machine is good at: its steps would not be the same.

    Args:
        checkpoint: that the run resumes from.
        explain: as for `choose_dtype`.

    Ranks: collective over all ranks.
    """
    if config.dtype != "auto":
        return config
    saved = dist.broadcast_object(raise_on_all_ranks(lambda: read_saved_facts(checkpoint).get("dtype")))
    if saved is not None:
        log(f"dtype: {saved}, as before {checkpoint}")
        return config.with_dtype(saved)
    config, notes = settle_dtype_here(config, device, explain)
    for note in notes:
        log(note)
    return config


def settle_numerics(
    config: RunConfig, device: torch.device, checkpoint: Path | None, log: Callable[[str], None]
) -> Numerics:
    """Return what `numerics` becomes on these ranks. A run that is fused continues with the kernels that it began with.

    Args:
        checkpoint: that the run resumes from.

    Raises:
        ConfigError: fused is not possible, or not with the kernels that the run began with.

    Ranks: collective over all ranks.
    """
    if config.numerics == "exact":
        return Numerics()
    saved = dist.broadcast_object(raise_on_all_ranks(lambda: read_saved_facts(checkpoint).get("numerics")))
    before = saved if saved in ("compile", "liger") else None
    quantization = config.resolve_quantization()
    numerics = choose_for(config.model_name_or_path, config.model_revision, quantization, device, before)
    log(f"numerics: {numerics}")
    return numerics


def _load(
    config: RunConfig,
    placement: PlacementOptions | ResolvedPlacement,
    numerics: Numerics,
    run: Run,
    log: Callable[[str], None],
) -> tuple[PeftModel, int]:
    """Return the model with its adapter, and how many bytes the whole base takes."""
    begin_s = time.perf_counter()
    model = api.load(
        config.model_name_or_path,
        make_lora(config.lora_options()),
        dtype=getattr(torch, config.dtype),
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=config.attn_implementation,
        numerics=numerics,
        torch_compile=config.compile_options(),
        quantization=config.resolve_quantization(),
        cache_quantized=config.cache_quantized,
        num_labels=1 if config.trl_method.is_classifier else None,
        progress=run.status.advance,
        placement=placement,
    )
    base_bytes = sum(field.num_bytes for unit in engine_of(model).units for field in unit.layout.fields)
    computed_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    base = base_of(model)
    quantization = base.quantization if base else None
    from_bytes = (
        f", {describe_quantization(quantization)} ({computed_bytes / 2**30:.3f} before)" if quantization else ""
    )
    stats = api.stats(model)
    log(
        f"model: {base_bytes / 2**30:.3f} GiB of frozen base{from_bytes}; each of {dist.get_world_size()} ranks holds "
        f"{stats.bytes_at_rest / 2**30:.3f} GiB of it on its device and {stats.host_bytes_at_rest / 2**30:.3f} GiB in "
        f"host memory; loaded in {time.perf_counter() - begin_s:.1f} s; "
        f"{model.get_nb_trainable_parameters()[0]:,} trainable parameters",
    )
    return model, base_bytes


def _set_aside(run: Run, resumed_step: int | None, deletes: bool) -> None:
    """Rename the checkpoints that this run continues without: damaged ones, and those of steps that it does again."""
    for found in list_checkpoints(run.folder):
        if resumed_step is not None and read_step(found) <= resumed_step:
            continue
        if deletes:
            delete(found)
        else:
            run.events.emit("checkpoint_set_aside", checkpoint=found.name, renamed=set_aside(found).name)


def _train(trainer: Trainer, checkpoint: Path | None) -> None:
    """Train; where the run stops early on all ranks alike, let trackers and ranks go as at a run's end."""
    ended: RunStopped | TrainingError | None = None
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except (RunStopped, TrainingError) as error:
        ended = error.with_traceback(None)  # its frames hold the model
    if ended is not None:
        _end_group(trainer)
        raise ended


def _end_group(trainer: Trainer) -> None:
    """Let the trackers finish, and the ranks leave their group.

    DDP goes first. Where it is the last to hold the group, its end waits, with the interpreter's lock, for the group's
    threads, and they may wait for that lock: gloo ranks then hang at the very end (seen in 1 run of 20).
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    gc.collect()
    trainer.accelerator.end_training()


def _place(
    config: RunConfig, prepared: Prepared, device: torch.device, run: Run, log: Callable[[str], None]
) -> tuple[PlacementOptions | ResolvedPlacement, Plan | None]:
    """Return where the base rests, for `load`, and a plan: what is left to `auto` is planned.

    Where nothing is, rank 0 alone has a plan, for the record.

    Raises:
        ConfigError: nothing fits.

    Ranks: collective over all ranks where there is something to plan; all get one plan.
    """

    def describe() -> Training:
        return describe_training(
            config,
            device.type,
            dist.get_world_size(),
            prepared.report.longest_tokens,
            epoch_tokens=prepared.report.num_tokens,
        )

    if not config.is_placement_open:
        return config, _foresee(config, describe, device, run, log) if dist.get_rank() == 0 else None
    training = describe()
    try:
        plan = plan_here(describe_base(config), training, device, config)
    except PlanError as error:
        settled, taken = config.settle_unplanned()
        log(f"placement: {error}; taking {taken}")
        return settled, None
    run.save_plan(plan.to_json())
    log(f"placement: {plan.reason}")
    if plan.checkpointing:
        log(str(plan.checkpointing))
    return plan.choice.placement, plan


def _foresee(
    config: RunConfig, describe: Callable[[], Training], device: torch.device, run: Run, log: Callable[[str], None]
) -> Plan | None:
    """Write down what a placement that a person has chosen is predicted to cost; None where that cannot be told.

    Ranks: local.
    """
    env = read_launcher_env()
    node_size = env.local_world_size if env else None
    try:
        with explained_planning():
            plan = plan_given(describe_base(config), describe(), device, config, dist.get_world_size(), node_size)
            run.save_plan(plan.to_json())
    except UserError as error:  # the run may work all the same: whether it does is not found out here
        log(f"plan.json is not written: {error}")
        run.drop_plan()
        return None
    return plan


def _compare_with_plan(row: Row, measured: dict[str, Any]) -> str:
    if "device_peak_bytes" in measured:
        name, predicted_bytes, found_bytes = "peak", row.peak_bytes, measured["device_peak_bytes"]
    else:  # nothing counts what a CPU's operations allocate
        name, predicted_bytes = "base at rest and slots", row.rest_bytes + row.slot_bytes
        found_bytes = measured["bytes_at_rest"] + measured["slot_bytes"]
    return f"memory: {name} predicted {predicted_bytes / 2**30:.3f} GiB, measured {found_bytes / 2**30:.3f} GiB"


def build_trainer(
    config: RunConfig,
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    prepared: Prepared,
    rewards: Sequence[Reward],
    hooks: RunHooks,
) -> Trainer:
    """Return TRL's trainer of the method, with complete checkpoints and what else makes a run survive.

    Args:
        rewards: Of a method that generates; empty otherwise.

    Raises:
        ConfigError: TRL refuses the model, the rows or the options.

    Ranks: collective over all ranks where the trainer tokenizes: rank 0 does so first, the others take its results.
    """
    method = config.trl_method
    optimizer = None
    if config.loraplus_lr_ratio is not None:
        optimizer = make_loraplus_optimizer(model, arguments, config.loraplus_lr_ratio)
    try:
        return make_checkpointing(getattr(trl, method.trainer_class))(
            hooks=hooks,
            model=model,
            args=arguments,
            train_dataset=prepared.train,
            eval_dataset=prepared.eval,
            processing_class=tokenizer,
            optimizers=(optimizer, None),
            **({"reward_funcs": list(rewards)} if method.generates else {}),
        )
    except (ValueError, NotImplementedError, OSError) as error:
        raise ConfigError(" ".join(str(error).split()), where=f"TRL's {method.trainer_class}") from error


def _take_tokens(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> torch.Tensor:
    """Return tokens to compare logits on; where no row is tokenized, those of the row as Python writes it."""
    input_ids = rows[0].get("input_ids") or tokenizer(str(rows[0]))["input_ids"]
    return torch.tensor([input_ids[:_CHECKED_TOKENS]], device=device)
