"""The training that a rank does: one run, or the jobs of a sweep."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import set_seed

from ..config.run_config import RunConfig
from ..model.sharding import engine_of
from ..runs.folder import Run
from ..runs.sweep_file import select_jobs
from ..runtime.failures import Failure
from ..runtime.heartbeat import Heartbeat
from ..runtime.launch_env import read_launcher_env
from ..runtime.rank_store import is_timeout
from ..runtime.signals import StopRequest
from .console import Console
from .one_run import begin_run, count_sequence_ranks, end_group, load_models, place_base, record_plan, train_run
from .preparing import make_hooks, read_data, set_up
from .resume_request import check_wanted
from .sweep import finetune_jobs


def finetune(config: RunConfig, stop: StopRequest) -> None:
    """Train LoRA adapters on this rank; leave each, checked, in its run's folder.

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
    jobs = select_jobs(config)
    for each in [job.config for job in jobs] or [config]:
        check_wanted(each)
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
            if jobs:
                finetune_jobs(config, jobs, run, stop, console, heartbeat.describe_ranks)
            else:
                _finetune(config, run, stop, console, heartbeat)
        except BaseException as error:
            if is_timeout(error):
                error.add_note(heartbeat.describe_ranks())
            failure = Failure.of_error(error)
            status.end("stopped" if failure.is_stop else "failed", failure)
            raise


def _finetune(config: RunConfig, run: Run, stop: StopRequest, console: Console, heartbeat: Heartbeat) -> None:
    data = read_data(config, run, console)
    stop.check()
    run.status.enter("load")
    setup = set_up(config, run, data, console)
    placement, plan = place_base(setup)
    hooks = make_hooks(setup, stop, heartbeat.describe_ranks, count_sequence_ranks(placement))
    record_plan(run, plan)
    set_seed(setup.arguments.seed)
    (model,), base_bytes = load_models([setup], placement, run)
    stop.check()
    engine_of(model).follow_ranks(heartbeat.describe_ranks)
    train_run(setup, hooks, model, base_bytes, plan, end_group, partial(begin_run, setup))
