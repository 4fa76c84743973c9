"""Numbers that are not finite: found in each step, named with the rows that they come from, and kept from the adapter.

transformers replaces such a loss by the mean of those before it (`logging_nan_inf_filter`) and steps all the same: one
NaN makes all of the adapter NaN, and the log says nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from transformers import Trainer

from ..errors import TrainingError
from ..runtime import dist

_UNKNOWN_ROWS = ["rows that rank 0 has drawn (dispatch_batches)"]
_SHOWN_ROWS = 8  # of each rank; all of them are in its own file


@dataclass(frozen=True)
class NonfiniteRule:
    """What to do with a step whose numbers are not finite.

    `skips` leaves it out instead of stopping. `name_rows` says where rows, as the trainer numbers them, stand in the
    dataset, of as many rows as the trainer has. `log` prints a line, on one rank; `emit` records an event of each rank.
    """

    skips: bool
    name_rows: Callable[[Sequence[int], int], list[str]]
    log: Callable[[str], None]
    emit: Callable[..., None]


class DrawnRows:
    """The rows of the batches that a data loader has drawn and the trainer has not yet taken: loaders draw ahead."""

    def __init__(self) -> None:
        self._batches: deque[list[int]] = deque()
        self._num_left_out = 0

    def watch(self, batches: Any) -> None:
        """Note what a batch sampler yields from here on."""
        drawn = self

        class Watched(type(batches)):  # type: ignore[misc]
            def __iter__(self) -> Iterator[list[int]]:
                drawn._batches.clear()
                for number, rows in enumerate(super().__iter__()):
                    if number >= drawn._num_left_out:
                        drawn._batches.append(list(rows))
                    yield rows

        batches.__class__ = Watched  # accelerate and transformers ask for its type, and put others around it

    def begin(self, num_left_out: int) -> None:
        """Expect an epoch whose first batches the trainer does not take, since a resumed run has done them."""
        self._num_left_out = num_left_out

    def take(self, num_batches: int) -> list[list[int]]:
        """Return the rows of the next batches; fewer where another rank draws for all."""
        return [self._batches.popleft() for _ in range(min(num_batches, len(self._batches)))]


class FiniteTrainer(Trainer):
    """A mixin over one of TRL's trainers that keeps a step's losses and rows, and judges them.

    `CheckpointingTrainer` has them looked at in each step, when the gradient's norm is known.
    """

    nonfinite: NonfiniteRule

    def __init__(self, *args: Any, nonfinite: NonfiniteRule, **kwargs: Any) -> None:
        self.nonfinite = nonfinite
        self._drawn = DrawnRows()
        self._step_rows: list[list[int]] = []  # of each microbatch of this step
        self._losses: list[torch.Tensor] = []  # the same
        self._loss_before = torch.tensor(0.0)  # the sum to be logged, as it was before this step
        self._num_steps = 0
        self._num_skipped = 0
        self._num_skipped_logged = 0
        self._num_steps_to_log = 0
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        if self._num_skipped and self._num_skipped == self._num_steps:
            raise TrainingError(
                f"each of the run's {self._num_steps} steps was left out, for its values were not finite (see above), "
                "so nothing was learned",
                fix="look at the data, the learning rate and the dtype",
            )
        return output

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if not isinstance(loader, DataLoaderDispatcher):  # rank 0 draws for all there (dispatch_batches)
            self._drawn.watch(loader.batch_sampler)
        return loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        is_resumed = kwargs["epoch"] == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
        self._drawn.begin(kwargs["steps_trained_in_current_epoch"] if is_resumed else 0)
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._step_rows = self._drawn.take(len(batches))
        self._losses.clear()
        self._loss_before = self._tr_loss.clone()
        return batches, num_items

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._losses.append(loss.detach())
        return loss

    def _read_numbers(self, grad_norm: Any) -> list[float]:
        """Return this step's losses on this rank and the gradient's norm, which is the same on all, in one read.

        An infinite norm is no fault under loss scaling (fp16), where the scaler tries scales and skips steps itself: it
        counts as 0 there.
        """
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            grad_norm = 0.0
        self._num_steps += 1
        norm = torch.as_tensor(grad_norm, dtype=torch.float32, device=self._losses[0].device)
        return torch.stack([*(loss.float() for loss in self._losses), norm]).tolist()

    def _judge(self, model: Any, numbers: Sequence[float]) -> None:
        """Say where a step's numbers are not finite, and leave the step out or raise.

        Ranks: collective over all ranks; all come here if one has such a number, and all raise alike.
        """
        *losses, norm = numbers
        named = self.name_step_rows() or [_UNKNOWN_ROWS] * len(losses)
        step = self.state.global_step + 1
        self.nonfinite.emit(
            "nonfinite",
            step=step,
            losses=[str(loss) for loss in losses],
            rows=named,
            grad_norm=norm,
            is_skipped=self.nonfinite.skips,
        )
        everyone = dist.gather_objects((losses, named))
        line = f"step {step}: {_explain(everyone, norm)}"
        if not self.nonfinite.skips:
            bad = (rank for rank, (losses, _) in enumerate(everyone) if not all(map(math.isfinite, losses)))
            raise TrainingError(
                line,
                rank=next(bad, None),
                fix="resume without such steps (--on_nonfinite skip --resume auto), or start anew with these rows "
                "fixed or a lower learning rate",
            )
        self.nonfinite.log(f"{line}. The step is left out (on_nonfinite: skip)")
        self._num_skipped += 1
        self._tr_loss.copy_(self._loss_before)
        model.zero_grad()  # without gradients an optimizer's step changes nothing, its own state included

    def name_step_rows(self) -> list[list[str]]:
        """Return the places of the rows of each microbatch of this rank's step; nothing where they are not known."""
        assert self.train_dataset is not None
        unique = [list(dict.fromkeys(rows)) for rows in self._step_rows]  # each prompt of GRPO comes several times
        return [self.nonfinite.name_rows(rows, len(self.train_dataset)) for rows in unique]

    # What is logged is the mean over the steps that count, and how many do not.

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._num_steps_to_log = self.state.global_step - self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        num_skipped = self._num_skipped - self._num_skipped_logged
        if num_skipped and "loss" in logs:
            num_counted = self._num_steps_to_log - num_skipped
            logs["loss"] = logs["loss"] * self._num_steps_to_log / num_counted if num_counted else math.nan
            logs["skipped_steps"] = num_skipped
            self._num_skipped_logged = self._num_skipped
        super().log(logs, *args, **kwargs)


def _explain(everyone: Sequence[tuple[list[float], list[list[str]]]], norm: float) -> str:
    """Return what is not finite, with the rows of its microbatches; all of the step's, if the norm alone is.

    Args:
        everyone: By rank the losses of its microbatches, and the rows of each.
    """
    is_loss = any(not math.isfinite(loss) for losses, _ in everyone for loss in losses)
    found = []
    for rank, (losses, named) in enumerate(everyone):
        chosen = [
            (loss, rows) for loss, rows in zip(losses, named, strict=True) if not (is_loss and math.isfinite(loss))
        ]
        rows = [row for _, rows in chosen for row in rows]
        if not rows:
            continue
        values = f"loss {', '.join(dict.fromkeys(str(loss) for loss, _ in chosen))} over " if is_loss else ""
        more = f" and {len(rows) - _SHOWN_ROWS} more (events.jsonl)" if len(rows) > _SHOWN_ROWS else ""
        found.append(f"rank {rank}: {values}{', '.join(rows[:_SHOWN_ROWS])}{more}")
    what = "the loss is not finite" if is_loss else f"the gradient's norm is {norm}, though every loss is finite"
    return f"{what}; {'; '.join(found)}"
