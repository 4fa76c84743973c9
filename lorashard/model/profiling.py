"""`profile_steps`: a trace of a few steps on each rank, and a summary of where their time went."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from ..engine import Engine
from ..runtime import dist
from ..runtime.disk import describe_fault, replace_text

_logger = logging.getLogger(__name__)
_COLUMNS = {
    "total_s": "seconds",
    "compute_s": "computing",
    "exposed_s": "waiting for weights",
    "gather_s": "gathers",
    "copy_s": "copies",
    "all_reduce_s": "all-reduce",
}


class StepProfiler:
    """Traces the steps `first` to `last`, counted from 1, with the units' names on their ranges.

    Leaves in a folder `rank_K.json` (for chrome://tracing or ui.perfetto.dev) from each rank, `summary.md` from rank 0.

    Ranks: collective at the end of step `last`.
    """

    def __init__(self, folder: Path, engine: Engine, first: int, last: int) -> None:
        self._folder = folder
        self._engine = engine
        self._first, self._last = first, last
        self._profiler: profile | None = None
        self._is_done = False
        self._begin_s = 0.0
        self._begin_wait_s = 0.0

    def begin_step(self, step: int) -> None:
        """Note that a step begins."""
        if self._profiler is None and self._first <= step <= self._last and not self._is_done:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._begin_wait_s = self._engine.stats().wait_s
            self._profiler = profile(activities=activities)
            self._profiler.start()
            self._begin_s = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Note that a step has ended."""
        if self._profiler is not None and step == self._last:
            self._finish()

    def close(self) -> None:
        """Note that no more steps follow."""
        if self._profiler is not None:
            self._finish()
        elif not self._is_done:
            _logger.warning(
                "profile_steps: none of steps %d to %d was run, so there is no trace", self._first, self._last
            )

    def follow_optimizer(self) -> None:
        """Count the steps of the optimizer of the engine's adapter, where no trainer reports them."""
        num_steps = 0
        self.begin_step(1)

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal num_steps
            if self._engine.is_trained_by(optimizer):
                num_steps += 1
                self.end_step(num_steps)
                self.begin_step(num_steps + 1)
                if num_steps == self._last:
                    handle.remove()

        handle = register_optimizer_step_post_hook(after_step)

    def _finish(self) -> None:
        assert self._profiler is not None
        exposed_s = self._engine.stats().wait_s - self._begin_wait_s  # on CUDA this waits for the device
        total_s = time.perf_counter() - self._begin_s
        self._profiler.stop()
        self._write(self._write_trace)
        facts = sum_up(self._profiler.events(), total_s, exposed_s)
        everyone = dist.gather_objects(facts)
        if dist.get_rank() == 0:
            summary = describe(everyone, self._first, self._last)
            self._write(lambda: replace_text(self._folder / "summary.md", summary))
        self._profiler, self._is_done = None, True

    def _write_trace(self) -> None:
        assert self._profiler is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{dist.get_rank()}.json"
        self._profiler.export_chrome_trace(str(path))
        with path.open("rb") as file:
            file.seek(-min(16, path.stat().st_size), os.SEEK_END)
            end = file.read().rstrip()
        if not end.endswith(b"}"):  # torch does not say that the disk is full
            path.unlink()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _write(self, write: Callable[[], None]) -> None:
        """Warn of a file that cannot be written, which is no reason to stop the run."""
        try:
            write()
        except OSError as error:
            _logger.warning("profile_steps: %s lacks a file: %s", self._folder, describe_fault(error, self._folder))


def sum_up(events: Iterable[Any], total_s: float, exposed_s: float) -> dict[str, float]:
    """Return the seconds of each kind of work in a rank's trace.

    Gathers, copies and all-reduces overlap the computation: their seconds are the device's, or on a CPU those of their
    threads (a copy there is what precedes the start of the gather). Their cost is `exposed_s`, the seconds in which the
    computation waited.
    """
    events = list(events)
    on_device = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    kinds: dict[str, tuple[str, ...]]
    if on_device:  # a host's range around device work is listed on the device too
        work = [event for event in on_device if not event.is_user_annotation]
        kinds = {
            "gather_s": ("nccldevkernel_broadcast", "allgather", "all_gather"),
            "copy_s": ("memcpy htod",),
            "all_reduce_s": ("allreduce",),
        }
    else:  # gloo's own all-gathers are of the trainer's metrics, not of the base
        work = [event for event in events if event.name.lower().startswith(("gloo:", "unshard "))]
        kinds = {"gather_s": ("gloo:broadcast",), "copy_s": ("unshard ",), "all_reduce_s": ("gloo:all_reduce",)}
    sums = dict.fromkeys(kinds, 0.0)
    for event in work:
        name = event.name.lower()
        for kind, words in kinds.items():
            if any(word in name for word in words):
                sums[kind] += event.time_range.elapsed_us() / 1e6
    return {"total_s": total_s, "compute_s": total_s - exposed_s, "exposed_s": exposed_s, **sums}


def describe(ranks: Sequence[dict[str, float]], first: int, last: int) -> str:
    """Return the summary: a table with a line per rank, and the differences between them."""
    lines = [
        f"# Steps {first} to {last}",
        "",
        f"| rank | {' | '.join(_COLUMNS.values())} |",
        f"| ---: |{' ---: |' * len(_COLUMNS)}",
    ]
    for rank, facts in enumerate(ranks):
        lines.append(f"| {rank} | {' | '.join(f'{facts[name]:.3f}' for name in _COLUMNS)} |")
    lines += ["", "Gathers, copies and all-reduces overlap the computation; their cost is the time spent waiting.", ""]
    compute = [facts["compute_s"] for facts in ranks]
    slowest, fastest = compute.index(max(compute)), compute.index(min(compute))
    spread = max(compute) / max(min(compute), 1e-9) - 1
    if spread > 0.1:
        lines.append(
            f"**Rank {slowest} computes {spread:.0%} longer than rank {fastest}**: the others wait for it in each "
            "gather and all-reduce. Check the lengths of its sequences, its device's clock, and what else runs there."
        )
    elif len(ranks) > 1:
        lines.append(f"The ranks are even: their computing differs by {spread:.0%}.")
    waiting = max(facts["exposed_s"] / facts["total_s"] for facts in ranks)
    lines.append(
        f"At most {waiting:.0%} of a rank's time is waiting for weights"
        + (": try more tokens a step, a larger prefetch, or resident layers." if waiting > 0.1 else ".")
    )
    return "\n".join(lines) + "\n"
