"""A sweep, as every rank lives it: each job is a run in a thread of its own, and all share one base."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import TrainerCallback

from ..config.run_config import RunConfig
from ..config.sweep import Job, read_stop
from ..engine.turns import Turns
from ..errors import ConfigError, RunStopped, TrainingError
from ..model.sharding import engine_of
from ..runs.folder import Run
from ..runs.root import JOB_STOP_NAME, SWEEP_NAME
from ..runs.status import Status
from ..runs.sweep_file import JobState, SweepFile, explain_halving
from ..runtime import dist
from ..runtime.failures import Failure
from ..runtime.join import join_launch
from ..runtime.launch_env import read_launcher_env
from ..runtime.signals import STOP_SIGNAL, StopRequest
from .console import Console
from .halving import Halving
from .jobs import find_turns, join_turns, run_jobs
from .one_run import begin_run, free, load_models, place_base, record_plan, train_run
from .preparing import RunData, RunSetup, make_hooks, read_data, set_up
from .trainer import CheckpointingTrainer, RunHooks


class JobStop:
    """What one job is asked: to stop, by itself or with the sweep, or to save."""

    def __init__(self, sweep: SweepStops, folder: Path) -> None:
        self._sweep = sweep
        self._file = folder / JOB_STOP_NAME
        self.halved_at: int | None = None
        self.is_save_asked = False

    @property
    def signal_name(self) -> str | None:
        """The signal that asked; a file in the job's folder and a lost comparison count as one."""
        if self._sweep.request.signal_name is not None:
            return self._sweep.request.signal_name
        return STOP_SIGNAL.name if self.halved_at is not None or self._file.exists() else None

    def take_save(self) -> bool:
        """Tell whether a checkpoint was asked for, and forget it."""
        self._sweep.hear()
        is_asked, self.is_save_asked = self.is_save_asked, False
        return is_asked

    def forget_file(self) -> None:
        """Remove the file that asked: a resumed job is not to stop at once."""
        self._file.unlink(missing_ok=True)


class SweepStops:
    """Tells each job what the sweep was asked: a request to save is for all of them."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self.jobs: dict[str, JobStop] = {}

    def add(self, name: str, folder: Path) -> JobStop:
        """Return what a job is asked."""
        self.jobs[name] = JobStop(self, folder)
        return self.jobs[name]

    def give_up(self, losers: Mapping[str, int], file: SweepFile) -> None:
        """Ask jobs to end that lost a comparison, each at a step; it holds even if the sweep is killed before that."""
        file.give_up(losers)
        for name, step in losers.items():
            self.jobs[name].halved_at = step

    def hear(self) -> None:
        """Pass a request to save on."""
        if self.request.take_save():
            for job in self.jobs.values():
                job.is_save_asked = True


@dataclass(frozen=True)
class _JobRun:
    """A job's own part of a sweep."""

    job: Job
    setup: RunSetup
    hooks: RunHooks
    stop: JobStop


def finetune_jobs(
    config: RunConfig,
    jobs: tuple[Job, ...],
    run: Run,
    stop: StopRequest,
    console: Console,
    describe_ranks: Callable[[], str],
) -> None:
    """Train all jobs of a sweep on this rank; leave each adapter, checked, in its job's folder.

    Args:
        run: the sweep's own, whose folder holds those of the jobs.

    Raises:
        UserError: a mistake in options, data or model; all ranks raise alike.
        TrainingError: of the jobs that failed, once the others have ended.
        RunStopped: `stop` was asked for; each job has saved a checkpoint.

    Ranks: collective over all ranks.
    """
    stops = SweepStops(stop)
    env = read_launcher_env()
    has_own_disk = bool(config.trainer.get("save_on_each_node")) and env is not None and env.local_rank == 0
    writes = run.rank == 0 or has_own_disk
    file = SweepFile(run.folder, jobs, read_stop(config), writes, resumes=bool(config.resume_from_checkpoint))
    runs: dict[str, Run] = {}
    try:
        parts = _set_up_jobs(jobs, run, runs, stops, console, describe_ranks)
        ended = _train_jobs(config, parts, run, file, stops, console, describe_ranks)
    except BaseException as error:
        failure = Failure.of_error(error)
        for job in jobs:
            if file.is_alive(job.name):
                if job.name in runs:
                    runs[job.name].status.end("stopped" if failure.is_stop else "failed", failure)
                file.enter(job.name, "stopped" if failure.is_stop else "failed", failure.message)
        raise
    dist.leave_group()
    _tell_end(ended, run)


