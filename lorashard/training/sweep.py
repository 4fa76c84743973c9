"""A sweep, as every rank lives it: each job is a run in a thread of its own, and all share one base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..config.run_config import RunConfig
from ..config.sweep import Job, read_stop
from ..errors import RunStopped, TrainingError
from ..model.sharding import engine_of
from ..runs.folder import Run
from ..runs.root import JOB_STOP_NAME
from ..runs.status import Status
from ..runs.sweep_file import JobState, SweepFile
from ..runtime import dist
from ..runtime.failures import Failure
from ..runtime.signals import STOP_SIGNAL, StopRequest
from .console import Console
from .halving import Halving
from .jobs import find_turns, join_turns, run_jobs
from .one_run import free, load_models, place_base, train_run
from .preparing import RunData, RunSetup, make_hooks, read_data, set_up
from .trainer import RunHooks


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
    file = SweepFile(run.folder, jobs, read_stop(config), writes=run.rank == 0)
    parts = _set_up_jobs(jobs, run, stops, console, describe_ranks)
    setups = [part.setup for part in parts]
    # What is planned for is the sweep, whose options are those of its jobs where they have the same.
    whole = replace(setups[0], config=config.with_dtype(setups[0].config.dtype), console=console)
    placement, plan = place_base(whole, run)
    models, base_bytes = load_models(setups, placement, run)
    stop.check()
    engine_of(models[0]).follow_ranks(describe_ranks)
    run.begin(config.to_yaml(), None)
    halving = Halving.of(read_stop(config), [part.job.name for part in parts])
    progress = _Progress(run, [part.job.name for part in parts])
    turns = find_turns(models[0]) if len(models) > 1 else None

    def train(part: _JobRun) -> None:
        model = models[parts.index(part)]
        name, setup = part.job.name, part.setup

        def join(trainer: Any) -> None:
            trainer.add_callback(JobCallback(name, file, progress, halving, stops))
            if turns is not None:
                join_turns(trainer, turns)

        try:
            file.enter(name, "running")
            train_run(setup, part.hooks, model, base_bytes, plan, free, join)
            file.enter(name, "done")
        except Exception as error:
            failure = Failure.of_error(error)
            is_halved = failure.is_stop and part.stop.halved_at is not None
            setup.run.status.end("stopped" if failure.is_stop else "failed", failure)
            state: JobState = "halved" if is_halved else "stopped" if failure.is_stop else "failed"
            why = f"given up after the evaluation at step {part.stop.halved_at}" if is_halved else failure.message
            file.enter(name, state, why)
            setup.console.log(f"{state}: {why}")
            if not isinstance(error, RunStopped | TrainingError):
                raise
            # One rank alone may have been asked to stop the sweep, and the file that stops a job may be gone by now.
            if not failure.is_stop or any(dist.gather_objects(stop.signal_name is not None)):
                raise
        finally:
            model.zero_grad(set_to_none=True)
            part.stop.forget_file()
            progress.end(name)
            if halving is not None:
                _give_up(halving.leave(name), stops)

    works = {part.job.name: partial(train, part) for part in parts}
    try:
        ended = _run(works) if turns is None else run_jobs(turns, works)
    except BaseException as error:
        for part in parts:
            if file.is_alive(part.job.name):
                part.setup.run.status.end("failed", Failure.of_error(error))
                file.enter(part.job.name, "failed", str(error))
        raise
    dist.leave_group()
    _tell_end(ended, run)


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
    stops: SweepStops,
    console: Console,
    describe_ranks: Callable[[], str],
) -> list[_JobRun]:
    """Prepare each job as a run of its own; data that jobs share is read once."""
    read: dict[str, RunData] = {}
    runs, each_data = [], []
    for job in jobs:
        key = repr((job.config.data_options(), job.config.tokenizer_options()))
        if key not in read:
            read[key] = read_data(job.config, run, console)
        each_data.append(read[key])
    stops.request.check()
    run.status.enter("load")
    for job, data in zip(jobs, each_data, strict=True):
        folder = Path(job.config.output_dir)
        if run.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            Status.begin(folder)  # what the file says may be of an earlier start
        own = Run(folder, run.rank, run.world_size)
        own.status.enter("load", world_size=run.world_size)
        stop = stops.add(job.name, own.folder)
        setup = set_up(job.config, own, data, console.named(job.name))
        runs.append(_JobRun(job, setup, make_hooks(setup, stop, describe_ranks), stop))
    return runs


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


def _give_up(losers: Mapping[str, int], stops: SweepStops) -> None:
    for name, step in losers.items():
        stops.jobs[name].halved_at = step


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
    """Writes down how far a job of a sweep is, and compares its evaluations with those of the others."""

    def __init__(
        self, name: str, file: SweepFile, progress: _Progress, halving: Halving | None, stops: SweepStops
    ) -> None:
        self._name = name
        self._file = file
        self._progress = progress
        self._halving = halving
        self._stops = stops

    def on_train_begin(self, args, state, control, **kwargs):
        self._progress.note(self._name, state.global_step, state.max_steps)
        self._file.note(self._name, state.global_step, state.max_steps, {})

    def on_step_end(self, args, state, control, **kwargs):
        self._progress.note(self._name, state.global_step, state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._file.note(self._name, state.global_step, state.max_steps, logs or {})

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if self._halving is not None and state.global_step < state.max_steps:
            _give_up(self._halving.hear(self._name, state.global_step, metrics or {}), self._stops)
