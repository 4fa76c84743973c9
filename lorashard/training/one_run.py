"""One run from its model on: TRL's trainer, its callbacks, the adapter saved and read back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

from .. import api
from ..config.placement import PlacementOptions, ResolvedPlacement
from ..config.quantization_options import describe_quantization
from ..config.run_config import RunConfig
from ..data.prepare import Prepared
from ..errors import ConfigError, RunStopped, TrainingError, UserError
from ..export.save import check_adapter, save_adapter
from ..model.loftq import make_lora
from ..model.sharding import base_of, engine_of
from ..planning.auto import Training, plan_given, plan_here
from ..planning.choose import Plan, PlanError, explained_planning
from ..planning.costs import Row
from ..planning.run_plan import describe_base, describe_training
from ..runs.checkpoints import clear_leftovers, delete, list_checkpoints, read_step, set_aside
from ..runs.folder import Run
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..runtime.launch_env import read_launcher_env
from ..weights.fingerprint import check_quantization
from .callbacks import add_callbacks
from .loraplus import make_loraplus_optimizer
from .meter import RankMeter
from .preparing import RunSetup
from .resume_request import read_progress
from .rewards import Reward
from .trainer import RunHooks, make_checkpointing

_CHECKED_TOKENS = 64


def load_models(
    setups: Sequence[RunSetup], placement: PlacementOptions | ResolvedPlacement, run: Run
) -> tuple[list[PeftModel], int]:
    """Return the model of each run with its adapter, all on one base, and how many bytes the whole base takes.

    Args:
        setups: one run, drawn from the random numbers as they are; or jobs, each drawn from its own seed.
        run: tells how far the loading is.

    Raises:
        UserError: of the files; or a run resumes from an adapter that belongs to another base.

    Ranks: collective over all ranks.
    Memory: as for `lorashard.load`.
    """
    config, log = setups[0].config, setups[0].console.log
    begin_s = time.perf_counter()
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "revision": config.model_revision,
        "trust_remote_code": config.trust_remote_code,
        "attn_implementation": config.attn_implementation,
        "numerics": setups[0].numerics,
        "torch_compile": config.compile_options(),
        "quantization": config.resolve_quantization(),
        "cache_quantized": config.cache_quantized,
        "num_labels": 1 if config.trl_method.is_classifier else None,
        "progress": run.status.advance,
        "placement": placement,
    }
    loras = [make_lora(setup.config.lora_options()) for setup in setups]
    if len(setups) == 1:
        models = [api.load(config.model_name_or_path, loras[0], **options)]
    else:
        names = [str(index) for index in range(len(setups))]
        seeds = {name: setup.arguments.seed for name, setup in zip(names, setups, strict=True)}
        adapters = dict(zip(names, loras, strict=True))
        models = list(api.load(config.model_name_or_path, adapters=adapters, adapter_seeds=seeds, **options).values())
    model = models[0]
    base_bytes = sum(field.num_bytes for unit in engine_of(model).units for field in unit.layout.fields)
    computed_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    base = base_of(model)
    quantization = base.quantization if base else None
    from_bytes = (
        f", {describe_quantization(quantization)} ({computed_bytes / 2**30:.3f} before)" if quantization else ""
    )
    stats = api.stats(model)
    trained = " + ".join(f"{each.get_nb_trainable_parameters()[0]:,}" for each in models)
    log(
        f"model: {base_bytes / 2**30:.3f} GiB of frozen base{from_bytes}; each of {dist.get_world_size()} ranks holds "
        f"{stats.bytes_at_rest / 2**30:.3f} GiB of it on its device and {stats.host_bytes_at_rest / 2**30:.3f} GiB in "
        f"host memory; loaded in {time.perf_counter() - begin_s:.1f} s; {trained} trainable parameters",
    )
    for setup in setups:
        if setup.checkpoint is not None:
            assert base is not None
            name, allow = config.model_name_or_path, config.allow_base_mismatch
            base.identity.check(setup.checkpoint, name, allow)
            check_quantization(setup.checkpoint, base.quantization, name, allow)
    return models, base_bytes


def train_run(
    setup: RunSetup,
    hooks: RunHooks,
    model: PeftModel,
    base_bytes: int,
    plan: Plan | None,
    leave: Callable[[Trainer], None],
    begin: Callable[[], None],
    join: Callable[[Trainer], None] = lambda trainer: None,
) -> None:
    """Train a model; leave its adapter, checked, in the run's folder.

    Args:
        leave: lets go of the trainer, at the end and where the run stops early on all ranks alike.
        begin: called when nothing refuses the run any more: `begin_run`, or what comes to it.
        join: is given the trainer before it trains.

    Raises:
        UserError: TRL refuses the model, the rows or the options; or a disk.
        TrainingError: a loss or the gradient's norm was not finite.
        RunStopped: the run was asked to stop.

    Ranks: collective over all ranks; all raise alike.
    """
    config, run, checkpoint, data = setup.config, setup.run, setup.checkpoint, setup.data
    meter = RankMeter(engine_of(model), base_bytes)
    if not config.trl_method.is_prepared_here:
        run.status.enter("tokenize")  # which TRL does
    trainer = build_trainer(config, model, data.tokenizer, setup.arguments, data.prepared, setup.rewards, hooks)
    add_callbacks(
        trainer,
        config,
        run,
        meter,
        model,
        data.tokenizer,
        samples_chat=data.tokenizer.chat_template is not None and data.prepared.report.is_chat,
        console=setup.console,
    )
    raise_on_all_ranks(begin)
    if checkpoint is not None:
        run.emit("resumed", checkpoint=str(checkpoint), step=read_progress(checkpoint))
    join(trainer)
    _train(trainer, checkpoint, leave)
    run.status.enter("save", step=trainer.state.global_step)
    raise_on_all_ranks(lambda: save_adapter(model, data.tokenizer, run.folder) if _writes(setup) else None)
    tokens = _take_tokens(data.prepared.train, data.tokenizer, setup.arguments.device)
    verdict = check_adapter(model, run.folder, tokens)
    setup.console.log(f"adapter: saved to {run.folder} and read back: {verdict}")
    measured = meter.read()
    run.add_rank_line({"step": trainer.state.global_step} | measured)
    if plan is not None:
        setup.console.log(_compare_with_plan(plan.choice, measured))
    run.status.end("done")
    leave(trainer)


def begin_run(setup: RunSetup) -> None:
    """Record what was asked and what runs it, in place of an earlier run in the folder that is not continued.

    Ranks: local; called by every rank.
    """
    run, checkpoint = setup.run, setup.checkpoint
    is_in_place = checkpoint is not None and checkpoint.resolve().parent == run.folder.resolve()
    resumed_step = read_progress(checkpoint) if checkpoint and is_in_place else None
    if _writes(setup):
        clear_leftovers(run.folder)
        _set_aside(run, resumed_step, setup.config.overwrite_output_dir)
    run.begin(setup.config.to_yaml(), resumed_step)


def _writes(setup: RunSetup) -> bool:
    """Tell whether this rank writes what is common into the run's folder: one does, of all or of each node."""
    return dist.get_rank() == 0 or (not setup.is_shared and setup.arguments.local_process_index == 0)


