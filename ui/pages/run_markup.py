"""What the page "Run" shows of a run, as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lorashard.runs.root import is_job
from lorashard.runtime.disk import show_bytes

from ..drawing.markup import Markup, badge, join, link, note, table, tag
from ..drawing.rank_cells import RANK_HEADERS, write_rank
from ..drawing.wording import show_count, show_time
from ..reading.alerts import Alert
from ..reading.checkpoints import CheckpointRow
from ..reading.eta import Progress
from ..reading.places import show_paths
from ..reading.ranks import RankRow
from ..reading.samples import Sample
from ..reading.summaries import Summary
from ..reading.sweeps import is_sweep

_PHASES = ("download", "tokenize", "load", "train", "evaluate", "save")
_PREPARING = 3  # of the phases, those before the training, each of which comes once
ALL_PROMPTS = "All prompts, latest"
_MOST_SAMPLES = 50


def draw_missing(name: str) -> Markup:
    """Return what is shown for a run that does not exist."""
    what = (
        f"There is no run \u201c{name}\u201d in this folder: it was deleted or never existed."
        if name
        else "No run chosen."
    )
    return tag(
        "div",
        tag("h1", "Run"),
        note(what, "warning"),
        tag("p", link(".", "See all runs"), " or ", link("new", "start a new one")),
    )


def draw_header(summary: Summary) -> Markup:
    """Return the run's name and state."""
    return tag("div", tag("h1", summary.name), badge(summary.state), class_="run-title")


def draw_progress(summary: Summary, progress: Progress) -> Markup:
    """Return the phases with the current one marked, a bar, and a sentence."""
    present = _PHASES.index(progress.phase) if progress.phase in _PHASES else -1
    items = []
    for number, phase in enumerate(_PHASES):
        num_over = len(_PHASES) if summary.state == "done" else _PREPARING if summary.step else min(present, _PREPARING)
        is_over = number < num_over
        is_now = number == present and summary.is_live
        mark = "\u2713" if is_over else "\u25b6" if is_now else "\u25cb"
        icon = tag("span", mark + "\ufe0e", aria_hidden="true")
        items.append(tag("li", icon, " ", phase, aria_current="step" if is_now else None))
    percent = None if progress.fraction is None else round(100 * progress.fraction, 1)
    bar = tag(
        "div",
        tag("span", style=f"width: {percent or 0}%"),
        class_="bar",
        role="progressbar",
        aria_valuenow=None if percent is None else str(percent),
        aria_valuemin=0,
        aria_valuemax=100,
        aria_label="progress",
    )
    return join((tag("ol", *items, class_="phases"), bar, tag("p", progress.sentence, class_="bar-sentence")))


def draw_alerts(alerts: Sequence[Alert]) -> Markup:
    """Return the alerts, the worst first, each with its rank and step."""
    notes = []
    for alert in alerts:
        where = [f"rank {alert.rank}" if alert.rank is not None else "", f"step {alert.step}" if alert.step else ""]
        place = ", ".join(word for word in where if word and word not in alert.sentence)
        kind = "error" if alert.severity == "error" else "warning" if alert.severity == "warning" else "info"
        sentence = show_paths(alert.sentence)
        notes.append(note(join((tag("strong", place, ": "), sentence)) if place else sentence, kind))
    return join(notes)


def draw_ranks(rows: Sequence[RankRow], now_s: float, is_live: bool) -> Markup:
    """Return a table of all ranks."""
    if not rows:
        return note("No metrics from any rank yet: each rank writes a line at every logged step.")
    cells = [write_rank(row, now_s, is_live) for row in rows]
    drawn = table(RANK_HEADERS, cells, "Every rank", num_text=2, class_="cards")
    if not any(row.cpu_percent is not None for row in rows):
        return drawn
    about = "On the CPU, memory is that of the whole process with its libraries, which the plan does not count."
    return join((drawn, tag("p", about, class_="subdued")))


