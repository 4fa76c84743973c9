"""What a run needs before its model: data, options that are settled, the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..config.run_config import RunConfig
from ..data.prepare import Prepared, prepare
from ..data.tokenizer import load_tokenizer
from ..model.fusing import Numerics
from ..planning.fusing import choose_for
from ..planning.run_plan import settle_dtype_here
from ..runs.folder import Run
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..runtime.join import join_launch
from ..runtime.launch_env import is_cpu_requested, read_launcher_env
from .arguments import build_arguments
from .console import Console
from .nodes import check_nodes
from .nonfinite import NonfiniteRule
from .resume import check_resume, choose_checkpoint, describe_run, name_kernels, read_saved_facts
from .rewards import Reward, check_reward_model, load_rewards
from .trainer import RunHooks, StopLike
from .trusted_files import check_checkpoint


@dataclass(frozen=True)
class RunData:
    """The data of a run, and the tokenizer that it was prepared for."""

    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared


@dataclass(frozen=True)
class RunSetup:
    """All that a run needs beside its model.

    Attributes:
        config: with the dtype that `auto` became.
        checkpoint: that it resumes from.
        is_shared: whether the nodes share the run's folder.
    """

    config: RunConfig
    run: Run
    console: Console
    data: RunData
    device: torch.device
    checkpoint: Path | None
    arguments: TrainingArguments
    numerics: Numerics
    rewards: Sequence[Reward]
    is_shared: bool


def read_data(config: RunConfig, run: Run, console: Console) -> RunData:
    """Return a run's rows as the trainer takes them.

    Ranks: local; before the ranks form a group, so that no collective waits for it.
    """
    tokenizer = load_tokenizer(**config.tokenizer_options())
    prepared = prepare(config.data_options(), tokenizer, method=config.trl_method, progress=run.status.advance)
    console.log(f"dataset: {prepared.report.summary()}")
    return RunData(tokenizer, prepared)


def set_up(config: RunConfig, run: Run, data: RunData, console: Console) -> RunSetup:
    """Settle all that a run can be refused for before its model is loaded.

    Raises:
        UserError: a mistake in options, data, checkpoint or machines; all ranks raise alike.

    Ranks: collective over all ranks, whose group it starts if there is none.
    """
    log = console.log
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
    is_shared = check_nodes(run.folder, arguments, data.prepared.path.name, checkpoint)
    return RunSetup(config, run, console, data, device, checkpoint, arguments, numerics, rewards, is_shared)


def make_hooks(
    setup: RunSetup, stop: StopLike, describe_ranks: Callable[[], str], num_sequence_ranks: int = 1
) -> RunHooks:
    """Settle which rows a step has, and whether the run may continue from its checkpoint with them.

    Args:
        num_sequence_ranks: ranks that share each row, which planning may have chosen.

    Raises:
        UserError: the checkpoint's run had other rows; all ranks raise alike.

    Ranks: collective over all ranks.
    """
    config, run, arguments, prepared, log = (
        setup.config,
        setup.run,
        setup.arguments,
        setup.data.prepared,
        setup.console.log,
    )
    facts = describe_run(config, arguments, prepared, name_kernels(config, setup.numerics), num_sequence_ranks)
    return RunHooks(
        stop=stop,
        facts=asdict(facts),
        nonfinite=NonfiniteRule(
            skips=config.on_nonfinite == "skip",
            name_rows=lambda rows, num_rows: prepared.name_rows(rows, num_rows, setup.data.tokenizer),
            log=log,
            emit=run.events.emit,
        ),
        rows_per_step=config.global_batch_size,
        saved_world_size=raise_on_all_ranks(
            lambda: check_resume(config, arguments, setup.checkpoint, facts, log) if setup.checkpoint else None
        ),
        log=log,
        emit=run.emit,
        enter=lambda phase, step: run.status.enter(phase, step=step),
        wait_warning_s=config.wait_warning_s,
        describe_ranks=describe_ranks,
    )


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