def _set_aside(run: Run, resumed_step: int | None, deletes: bool) -> None:
    """Rename the checkpoints that this run continues without: damaged ones, and those of steps that it does again."""
    for found in list_checkpoints(run.folder):
        if resumed_step is not None and read_step(found) <= resumed_step:
            continue
        if deletes:
            delete(found)
        else:
            run.events.emit("checkpoint_set_aside", checkpoint=found.name, renamed=set_aside(found).name)


def _train(trainer: Trainer, checkpoint: Path | None, leave: Callable[[Trainer], None]) -> None:
    """Train; where the run stops early on all ranks alike, let trackers and ranks go as at a run's end."""
    ended: RunStopped | TrainingError | None = None
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except (RunStopped, TrainingError) as error:
        ended = error.with_traceback(None)  # its frames hold the model
    if ended is not None:
        leave(trainer)
        raise ended


def end_group(trainer: Trainer) -> None:
    """Let the trackers finish, and the ranks leave their group."""
    free(trainer)
    trainer.accelerator.end_training()


def free(trainer: Trainer) -> None:
    """Let go of what a trainer that is over holds, and of DDP.

    Where DDP is the last to hold the group, its end waits, with the interpreter's lock, for the group's threads, and
    they may wait for that lock: gloo ranks then hang at the very end (seen in 1 run of 20).
    """
    trainer.model_wrapped = trainer.model
    # The other jobs of a sweep train on with the memory of these states, while references to the trainer last.
    for holder in (trainer, trainer.callback_handler):
        holder.optimizer = holder.lr_scheduler = None
    trainer.accelerator.free_memory()
    gc.collect()


def place_base(setup: RunSetup) -> tuple[PlacementOptions | ResolvedPlacement, Plan | None]:
    """Return where the base rests, for `load`, and a plan: what is left to `auto` is planned.

    Where nothing is, rank 0 alone has a plan, for the record.

    Raises:
        ConfigError: nothing fits.

    Ranks: collective over all ranks where there is something to plan; all get one plan.
    """
    config, prepared, device, log = setup.config, setup.data.prepared, setup.device, setup.console.log

    def describe() -> Training:
        return describe_training(
            config,
            device.type,
            dist.get_world_size(),
            prepared.report.longest_tokens,
            epoch_tokens=prepared.report.num_tokens,
        )

    if not config.is_placement_open:
        return config, _foresee(config, describe, device, log) if dist.get_rank() == 0 else None
    training = describe()
    try:
        plan = plan_here(describe_base(config), training, device, config)
    except PlanError as error:
        settled, taken = config.settle_unplanned()
        log(f"placement: {error}; taking {taken}")
        return settled, None
    log(f"placement: {plan.reason}")
    for warning in plan.warnings:
        log(f"warning: {warning}")
    for line in filter(None, (plan.checkpointing, plan.sweep)):
        log(str(line))
    return plan.choice.placement, plan


def count_sequence_ranks(placement: PlacementOptions | ResolvedPlacement) -> int:
    """Return how many ranks share each row."""
    if isinstance(placement, ResolvedPlacement):
        return placement.sequence_parallel_size
    return 1 if placement.num_sequence_ranks == "auto" else placement.num_sequence_ranks


def record_plan(run: Run, plan: Plan | None) -> None:
    """Write a plan down in a run's folder, once nothing refuses the run any more; without one, none stays there."""
    if plan is None:
        run.drop_plan()
    else:
        run.save_plan(plan.to_json())


def _foresee(
    config: RunConfig, describe: Callable[[], Training], device: torch.device, log: Callable[[str], None]
) -> Plan | None:
    """Return what a placement that a person has chosen is predicted to cost; None where that cannot be told.

    Ranks: local.
    """
    env = read_launcher_env()
    node_size = env.local_world_size if env else None
    try:
        with explained_planning():
            plan = plan_given(describe_base(config), describe(), device, config, dist.get_world_size(), node_size)
            for warning in plan.warnings:
                log(f"warning: {warning}")
            if plan.choice.lacks:
                log(f"warning: placement: {plan.reason}")
    except UserError as error:  # the run may work all the same: whether it does is not found out here
        log(f"plan.json is not written: {error}")
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
