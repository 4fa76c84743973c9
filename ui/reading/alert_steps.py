"""Alerts of how a run goes: why it ended, what was not finite, ranks that were started again, no news."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .alert import Alert, Facts
from .eta import measure_pace, show_duration
from .ranks import RankLog, find_behind, find_named
from .sanitize import show_safely
from .series import to_finite, to_whole
from .states import explain_resume

_FULL_DISK = re.compile(r"No space left|Disk quota exceeded|Read-only file system|disk is full", re.IGNORECASE)
_MEMORY = re.compile(r"out of memory|OutOfMemory|cannot allocate memory", re.IGNORECASE)
_NONFINITE = re.compile(r"not finite|though every loss is finite")
_SHOWN_STEPS = 3
_SHOWN_ROWS = 4
# No news for so many usual intervals between two, and never sooner than this many seconds.
_STALL_INTERVALS = 6
_STALL_S = {"train": 30.0, "evaluate": 120.0, "save": 120.0, "start": 120.0}
_SLOW_START_S = 300.0  # a download or a large file may say nothing for a while


def find_end(facts: Facts) -> Iterator[Alert]:
    """Say why a run is over, where it did not come to its end."""
    state = facts.state
    if state.name not in ("failed", "stopped", "dead") or not state.error:
        return
    rank = find_named(state.error) if state.name == "failed" else None
    advice = ""
    if state.name == "failed":
        advice = f". {_advise(facts, state.error, rank)}"
    severity = "info" if state.name == "stopped" else "error"
    sentence = f"{state.error.rstrip('.')}{advice}"
    yield Alert(state.name, severity, rank, to_whole(state.status.get("step")), sentence, state.update_s)  # type: ignore[arg-type]


def _advise(facts: Facts, error: str, rank: int | None) -> str:
    if _NONFINITE.search(error):
        return "Look at the rows that it names, in the data as they are"
    if _FULL_DISK.search(error):
        return f"Free some room on the disk of {facts.folder}; then {explain_resume(facts.folder)}"
    if _MEMORY.search(error):
        return (
            "Give less to hold at once (per_device_train_batch_size, max_length) or another placement (host, file); "
            f"then {explain_resume(facts.folder)}"
        )
    log = "the launcher's log" if rank is None else f"the log of rank {rank}"
    return f"See {log}; {explain_resume(facts.folder)}"


def find_nonfinite(facts: Facts) -> Iterator[Alert]:
    """Say which numbers were NaN or infinite, and of which rank's rows they came."""
    noted = {rank: [note for note in log.notes if _has_bad_loss(note)] for rank, log in facts.ranks.items()}
    times = {
        int(row["step"]): to_finite(row.get("time")) for row in facts.rows if to_finite(row.get("step")) is not None
    }
    for rank, notes in noted.items():
        if notes:
            step = int(notes[-1]["step"])
            yield Alert("nan", "error", rank, step, f"rank {rank}: {_describe_notes(notes)}", times.get(step))
    if not any(noted.values()):
        yield from _find_bad_norms(facts.ranks, times)
    for name in ("loss", "grad_norm", "eval_loss"):
        found = [(step, number) for step, odd, number in facts.odd if odd == name]
        is_explained = name != "eval_loss" and any(log.notes for log in facts.ranks.values())
        if found and not is_explained:
            step, number = found[-1]
            advice = "lower the learning rate, or look at the data" if name != "eval_loss" else "look at the rows there"
            sentence = f"{name} was {number} at {_list_steps([step for step, _ in found])}: {advice}"
            yield Alert("nan", "error", None, step, sentence, times.get(step))
    skipped = [
        (step, int(number)) for step, odd, number in facts.odd if odd == "skipped_steps" and math.isfinite(number)
    ]
    if skipped:
        total, step = sum(number for _, number in skipped), skipped[-1][0]
        what = "1 step was" if total == 1 else f"{total} steps were"
        sentence = (
            f"{what} left out, since their numbers were not finite (the last up to step {step}): nothing is learned "
            "from them; if it goes on so, fix the rows or lower the learning rate"
        )
        yield Alert("nan", "warning", None, step, sentence, times.get(step))


def _has_bad_loss(note: Mapping[str, Any]) -> bool:
    found = note["nonfinite"]
    return isinstance(found, dict) and any(not _is_finite_word(loss) for loss in found.get("losses", ()))


def _is_finite_word(word: Any) -> bool:
    try:
        return math.isfinite(float(word))
    except (TypeError, ValueError):
        return True


