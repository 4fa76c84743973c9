"""Successive halving of a sweep's jobs, by their evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.sweep import SweepStop


class Halving:
    """Decides at certain steps which jobs go on (K. Jamieson, A. Talwalkar, "Non-stochastic best arm identification
    and hyperparameter optimization", 2016).

    A comparison is over when each job that still runs has come to its step. Jobs with equal values are kept in the
    order of the sweep, and one whose value is not a number comes last.

    Resumed jobs tell again what their checkpoints have logged, so that a comparison that was cut short is made up for.

    Ranks: local; all ranks hear the same values, and decide alike.
    """

    def __init__(self, stop: SweepStop, names: Sequence[str], decided_step: int = 0) -> None:
        """Take the jobs.

        Args:
            decided_step: the last whose comparison has given jobs up in an earlier start.
        """
        self._stop = stop
        self._decided_step = decided_step
        self._running = list(names)
        self._heard: dict[int, dict[str, float]] = {}

    @classmethod
    def of(cls, stop: SweepStop | None, names: Sequence[str], decided_step: int = 0) -> Halving | None:
        """Return one for a sweep's jobs; None where all run to their end."""
        return None if stop is None else cls(stop, names, decided_step)

    def hear(self, name: str, step: int, metrics: Mapping[str, Any]) -> dict[str, int]:
        """Take an evaluation of a job; return the jobs that are given up, each with the step that decided it."""
        if step % self._stop.every or step <= self._decided_step or self._stop.metric not in metrics:
            return {}
        self._heard.setdefault(step, {})[name] = float(metrics[self._stop.metric])
        return self._decide()

    def is_open(self, step: int) -> bool:
        """Tell whether the jobs that have told a value at `step` are still to be compared."""
        return step in self._heard

    def leave(self, name: str) -> dict[str, int]:
        """Take note that a job is over; return the jobs that are given up since nobody waits for it any more."""
        if name in self._running:
            self._running.remove(name)
        return self._decide()

    def _decide(self) -> dict[str, int]:
        given_up: dict[str, int] = {}
        for step in sorted(self._heard):
            heard = self._heard[step]
            if not self._running or not set(self._running) <= heard.keys():
                continue
            ranked = sorted(self._running, key=lambda name: self._rank(heard[name]))
            for name in ranked[self._stop.count_kept(len(ranked)) :]:
                given_up[name] = step
                self._running.remove(name)
            del self._heard[step]
        return given_up

    def _rank(self, value: float) -> tuple[bool, float]:
        return value != value, -value if self._stop.is_greater_better else value