def draw_samples(samples: Sequence[Sample], chosen: str) -> Markup:
    """Return sampled answers: to one prompt over the steps, the newest first, or to all prompts at the last step."""
    if not samples:
        return note("No samples. Set the option sample_prompts, and each evaluation generates answers.")
    if chosen == ALL_PROMPTS:
        last = max(sample.step for sample in samples)
        rows = [(s.prompt, s.completion) for s in samples if s.step == last]
        return _table_of_samples("prompt", rows, f"Answers at step {last}")
    of_prompt = [sample for sample in reversed(samples) if sample.prompt == chosen]
    rows = [(str(sample.step), sample.completion) for sample in of_prompt[:_MOST_SAMPLES]]
    return _table_of_samples("step", rows, "Answers over time")


def draw_checkpoints(checkpoints: Sequence[CheckpointRow]) -> Markup:
    """Return a table of the checkpoints in the run's folder."""
    if not checkpoints:
        return note("No checkpoint yet. \u201cSave now\u201d makes one; save_steps makes them automatically.")
    rows = [
        (
            point.name,
            point.problem or "complete",
            show_time(point.time_s),
            show_count(point.step),
            show_bytes(point.size_bytes),
        )
        for point in checkpoints
    ]
    return table(("checkpoint", "state", "saved", "step", "size"), rows, "Checkpoints", num_text=3, class_="cards")


def draw_answer(pressed: str, summary: Summary, checkpoints: Sequence[CheckpointRow], is_at_once: bool) -> Markup:
    """Say what the run does for a button that was pressed, in this tab or elsewhere.

    Args:
        pressed: in this tab; JSON of `word` (stop, stop_now, save, resume, delete), the `time`, which tells two presses
            apart, `saved`, which is the step of the newest checkpoint when it was pressed, `begin_s` of the run's start
            and its `state` then, and `error` where it failed. A reply holds for that start of the run alone.
        is_at_once: whether a run that is stopping does not save.
    """
    said = json.loads(pressed) if pressed else {}
    is_of_this_start = (summary.begin_s or 0.0) <= (said.get("begin_s") or 0.0)
    if said.get("error") and is_of_this_start and said.get("state") == summary.state:
        return note(said["error"], "error")
    if summary.state == "stopping":
        return _draw_stopping(summary, is_at_once)
    if summary.state == "starting" and summary.step:
        return note(f"Resuming from step {show_count(summary.step)}: starting the ranks.")
    if said.get("word") != "save" or not is_of_this_start:
        return Markup("")
    new = [point for point in checkpoints if point.step > said.get("saved", -1)]
    if new:
        return note(f"Saved: {max(new, key=lambda point: point.step).name}.")
    if summary.is_live:
        return note("Saving at the end of this step; training continues.")
    return note("The run ended before it could save.", "warning")


def _draw_stopping(summary: Summary, is_at_once: bool) -> Markup:
    if is_at_once:
        return note("Stopping all ranks at once: nothing is saved.")
    if summary.phase in ("train", "evaluate", "save"):
        return note("Stopping: it saves a checkpoint at the end of this step, then ends.")
    return note("Ending: its processes leave.")


def draw_reason(reason: str | None) -> Markup:
    """Return why a run cannot be resumed; empty if it can."""
    return Markup("") if reason is None else tag("p", "Cannot be resumed: ", reason, class_="subdued")


def draw_links(summary: Summary, folder: Path, has_adapter: bool) -> Markup:
    """Return links to the other pages for this run; its adapter may be in a checkpoint."""
    sweep = summary.name.partition("/")[0]
    words = [link("sweep", "Jobs" if is_sweep(folder) else "Sweep", "button", name=sweep)] if _is_of(folder) else []
    words += [link("run", "Ranks and logs", "button", name=sweep, tab="logs")] if is_sweep(folder) else []
    words += [link("new", "Clone", "button", **{"from": summary.name})]
    if has_adapter:
        words += [link(page, page.capitalize(), "button", run=summary.name) for page in ("chat", "export")]
    words.append(link("compare", "Compare", "button", runs=summary.name))
    return tag("nav", *words, class_="links", aria_label="this run elsewhere")


def _is_of(folder: Path) -> bool:
    """Tell whether a folder is that of a sweep, or of one of its jobs."""
    return is_sweep(folder) or is_job(folder)


def _table_of_samples(first: str, rows: Sequence[tuple[str, str]], caption: str) -> Markup:
    cells = [(tag("div", a, class_="said"), tag("div", b, class_="said")) for a, b in rows]
    return table((first, "answer"), cells, caption, num_text=2)
