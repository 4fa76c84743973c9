"""What rank 0 shows the person of a run: a compact line for a logged step, and under them one live bar.

Only lines go into a log. Where a terminal is on the other side of lorashard's launcher, that draws the bar, from
status.json, and says so there.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils import logging

from ..runs.status import show_status
from ..runtime.progress import LiveBar, ProgressLines, is_terminal, write_line

# What is worth a place in a step's line, by the names that TRL's trainers log it under, and what it is called there.
_SHOWN = {
    "loss": "loss",
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "accuracy": "accuracy",
    "margin": "margin",
    "kl": "kl",
    "completions/mean_length": "answer length",
}
_TOLD_PHASES = ("tokenize", "load")  # later there are the steps' lines
_SUMMARY = "train_runtime"  # of the line that ends a training


class Console:
    """Prints lines, and how far the run is, on one rank; the others are silent.

    Ranks: local.
    """

    def __init__(self, rank: int, has_bar: bool = True) -> None:
        """Take over what is shown.

        Args:
            has_bar: whether a terminal is to have a bar at all.
        """
        self._is_shown = rank == 0
        self._prefix = ""
        is_live = self._is_shown and has_bar and is_terminal(sys.stdout)
        self._bar = LiveBar(sys.stdout) if is_live else None
        self._lines = None if is_live else ProgressLines(self.log)
        if not (self._is_shown and has_bar and is_terminal(sys.stderr)):  # bars of others would fill the log
            datasets.disable_progress_bars()
            logging.disable_progress_bar()

    def named(self, name: str) -> Console:
        """Return one for a job of a sweep, whose lines begin with its name."""
        other = copy.copy(self)
        other._prefix = f"{name}: "
        return other

    def log(self, line: str) -> None:
        """Print a line of lorashard's own."""
        self._write(f"lorashard: {self._prefix}{line}")

    def print(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._write(self._prefix + line)

    def _write(self, line: str) -> None:
        if self._is_shown:
            write_line(line, sys.stdout)

    def show(self, status: Mapping[str, Any]) -> None:
        """Show how far a run is; see `status.Status`."""
        if not self._is_shown:
            return
        if self._bar is not None:
            show_status(status, self._bar)
        elif self._lines is not None and not status.get("has_bar") and status.get("phase") in _TOLD_PHASES:
            show_status(status, self._lines)


class StepLines(TrainerCallback):
    """Prints a line for each log line, evaluation and checkpoint, in place of transformers' dicts and bars."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin: tuple[float, int] | None = None

    @classmethod
    def take_over(cls, trainer: Trainer, console: Console) -> None:
        """Let a trainer print these lines alone."""
        for other in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(other)
        trainer.add_callback(cls(console))

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin = (time.perf_counter(), state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = describe_log(logs or {}, self._estimate_left(state.global_step, state.max_steps))
        self._print(line, state)

    def on_save(self, args, state, control, **kwargs):
        name = f"checkpoint-{state.global_step}"
        if Path(args.output_dir, name).is_dir():  # a disk may have refused it
            self._print(f"saved {name}", state)

    def _print(self, line: str, state: Any) -> None:
        if line:
            self._console.print(f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}  {line}")

    def _estimate_left(self, step: int, max_steps: int) -> float | None:
        if self._begin is None or step <= self._begin[1]:
            return None
        begin_s, begin_step = self._begin
        return (time.perf_counter() - begin_s) / (step - begin_step) * (max_steps - step)


def describe_log(logs: Mapping[str, Any], left_s: float | None) -> str:
    """Return what a log line says, without its step, fit for one line of a terminal; empty where it says nothing.

    Args:
        logs: what transformers' and TRL's trainers log.
        left_s: how long the training will continue, where that is known.
    """
    if _SUMMARY in logs:
        loss = _show_number(logs.get("train_loss"))
        return f"trained in {show_seconds(logs[_SUMMARY])}" + (f"  mean loss {loss}" if loss else "")
    evaluated = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    values = evaluated or logs
    parts = [f"{shown} {number}" for name, shown in _SHOWN.items() if (number := _show_number(values.get(name)))]
    if evaluated:
        took_s = evaluated.get("runtime")
        return f"evaluation {'  '.join(parts + ([f'in {show_seconds(took_s)}'] if took_s is not None else []))}"
    if (rate := _show_number(logs.get("learning_rate"))) is not None:
        parts.insert(1 if "loss" in logs else 0, f"lr {rate}")
    if (speed := logs.get("tokens_per_s")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if parts and left_s:
        parts.append(f"{show_seconds(left_s)} left")
    return "  ".join(parts)


def _show_number(value: Any) -> str | None:
    if isinstance(value, str):  # of a tracker, or a number that is none
        return value
    if not isinstance(value, (int, float)):
        return None
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def show_seconds(seconds: float) -> str:
    """Return a duration in at most two units: `9.5 s`, `1 min 20 s`, `3 h 5 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit_s, unit, next_s, next_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // next_s} {next_unit}"
    return f"{whole} s"
