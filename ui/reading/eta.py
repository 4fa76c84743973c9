"""How much longer a run takes, from its last steps or from what a phase has done so far."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorashard.runtime.progress import show_amount, show_duration

from .series import to_finite, to_whole
from .states import State

_MOST_INTERVALS = 50
_WORDS = {
    "queue": "Waiting in the queue",
    "start": "Starting",
    "download": "Downloading the model",
    "tokenize": "Tokenizing the data",
    "load": "Loading the model",
    "train": "Training",
    "evaluate": "Evaluating",
    "save": "Saving",
    "done": "Done",
    "failed": "Failed",
    "stopped": "Stopped",
}
_STATE_WORDS = {"done": "Done", "failed": "Failed", "stopped": "Stopped", "dead": "Died", "stopping": "Stopping"}


@dataclass(frozen=True)
class Progress:
    """How far a run's phase is.

    Attributes:
        done, total, unit: of the phase; of the steps while it trains. `total` is None where nobody knows it.
        fraction: from 0 to 1, or None.
        eta_s: seconds until the phase ends; until the training ends while it trains.
        sentence: all of it for a person.
    """

    phase: str
    done: int | None
    total: int | None
    unit: str | None
    fraction: float | None
    eta_s: float | None
    sentence: str


def measure_pace(rows: Sequence[Mapping[str, Any]], begin_s: float = 0.0) -> float | None:
    """Return the seconds of one step, without pauses: the median over the last intervals between two logged steps.

    An interval in which the run has evaluated is left out where there are others.

    Args:
        rows: the last lines of metrics.jsonl.
        begin_s: when the run was started; older lines are of a start before it.
    """
    paces: list[float] = []
    paused_paces: list[float] = []
    last: tuple[float, float] | None = None
    is_paused = False
    for row in rows:
        step, at = to_finite(row.get("step")), to_finite(row.get("time"))
        if step is None or at is None or at < begin_s:
            continue
        if "loss" not in row:
            is_paused = True
            continue
        if last is not None and step > last[0] and at > last[1]:
            (paused_paces if is_paused else paces).append((at - last[1]) / (step - last[0]))
        last, is_paused = (step, at), False
    chosen = (paces or paused_paces)[-_MOST_INTERVALS:]
    return statistics.median(chosen) if chosen else None


def estimate_rest(state: State, rows: Sequence[Mapping[str, Any]], now_s: float | None = None) -> float | None:
    """Return the seconds that the steps to come will take; None where nothing tells."""
    now_s = time.time() if now_s is None else now_s
    step, max_steps = find_steps(state, rows)
    if not state.is_live or step is None or not max_steps:
        return None
    pace_s = measure_pace(rows, to_finite(state.status.get("begin_s")) or 0.0)
    if pace_s is None:
        return None
    logged_s = max((to_finite(row.get("time")) or 0.0 for row in rows), default=now_s)
    rest_s = (max_steps - step) * pace_s
    return max(0.0, rest_s - min(max(0.0, now_s - logged_s), pace_s))


def find_steps(state: State, rows: Sequence[Mapping[str, Any]]) -> tuple[int | None, int | None]:
    """Return the last step and the number of steps, as far as the status and the last lines of metrics.jsonl know."""
    steps = [to_finite(state.status.get("step")), *(to_finite(row.get("step")) for row in rows[-1:])]
    step = max((int(step) for step in steps if step is not None), default=None)
    return step, to_whole(state.status.get("max_steps"))


def describe_progress(
    state: State, rows: Sequence[Mapping[str, Any]], rest_s: float | None, now_s: float | None = None
) -> Progress:
    """Return how far a run is.

    Args:
        rows: the last lines of metrics.jsonl.
        rest_s: from `estimate_rest`.
    """
    now_s = time.time() if now_s is None else now_s
    step, max_steps = find_steps(state, rows)
    said = state.status.get("progress")
    is_of_steps = not state.is_live or state.phase == "train" or not isinstance(said, dict)
    if is_of_steps:
        done, total, unit = step, max_steps, "steps" if step is not None else None
        eta_s = rest_s
    else:
        assert isinstance(said, dict)
        done, total = to_whole(said.get("done")), to_whole(said.get("total"))
        unit = str(said.get("unit") or "")
        eta_s = _estimate_phase(done, total, to_finite(state.status.get("phase_begin_s")), now_s)
    fraction = min(1.0, done / total) if done is not None and total else None
    sentence = _write_sentence(state, done, total, unit, eta_s, (step, max_steps), is_of_steps)
    return Progress(state.phase, done, total, unit, fraction, eta_s, sentence)


def _estimate_phase(done: int | None, total: int | None, begin_s: float | None, now_s: float) -> float | None:
    if not done or not total or begin_s is None or now_s - begin_s < 1:
        return None
    return (now_s - begin_s) / done * max(0, total - done)


def _write_sentence(
    state: State,
    done: int | None,
    total: int | None,
    unit: str | None,
    eta_s: float | None,
    steps: tuple[int | None, int | None],
    is_of_steps: bool,
) -> str:
    word = _STATE_WORDS.get(state.name) or _WORDS.get(state.phase, state.phase.capitalize() or "Starting")
    if state.name == "stopping":
        is_over = state.phase in ("done", "failed", "stopped")
        word = "Ending" if is_over else f"Stopping ({_WORDS.get(state.phase, state.phase or 'start').lower()})"
    parts = []
    if is_of_steps and steps[0] is not None:
        parts.append(f"step {steps[0]:,} of {steps[1]:,}" if steps[1] else f"step {steps[0]:,}")
    elif done is not None and not is_of_steps:
        parts.append(_show_amount(done, total, unit))
        if steps[0] and steps[1]:
            parts.append(f"at step {steps[0]:,} of {steps[1]:,}")
    queue = state.status.get("queue")
    if state.name == "queued" and isinstance(queue, dict):
        parts += [f"place {queue['place']}"] if queue.get("place") else []
        parts += [str(queue["waits_for"])] if queue.get("waits_for") else []
    is_at_pace = state.name == "running" or (state.name == "starting" and not is_of_steps)
    if eta_s is not None and is_at_pace:
        parts.append(f"about {show_duration(eta_s)} left")
    return f"{word}: {', '.join(parts)}" if parts else word


def _show_amount(done: int, total: int | None, unit: str | None) -> str:
    return show_amount(done, total or None, unit or "").rstrip()