def _train_jobs(
    config: RunConfig,
    parts: list[_JobRun],
    run: Run,
    file: SweepFile,
    stops: SweepStops,
    console: Console,
    describe_ranks: Callable[[], str],
) -> Mapping[str, Exception | None]:
    """Load the base with all adapters and train them; return the error by which each job has ended, or None."""
    setups = [part.setup for part in parts]
    # What is planned for is the sweep, whose options are those of its jobs where they have the same.
    whole = replace(setups[0], config=config.with_dtype(setups[0].config.dtype), console=console)
    placement, plan = place_base(whole)
    record_plan(run, plan)
    models, base_bytes = load_models(setups, placement, run)
    stops.request.check()
    engine_of(models[0]).follow_ranks(describe_ranks)
    names = [part.job.name for part in parts]
    halving = Halving.of(read_stop(config), names, file.decided_step)
    progress = _Progress(run, names)
    turns = find_turns(models[0]) if len(models) > 1 else None
    give_up = partial(stops.give_up, file=file)

    def begin(ready: Collection[str]) -> None:
        for part in parts:
            if part.job.name in ready:
                begin_run(part.setup)
        run.begin(config.to_yaml(), None)

    start = JointStart(names, turns, begin)

    def train(part: _JobRun, model: PeftModel) -> None:
        name, setup = part.job.name, part.setup

        def join(trainer: Any) -> None:
            trainer.add_callback(JobCallback(name, file, progress))
            if halving is not None:
                trainer.add_callback(HalvingCallback(name, halving, part.stop, give_up, turns, trainer))
            if turns is not None:
                join_turns(trainer, turns)

        try:
            file.enter(name, "running")
            train_run(setup, part.hooks, model, base_bytes, plan, free, partial(start.wait, name), join)
            file.enter(name, "done")
        except Exception as error:
            failure = Failure.of_error(error)
            halved_at = part.stop.halved_at if failure.is_stop else None
            setup.run.status.end("stopped" if failure.is_stop else "failed", failure)
            state: JobState = "halved" if halved_at is not None else "stopped" if failure.is_stop else "failed"
            why = explain_halving(halved_at) if halved_at is not None else failure.message
            file.enter(name, state, why)
            setup.console.log(f"{state}: {why}")
            if not isinstance(error, RunStopped | TrainingError):
                raise
            # One rank alone may have been asked to stop the sweep, and the file that stops a job may be gone by now.
            if not failure.is_stop or any(dist.gather_objects(stops.request.signal_name is not None)):
                raise
        finally:
            model.zero_grad(set_to_none=True)
            part.stop.forget_file()
            progress.end(name)
            start.leave(name)
            if halving is not None:
                give_up(halving.leave(name))

    works = {part.job.name: partial(train, part, model) for part, model in zip(parts, models, strict=True)}
    if turns is None:
        return _run(works)
    return run_jobs(turns, works, dist.HostGroup.of_all(config.wait_warning_s, describe_ranks))


def _run(works: Mapping[str, Callable[[], None]]) -> dict[str, Exception | None]:
    """Run the one job that is left of a sweep."""
    ended: dict[str, Exception | None] = {}
    for name, work in works.items():
        try:
            work()
            ended[name] = None
        except Exception as error:
            ended[name] = error
    return ended


def _set_up_jobs(
    jobs: tuple[Job, ...],
    run: Run,
    runs: dict[str, Run],
    stops: SweepStops,
    console: Console,
    describe_ranks: Callable[[], str],
) -> list[_JobRun]:
    """Prepare each job as a run of its own; data that jobs share is read once.

    Args:
        runs: where the jobs' own are put, by name.

    Raises:
        UserError: as `set_up`; or ranks train other jobs, since nodes have other records of an earlier start.
    """
    read: dict[str, RunData] = {}
    parts, each_data = [], []
    for job in jobs:
        key = repr((job.config.data_options(), job.config.tokenizer_options()))
        if key not in read:
            read[key] = read_data(job.config, run, console)
        each_data.append(read[key])
    stops.request.check()
    run.status.enter("load")
    join_launch(jobs[0].config.trainer.get("ddp_backend"))
    everyone = dist.gather_objects([job.name for job in jobs])
    other = next((rank for rank, names in enumerate(everyone) if names != everyone[0]), None)
    if other is not None:
        raise ConfigError(
            expected=f"the same jobs on all nodes, in {SWEEP_NAME} of output_dir",
            found=f"{', '.join(everyone[0])} on rank 0 and {', '.join(everyone[other])} on rank {other}",
            fix="copy what is missing, or use a disk that all nodes share",
        )
    for job, data in zip(jobs, each_data, strict=True):
        folder = Path(job.config.output_dir)
        if run.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            Status.begin(folder)  # what the file says may be of an earlier start
        own = runs[job.name] = Run(folder, run.rank, run.world_size)
        own.status.enter("load", world_size=run.world_size)
        stop = stops.add(job.name, own.folder)
        stop.forget_file()  # of an earlier start
        setup = set_up(job.config, own, data, console.named(job.name))
        parts.append(_JobRun(job, setup, make_hooks(setup, stop, describe_ranks), stop))
    return parts


