"""Several trainers that train at the same time on one base: the jobs of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.state import GradientState, ThreadLocalSharedDict
from transformers import Trainer, set_seed
from transformers.trainer_utils import TrainOutput

from ..engine.turns import Turns
from ..errors import ConfigError, RunStopped, ShardError, TrainingError, UserError
from ..model.sharding import engine_of
from ..runtime import dist
from ..runtime.dist import HostGroup

_OWN_ERRORS = (UserError, TrainingError, RunStopped)  # that end a job alone


class SweepTrainer:
    """Trains several models from `lorashard.load(..., adapters=...)`, each by a trainer of its own, on one base.

    Each trainer does what it would do alone, in a thread; all visit each unit of the base together, so that it is
    gathered or streamed once for all of them. Each adapter ends with the bits that it would have alone, where random
    numbers begin with the seed of the trainer's arguments.
    """

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        """Take the trainers of the jobs.

        Args:
            trainers: by the names of the jobs; SFTTrainer, DPOTrainer, or others whose steps are forwards and a
                backward each.

        Raises:
            ConfigError: their models are not all of one `load`, each once; or a trainer looks for its batch size.
        """
        self.trainers = dict(trainers)
        models = [trainer.accelerator.unwrap_model(trainer.model) for trainer in self.trainers.values()]
        engines, num_models = {engine_of(model) for model in models}, len({id(model) for model in models})
        if len(engines) != 1 or num_models != len(models):
            raise ConfigError(
                "the trainers' models must share a base",
                option="trainers",
                expected="a trainer for each model of one lorashard.load(..., adapters={...})",
                found=f"{len(models)} trainers of {num_models} models on {len(engines)} bases",
            )
        for name, trainer in self.trainers.items():
            if trainer.args.auto_find_batch_size:
                raise ConfigError(
                    "a trainer that begins again with smaller batches would leave the others in the middle of a step",
                    option="auto_find_batch_size",
                    expected="False, with SweepTrainer",
                    found="True",
                    where=f"the arguments of {name}",
                    fix="give a per_device_train_batch_size that fits",
                )
        self._turns = find_turns(models[0])

    def train(self, resume_from_checkpoint: Mapping[str, Any] | None = None) -> dict[str, TrainOutput]:
        """Train all jobs to their ends, and return what each trainer's `train` has returned.

        Args:
            resume_from_checkpoint: that of each job, by its name.

        Raises:
            UserError, TrainingError: of the first job that failed so, with a note of its name, once the others have
                ended.
            BaseException: any other error of a job, at once.

        Ranks: collective over all ranks.
        Memory: the optimizer states of all jobs, and what each keeps between forward and backward.
        """
        outputs: dict[str, TrainOutput] = {}
        resumed = resume_from_checkpoint or {}

        def train(name: str) -> None:
            trainer = self.trainers[name]
            set_seed(trainer.args.seed)
            own_state = trainer.accelerator.gradient_state
            join_turns(trainer, self._turns)
            try:
                outputs[name] = trainer.train(resume_from_checkpoint=resumed.get(name))
            finally:  # it may train on alone
                del trainer.accelerator.backward
                trainer.accelerator.gradient_state = own_state

        works = {name: partial(train, name) for name in self.trainers}
        ended = run_jobs(self._turns, works, HostGroup.of_all())
        for name, error in ended.items():
            if error is not None:
                error.add_note(f"in the job {name} of the sweep")
                raise error
        return outputs


def find_turns(model: torch.nn.Module) -> Turns:
    """Return what lets the models on the base of `model` take turns.

    Raises:
        ConfigError: it is the only one.
    """
    turns = engine_of(model).turns
    if turns is None:
        raise ConfigError(
            option="trainers", expected="two or more models on one base", found="a base with one", fix="call its train"
        )
    return turns


def run_jobs(turns: Turns, works: Mapping[str, Callable[[], None]], group: HostGroup) -> dict[str, Exception | None]:
    """Run jobs to their ends, and return the error by which each has ended; see `Turns.run`.

    Args:
        group: over which ranks compare how each job ends.

    Raises:
        ShardError: a job has ended on some ranks otherwise than on others.
        BaseException: that is not one which all ranks raise alike, or inside of a forward or backward.

    Ranks: collective over all ranks. One that loses a job alone waits for the others at the job's end, and does nothing
        more of other jobs, whose gradients would be added to that one's: the others find out when they come to an end
        of a job, or at the process group's timeout.
    """

    def run(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except _OWN_ERRORS as error:
            check(name, f"fails: {error}", True)
            raise
        check(name, "is done", False)

    def check(name: str, end: str, is_failed: bool) -> None:
        own = [list(works).index(name), is_failed]
        found = group.find_largest([*own, *(-value for value in own)], f"end the job {name}")
        if found[:2] != [-value for value in found[2:]]:
            raise ShardError(
                "the ranks have diverged",
                expected="each job of the sweep to end alike on all of them",
                found=f"on rank {dist.get_rank()} that the job {name} {end}",
                fix="let what ends a job be raised on every rank, at the same step",
            )

    with _own_gradient_states():
        errors = turns.run([partial(run, name, work) for name, work in works.items()], _OWN_ERRORS)
        return dict(zip(works, errors, strict=True))


def join_turns(trainer: Trainer, turns: Turns) -> None:
    """Let a trainer, in its job's thread, wait for the other jobs before each backward, and share it with them."""
    accelerator = trainer.accelerator
    # Whether gradients are to be reduced, and where a dataloader ends: accelerate keeps one state for a process.
    state = GradientState()
    state.plugin_kwargs = dict(accelerator.gradient_state.plugin_kwargs)
    accelerator.gradient_state = state

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        loss = loss / accelerator.gradient_accumulation_steps
        turns.backward(loss if accelerator.scaler is None else accelerator.scaler.scale(loss), **kwargs)

    accelerator.backward = backward


@contextmanager
def _own_gradient_states() -> Iterator[None]:
    """While the body runs, let accelerate's gradient state be one for each thread."""
    shared = GradientState._shared_state
    GradientState._shared_state = ThreadLocalSharedDict()
    try:
        yield
    finally:
        GradientState._shared_state = shared
