"""Alerts of how a run goes: why it ended, what was not finite, ranks that were started again, no news."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .alert import Alert, Facts
from .eta import measure_pace, show_duration
from .ranks import find_behind
from .sanitize import show_safely
from .series import to_finite, to_whole
from .states import State, explain_resume

_SHOWN_STEPS = 3
_SHOWN_ROWS = 4
# No news for so many usual intervals between two, and never sooner than this many seconds.
_STALL_INTERVALS = 6
_STALL_S = {"train": 30.0, "evaluate": 120.0, "save": 120.0, "start": 120.0}
_SLOW_START_S = 300.0  # a download or a large file may say nothing for a while
# The command line's words in what an error advises, and those of a page that has buttons and fields.
_PAGE_WORDS = (
    (re.compile(r"resume (it )?with --resume(_from_checkpoint)? (auto|true)"), "press Resume"),
    (re.compile(r"--resume(_from_checkpoint)? (auto|true)"), "Resume"),
    (re.compile(r"--([a-z]\w+)"), r"\1"),
)


def find_end(facts: Facts) -> Iterator[Alert]:
    """Say why a run is over, where it did not come to its end."""
    state = facts.state
    if state.name not in ("failed", "stopped", "dead") or not state.error:
        return
    rank = state.failure.get("rank") if state.name == "failed" else None
    advice = f". {_advise(facts, rank)}" if state.name == "failed" else ""
    severity = "info" if state.name == "stopped" else "error"
    sentence = f"{_describe_end(state)}{advice}"
    yield Alert(state.name, severity, rank, to_whole(state.status.get("step")), sentence, state.update_s)  # type: ignore[arg-type]


def _describe_end(state: State) -> str:
    """Return why a run has ended, in words of the page where the failure has fields."""
    assert state.error is not None
    fields = state.failure.get("fields") or {}
    if fields.get("signal") and fields.get("checkpoint"):
        place = f"step {fields.get('step')}, saved in {show_safely(Path(fields['checkpoint']).name)}"
        return f"stopped by {fields['signal']} at {place}"
    fix = show_safely(str(fields.get("fix") or ""))
    sentence = state.error.removesuffix(f"; {fix}").rstrip(".") if fix else state.error.rstrip(".")
    if state.failure.get("cause") == "nonfinite" or not fix:  # the fix of the first is for the command line alone
        return sentence
    for pattern, words in _PAGE_WORDS:
        fix = pattern.sub(words, fix)
    return f"{sentence}; {fix.rstrip('.')}"


def _advise(facts: Facts, rank: int | None) -> str:
    cause = facts.state.failure.get("cause")
    if cause == "nonfinite":
        return (
            "Look at the examples that it names, in the data as they are, or lower the learning rate; a clone with "
            "on_nonfinite: skip leaves such steps out"
        )
    if cause == "disk":
        return f"Free some room on the disk of {facts.folder}; then {explain_resume(facts.folder)}"
    if cause == "memory":
        return (
            "Give less to hold at once (per_device_train_batch_size, max_length) or another placement (host, file); "
            f"then {explain_resume(facts.folder)}"
        )
    log = "the launcher's log" if rank is None else f"the log of rank {rank}"
    return f"See {log}; {explain_resume(facts.folder)}"


def find_nonfinite(facts: Facts) -> Iterator[Alert]:
    """Say which values were NaN or infinite, and of which rank's examples they came."""
    events = [event for event in facts.events if event["kind"] == "nonfinite"]
    times = {
        int(row["step"]): to_finite(row.get("time")) for row in facts.rows if to_finite(row.get("step")) is not None
    }
    bad = [event for event in events if any(not _is_finite_word(loss) for loss in event["losses"])]
    for rank in sorted({event["rank"] for event in bad}):
        own = [event for event in bad if event["rank"] == rank]
        sentence = f"rank {rank}: {_describe_losses(own)}"
        yield Alert("nan", "error", rank, own[-1]["step"], sentence, to_finite(own[-1]["time"]))
    if events and not bad:
        yield _describe_norms(events)
    for name in ("loss", "grad_norm", "eval_loss"):
        found = [(step, number) for step, odd, number in facts.odd if odd == name]
        is_explained = name != "eval_loss" and bool(events)
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
            f"{what} left out, since their values were not finite (the last up to step {step}): nothing is learned "
            "from them; if this continues, fix the examples or lower the learning rate"
        )
        yield Alert("nan", "warning", None, step, sentence, times.get(step))


def _is_finite_word(word: Any) -> bool:
    try:
        return math.isfinite(float(word))
    except (TypeError, ValueError):
        return True


def _describe_losses(events: Sequence[Mapping[str, Any]]) -> str:
    found = events[-1]
    losses = [str(loss) for loss in found["losses"] if not _is_finite_word(loss)]
    pairs = zip(found["losses"], found["rows"], strict=False)
    rows = [str(row) for loss, rows in pairs if not _is_finite_word(loss) for row in rows]
    over = f" over {', '.join(rows[:_SHOWN_ROWS])}" if rows else ""
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    steps = _list_steps([event["step"] for event in events])
    return show_safely(f"loss {losses[0]} at {steps}{over}{more}: look at these examples, or lower the learning rate")


def _describe_norms(events: Sequence[Mapping[str, Any]]) -> Alert:
    """Describe a norm that was not finite, which is the same on all ranks."""
    last = events[-1]
    steps = _list_steps([event["step"] for event in events])
    sentence = (
        f"the gradient's norm was {last['grad_norm']} at {steps}, though every loss was finite: lower the learning "
        "rate, or take bfloat16 where this is float16"
    )
    return Alert("nan", "error", None, last["step"], sentence, to_finite(last["time"]))


def _list_steps(steps: list[int]) -> str:
    unique = sorted(set(steps))
    if len(unique) == 1:
        return f"step {unique[0]}"
    shown = ", ".join(map(str, unique[-_SHOWN_STEPS:]))
    more = f"{len(unique) - _SHOWN_STEPS} earlier steps and " if len(unique) > _SHOWN_STEPS else ""
    return f"{more}steps {shown}"


def find_restarts(facts: Facts) -> Iterator[Alert]:
    """Say why ranks were started again."""
    for restart in facts.state.status.get("restarts", ()):
        if not isinstance(restart, dict):  # a sentence, of an earlier version
            yield Alert("restart", "warning", None, None, f"the ranks were started again ({show_safely(str(restart))})")
            continue
        failure = restart["failure"]
        where = "" if failure["rank"] is None else f"; the log of rank {failure['rank']} has more"
        count = f"{restart['number']} of {restart['max_restarts']}"
        sentence = f"the ranks were started again ({count}: {show_safely(failure['message'])}){where}"
        yield Alert("restart", "warning", failure["rank"], None, sentence)


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
            "stall", "warning", None, None, f"{sentence}: its processes are stopped: resume them with kill -CONT {pids}"
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