def _tell_end(ended: Mapping[str, Exception | None], run: Run) -> None:
    """End the sweep as its jobs have ended.

    Raises:
        Exception: that of a stop, or of a job that was the user's mistake; or of what failed.
    """
    errors = {name: error for name, error in ended.items() if error is not None}
    if not errors:
        run.status.end("done")
        return
    for error in errors.values():
        if not isinstance(error, TrainingError):
            raise error
    names = ", ".join(errors)
    first = next(iter(errors.values()))
    raise TrainingError(f"{len(errors)} of {len(ended)} jobs failed ({names}), the first of them: {first}")


class JointStart:
    """Lets the jobs begin together: what lies in their folders of an earlier sweep stays whole until all of them can.

    A sweep that is killed has then begun in all folders or in none, so that no job goes on from the checkpoints that
    it was to overwrite.
    """

    def __init__(self, names: Collection[str], turns: Turns | None, begin: Callable[[Collection[str]], None]) -> None:
        """Take the jobs.

        Args:
            turns: of the jobs; None where there is one.
            begin: given the names of those that are ready; the others have ended before.
        """
        self._preparing = set(names)
        self._ready: set[str] = set()
        self._turns = turns
        self._begin = begin
        self._has_begun = False

    def wait(self, name: str) -> None:
        """Wait until every job can begin or has ended, and let all of them; called by a job that can.

        Ranks: local.
        """
        self._ready.add(name)
        self.leave(name)
        if self._turns is not None:
            self._turns.wait_until(lambda: not self._preparing)
        if not self._has_begun:
            self._begin(self._ready)
            self._has_begun = True

    def leave(self, name: str) -> None:
        """Take note that a job is not waited for any more."""
        self._preparing.discard(name)


class _Progress:
    """How far a sweep is: as far as the job that has come least far."""

    def __init__(self, run: Run, names: list[str]) -> None:
        self._run = run
        self._steps = dict.fromkeys(names, (0, 0))

    def note(self, name: str, step: int, max_steps: int) -> None:
        """Say which steps of a job are done, of how many."""
        self._steps[name] = step, max_steps
        if all(total for _, total in self._steps.values()):
            self._run.note_step(*min(self._steps.values(), key=lambda steps: steps[0] - steps[1]))

    def end(self, name: str) -> None:
        """Leave a job out that is over, unless it is the last."""
        if len(self._steps) > 1:
            self._steps.pop(name, None)


class JobCallback(TrainerCallback):
    """Writes down how far a job of a sweep is."""

    def __init__(self, name: str, file: SweepFile, progress: _Progress) -> None:
        self._name = name
        self._file = file
        self._progress = progress

    def on_train_begin(self, args, state, control, **kwargs):
        self._progress.note(self._name, state.global_step, state.max_steps)
        self._file.note(self._name, state.global_step, state.max_steps, {})

    def on_step_end(self, args, state, control, **kwargs):
        self._progress.note(self._name, state.global_step, state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._file.note(self._name, state.global_step, state.max_steps, logs or {})


class HalvingCallback(TrainerCallback):
    """Compares a job's evaluations with those of the others; it waits for theirs, and ends there if it is behind."""

    def __init__(
        self,
        name: str,
        halving: Halving,
        stop: JobStop,
        give_up: Callable[[Mapping[str, int]], None],
        turns: Turns | None,
        trainer: CheckpointingTrainer,
    ) -> None:
        self._name = name
        self._halving = halving
        self._stop = stop
        self._give_up = give_up
        self._turns = turns
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        for line in state.log_history:  # of the checkpoint
            self._hear(line["step"], state.max_steps, line)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        step = state.global_step
        self._hear(step, state.max_steps, metrics or {})
        if self._turns is not None and self._halving.is_open(step):
            self._turns.wait_until(lambda: not self._halving.is_open(step))
        if self._stop.halved_at is not None:
            self._trainer.stop_here()

    def _hear(self, step: int, max_steps: int, metrics: Mapping[str, Any]) -> None:
        if step < max_steps:
            self._give_up(self._halving.hear(self._name, step, metrics))