def _describe_notes(notes: list[dict[str, Any]]) -> str:
    found = notes[-1]["nonfinite"]
    losses = [str(loss) for loss in found["losses"] if not _is_finite_word(loss)]
    pairs = zip(found["losses"], found.get("rows", ()), strict=False)
    rows = [str(row) for loss, rows in pairs if not _is_finite_word(loss) for row in rows]
    over = f" over {', '.join(rows[:_SHOWN_ROWS])}" if rows else ""
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    steps = _list_steps([int(note["step"]) for note in notes])
    return show_safely(f"loss {losses[0]} at {steps}{over}{more}: look at these rows, or lower the learning rate")


def _find_bad_norms(ranks: Mapping[int, RankLog], times: Mapping[int, float | None]) -> Iterator[Alert]:
    notes = next((list(log.notes) for log in ranks.values() if log.notes), None)
    if notes:
        step = int(notes[-1]["step"])
        steps = _list_steps([int(note["step"]) for note in notes])
        sentence = (
            f"the gradient's norm was {notes[-1].get('grad_norm')} at {steps}, though every loss was finite: lower the "
            "learning rate, or take bfloat16 where this is float16"
        )
        yield Alert("nan", "error", None, step, sentence, times.get(step))


def _list_steps(steps: list[int]) -> str:
    unique = sorted(set(steps))
    if len(unique) == 1:
        return f"step {unique[0]}"
    shown = ", ".join(map(str, unique[-_SHOWN_STEPS:]))
    more = f"{len(unique) - _SHOWN_STEPS} earlier steps and " if len(unique) > _SHOWN_STEPS else ""
    return f"{more}steps {shown}"


def find_restarts(facts: Facts) -> Iterator[Alert]:
    """Say why ranks were started again."""
    reasons = facts.state.status.get("restarts")
    for reason in reasons if isinstance(reasons, list) else []:
        rank = find_named(str(reason))
        where = "" if rank is None else f"; the log of rank {rank} tells more"
        sentence = f"the ranks were started again ({show_safely(str(reason))}){where}"
        yield Alert("restart", "warning", rank, None, sentence)


def find_stall(facts: Facts) -> Iterator[Alert]:
    """Say that nothing was heard of a run for much longer than is usual, and who is behind."""
    state = facts.state
    if state.name not in ("starting", "running", "stopping") or facts.update_s is None:
        return
    silent_s = facts.now_s - max(facts.update_s, state.begin_s or 0.0)  # it may have been heard of before this start
    interval_s = _measure_interval(facts)
    patience_s = _STALL_S.get(state.phase, _SLOW_START_S)
    if interval_s is not None and state.phase in ("train", "evaluate", "save"):
        patience_s = max(patience_s, _STALL_INTERVALS * interval_s)
    if silent_s < patience_s:
        return
    usual = f" (usual are {show_duration(interval_s)})" if interval_s is not None and state.phase == "train" else ""
    step = to_whole(state.status.get("step"))
    at = f" after step {step}" if step is not None else ""
    behind = find_behind(facts.ranks, facts.now_s)
    sentence = f"nothing was heard of this run for {show_duration(silent_s)}{usual}, in phase {state.phase}{at}"
    if facts.stopped_pids:
        pids = " ".join(map(str, facts.stopped_pids))
        yield Alert(
            "stall", "warning", None, None, f"{sentence}: its processes are stopped: go on by kill -CONT {pids}"
        )
        return
    if behind:
        names = ", ".join(f"rank {rank} (step {last})" for rank, last in behind.items())
        sentence += f"; {names} wrote last of an earlier step than the others, who wait"
    timeout_s = to_finite(facts.options.get("heartbeat_timeout"))
    watch = f" (heartbeat_timeout ends the run where a rank is silent for {timeout_s:.0f} s)" if timeout_s else ""
    first = next(iter(behind), None)
    log = f"the log of rank {first}" if first is not None else "the logs"
    sentence += f": look at {log} and at what else its machine does{watch}, or stop the run and resume it"
    yield Alert("stall", "warning", first, step, sentence, facts.update_s)


def _measure_interval(facts: Facts) -> float | None:
    """Return the usual seconds between two lines of metrics.jsonl."""
    pace_s = measure_pace(facts.rows)
    steps = [int(row["step"]) for row in facts.rows if "loss" in row and to_finite(row.get("step")) is not None]
    gaps = sorted(late - early for early, late in zip(steps, steps[1:], strict=False) if late > early)
    return pace_s * gaps[len(gaps) // 2] if pace_s is not None and gaps else None
