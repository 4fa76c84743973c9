"""What a run of `finetune` does beyond TRL's trainer: complete checkpoints, stops on request, a check of the values.

Each of these needs all ranks to do the same at the same step. So in each step, once the gradient's norm is known and
before the optimizer steps, the ranks agree on whether somebody was asked to stop and whether a number is not finite.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import RandomSampler, Sampler
from transformers import Trainer, TrainerState, set_seed
from transformers.trainer_callback import ExportableState, TrainerControl

from ..errors import CheckpointError, RunStopped
from ..runs.checkpoints import place_partial, publish, rotate
from ..runtime import dist
from ..runtime.disk import describe_fault, find_fault
from ..runtime.signals import SAVE_SIGNAL, STOP_SIGNAL
from .nonfinite import FiniteTrainer, NonfiniteRule

_STATE_NAME = "trainer_state.json"  # what transformers calls it
_ARGUMENTS_NAME = "training_args.bin"
_Best = tuple[float | None, int | None, str | None]  # metric, step and checkpoint
_ENTROPY_NAME = "entropy_ctrl_state.json"  # what TRL calls it


class StopLike(Protocol):
    """Whether a run was asked to stop, or to save: see `StopRequest`."""

    @property
    def signal_name(self) -> str | None: ...

    def take_save(self) -> bool: ...


@dataclass(frozen=True)
class RunHooks:
    """What the run gives a `CheckpointingTrainer`.

    Attributes:
        facts: go into each checkpoint's manifest.
        rows_per_step: examples of a step, where each epoch is to be made of full steps (`global_batch_size`).
        saved_world_size: that of the checkpoint that is resumed from.
        log: prints a line, on one rank.
        emit: records an event of the run, on one rank.
        enter: hears of the phase that the trainer comes to, and the step.
        wait_warning_s: how long a rank waits for others at the end of a step before it says where they are.
        describe_ranks: what else is known of them.
    """

    stop: StopLike
    facts: dict[str, Any]
    nonfinite: NonfiniteRule
    rows_per_step: int | None
    saved_world_size: int | None
    log: Callable[[str], None]
    emit: Callable[..., None]
    enter: Callable[[Literal["evaluate", "save"], int], None]
    wait_warning_s: float = dist.WAIT_WARNING_S
    describe_ranks: Callable[[], str] = lambda: ""


class CheckpointingTrainer(FiniteTrainer):
    """A mixin over one of TRL's trainers, made by `make_checkpointing`.

    Ranks: `_get_grad_norm` and `_save_checkpoint` are collective over all ranks, and called on all by the trainer.
    """

    hooks: RunHooks
    control: TrainerControl

    def __init__(self, *args: Any, hooks: RunHooks, **kwargs: Any) -> None:
        self.hooks = hooks
        self._host_group = dist.HostGroup.of_all(hooks.wait_warning_s, hooks.describe_ranks)
        self._stop_signal = 0
        self._saves_now = False
        self._saved_step = -1
        self._sampler: _EpochSampler | None = None
        self._best: _Best | None = None  # the one that is on the disk
        super().__init__(*args, nonfinite=hooks.nonfinite, **kwargs)
        # Rotation is ours: the trainer's deletes in place, and at the end of the training even the newest.
        self._save_total_limit, self.args.save_total_limit = self.args.save_total_limit, None

    # The steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # Resumed at the end, or where early stopping had ended the run, the trainer would take one step more.
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if self._sampler is not None:
            self._sampler.epoch = kwargs["epoch"]
        if self._best is None:
            best = Path(self.args.output_dir, f"checkpoint-{self.state.best_global_step}")
            if (
                self.state.best_model_checkpoint is None and best.is_dir()
            ):  # its folder was moved, or is called otherwise
                self.state.best_model_checkpoint = str(best)
            self._best = self._read_best()
        super()._run_epoch(*args, **kwargs)
        self._do_as_asked()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        numbers = self._read_numbers(grad_norm)
        asked = self.hooks.stop.signal_name
        own = [signal.Signals[asked].value if asked else 0, not all(map(math.isfinite, numbers))]
        own.append(self._saves_now or self.hooks.stop.take_save())
        self._stop_signal, is_any_bad, saves_now = self._host_group.find_largest(own, "end a step")
        self._saves_now = bool(saves_now)
        if is_any_bad:
            self._judge(model, numbers)
        return grad_norm

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if type(sampler) is not RandomSampler:  # accelerate makes that one draw by the epoch's number
            if getattr(sampler, "generator", sampler) is sampler:  # it draws nothing
                return sampler
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            self._sampler = _EpochSampler(sampler, seed)
            return self._sampler
        rows_per_step = self.hooks.rows_per_step
        if rows_per_step is None:
            return sampler
        num_steps, num_left = divmod(len(sampler.data_source), rows_per_step)
        num_steps += num_left > 0 and not self.args.dataloader_drop_last
        return RandomSampler(sampler.data_source, num_samples=num_steps * rows_per_step)

    # Checkpoints

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if not float(self.state.epoch).is_integer():  # at an epoch's end its own evaluation and save are still to come
            self._do_as_asked()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.hooks.enter("evaluate", self.state.global_step)
        return super().evaluate(*args, **kwargs)

    def _do_as_asked(self) -> None:
        if self._saves_now:
            if self._saved_step != self.state.global_step:
                self._save_checkpoint(self.model, None)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)
            if self._saved_step == self.state.global_step:
                asked = {"path": str(self._name_checkpoint()), "signal": SAVE_SIGNAL.name}
                self.hooks.emit("checkpoint_requested", step=self.state.global_step, **asked)
        self._stop_if_asked()
        self._saves_now = False

    def _stop_if_asked(self) -> None:
        is_over = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if not self._stop_signal or is_over:
            return
        name = signal.Signals(self._stop_signal).name
        if self._saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
        if self._saved_step != self.state.global_step:
            raise CheckpointError(
                f"{name} asked the run to stop, and the checkpoint of step {self.state.global_step} could not be "
                "written (see above)",
                fix="--resume auto resumes from the newest complete one",
            )
        raise RunStopped(signal=name, step=self.state.global_step, checkpoint=str(self._name_checkpoint()))

    def stop_here(self) -> None:
        """End at this step, with a checkpoint, as if a signal had asked; called by an evaluation on all ranks."""
        self._stop_signal = STOP_SIGNAL.value

    def _name_checkpoint(self) -> Path:
        return Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint that is complete or not there at all; continue without it where a disk refuses it."""
        checkpoint = self._name_checkpoint()
        self.hooks.enter("save", self.state.global_step)
        self.store_flos()
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(checkpoint)
        problem = _find_problem(lambda: self._write_parts(place_partial(checkpoint)), checkpoint.parent)
        if problem is None:
            problem = _find_problem(lambda: self._complete(checkpoint), checkpoint.parent)
        if problem is None:  # on all nodes: what is older is not needed any more
            best = self.state.best_model_checkpoint
            remaining = _find_problem(lambda: self._rotate(checkpoint, best), checkpoint.parent)
            if remaining is not None:
                self.hooks.log(f"older checkpoints than {checkpoint.name} were not deleted: {remaining}")
        else:
            # An evaluation whose adapter is not kept is not the one that later ones must be better than.
            assert self._best is not None
            self.state.best_metric, self.state.best_global_step, self.state.best_model_checkpoint = self._best
            if self.args.should_save:
                shutil.rmtree(place_partial(checkpoint), ignore_errors=True)
            failed = {"checkpoint": checkpoint.name, "problem": problem}
            self.hooks.emit("checkpoint_failed", step=self.state.global_step, **failed)
            return
        self._saved_step = self.state.global_step
        self.hooks.emit("checkpoint_saved", step=self.state.global_step, checkpoint=checkpoint.name)
        self._best = self._read_best()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))

    def _read_best(self) -> _Best:
        return self.state.best_metric, self.state.best_global_step, self.state.best_model_checkpoint

    def _write_parts(self, folder: Path) -> None:
        """Write what this rank has to write of a checkpoint.

        Ranks: no collective may be in here: a rank whose disk is full does not come to it.
        """
        folder.mkdir(exist_ok=True)
        if self.args.should_save:
            self.save_model(str(folder), _internal_call=True)
            (folder / _ARGUMENTS_NAME).unlink(missing_ok=True)  # a pickle of the options, which nothing reads
        if self._is_resumable:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
        if self.args.should_save:
            stateful = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
            self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
            self.state.save_to_json(str(folder / _STATE_NAME))
            if getattr(self, "use_adaptive_entropy", False):  # of TRL's GRPOTrainer, which reads it
                entropy = {"entropy_coef": self.entropy_coef, "last_world_entropy": self._last_world_entropy}
                (folder / _ENTROPY_NAME).write_text(json.dumps(entropy))

    @property
    def _is_resumable(self) -> bool:
        """Whether a checkpoint is to hold more than the adapter: one that a person asks for is to be resumed from."""
        return not self.args.save_only_model or bool(self._stop_signal) or self._saves_now

    def _complete(self, checkpoint: Path) -> None:
        if self.args.should_save:
            publish(checkpoint, self.hooks.facts | {"is_resumable": self._is_resumable})

    def _rotate(self, checkpoint: Path, best: str | None) -> None:
        if self.args.should_save:
            rotate(checkpoint, self._save_total_limit, best)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        saved = self.hooks.saved_world_size
        if checkpoint is None or saved in (None, self.args.world_size):
            super()._load_rng_state(checkpoint)
            return
        set_seed(self.args.seed + self.state.global_step)
        self.hooks.log(
            f"{Path(checkpoint).name} holds the random states of {saved} ranks, and there are {self.args.world_size}: "
            "they begin anew, which changes dropout alone"
        )


def make_checkpointing(trainer_class: type[Trainer]) -> type[CheckpointingTrainer]:
    """Return one of TRL's trainers, under its own name, as a `CheckpointingTrainer`."""
    return type(trainer_class.__name__, (CheckpointingTrainer, trainer_class), {})


class _EpochSampler(Sampler):
    """Draws another order in each epoch, by the epoch's number alone: all ranks the same, and a resumed run too."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.epoch = 0
        self._sampler = sampler
        self._seed = seed

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return iter(self._sampler)


def _find_problem(write: Callable[[], None], folder: Path) -> str | None:
    """Write into `folder`; return what kept any rank's disk from taking it, if anything did.

    Ranks: collective over all ranks.
    """
    problem = None
    try:
        write()
    except Exception as error:
        if find_fault(error) is None and not isinstance(error, OSError):
            raise
        problem = describe_fault(error, folder)
    problems = dist.gather_objects(problem)
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), None)
