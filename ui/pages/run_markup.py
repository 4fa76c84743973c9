"""What the page "Run" shows of a run, as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lorashard.runtime.disk import show_bytes

from ..drawing.markup import Markup, badge, facts, join, link, note, table, tag
from ..drawing.wording import NONE, show_ago, show_count, show_duration, show_number, show_time
from ..reading.alerts import Alert
from ..reading.checkpoints import CheckpointRow
from ..reading.eta import Progress
from ..reading.places import show_paths
from ..reading.ranks import RankRow
from ..reading.samples import Sample
from ..reading.summaries import Summary

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
    """Return the run's name, state and main facts."""
    title = tag("div", tag("h1", summary.name), badge(summary.state), class_="run-title")
    step = f"{show_count(summary.step)} of {show_count(summary.max_steps)}" if summary.max_steps else NONE
    quantization = [("quantization", summary.quantization)] if summary.quantization else []
    pairs = [
        ("model", show_paths(summary.model or NONE)),
        *quantization,
        ("dataset", show_paths(summary.dataset or NONE)),
        ("method", summary.method or NONE),
        ("ranks", show_count(summary.num_ranks)),
        ("step", step),
        ("loss", show_number(summary.loss)),
        ("eval loss", show_number(summary.eval_loss)),
        ("tokens/s", show_count(summary.tokens_per_s)),
        ("started", show_time(summary.begin_s)),
    ]
    return join((title, facts(pairs)))


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


def draw_alerts(summary: Summary, alerts: Sequence[Alert]) -> Markup:
    """Return the alerts, the worst first, each with its rank and step."""
    notes = []
    for alert in alerts:
        where = [f"rank {alert.rank}" if alert.rank is not None else "", f"step {alert.step}" if alert.step else ""]
        place = ", ".join(word for word in where if word and word not in alert.sentence)
        kind = "error" if alert.severity == "error" else "warning" if alert.severity == "warning" else "info"
        sentence = show_paths(alert.sentence)
        notes.append(note(join((tag("strong", place, ": "), sentence)) if place else sentence, kind))
    if summary.error and not any(summary.error in alert.sentence for alert in alerts):
        notes.insert(0, note(show_paths(summary.error), "error" if summary.state == "failed" else "warning"))
    return join(notes)


def draw_ranks(rows: Sequence[RankRow], now_s: float, is_live: bool) -> Markup:
    """Return a table of all ranks."""
    if not rows:
        return note("No metrics from any rank yet: each rank writes a line at every logged step.")
    headers = ("rank", "state", "memory now", "peak", "planned", "gather wait", "utilization", "temperature", "step")
    cells = [
        (
            str(row.rank),
            row.state,
            _show_bytes(row.memory_bytes),
            _show_peak(row),
            _show_bytes(row.planned_bytes),
            _show_wait(row),
            _show_use(row),
            NONE if row.temperature_c is None else f"{row.temperature_c:.0f} \u00b0C",
            show_count(row.step),
            show_ago(row.update_s, now_s) if is_live else show_time(row.update_s),
        )
        for row in rows
    ]
    drawn = table((*headers, "last update"), cells, "Every rank", num_text=2, class_="cards")
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


def draw_answer(pressed: str, summary: Summary, checkpoints: Sequence[CheckpointRow]) -> Markup:
    """Report on the button that was pressed last.

    Args:
        pressed: JSON of `word` (stop, stop_now, save, resume, delete), `saved`, which is the step of the newest
            checkpoint when it was pressed, and `error` where it failed.
    """
    said = json.loads(pressed) if pressed else {}
    word = said.get("word")
    if said.get("error"):
        return note(said["error"], "error")
    is_live = summary.is_live
    if word == "stop":
        going = "Stopping: it saves a checkpoint at the end of this step, then ends."
        return note(going if is_live else f"Ended at step {show_count(summary.step)}.")
    if word == "stop_now":
        return note("Stopping all ranks." if is_live else "All ranks have ended.")
    if word == "save":
        new = [point for point in checkpoints if point.step > said.get("saved", -1)]
        if new:
            return note(f"Saved: {max(new, key=lambda point: point.step).name}.")
        if is_live:
            return note("Saving at the end of this step; training continues.")
        return note("The run ended before it could save.", "warning")
    if word == "resume" and summary.state == "starting":
        return note("Resuming: starting the ranks.")
    return Markup("")


def draw_reason(reason: str | None) -> Markup:
    """Return why a run cannot be resumed; empty if it can."""
    return Markup("") if reason is None else tag("p", "Cannot be resumed: ", reason, class_="subdued")


def draw_links(summary: Summary, has_adapter: bool) -> Markup:
    """Return links to the other pages for this run; its adapter may be in a checkpoint."""
    words = [link("new", "Clone", "button", **{"from": summary.name})]
    if has_adapter:
        words += [link(page, page.capitalize(), "button", run=summary.name) for page in ("chat", "export")]
    words.append(link("compare", "Compare", "button", runs=summary.name))
    return tag("nav", *words, class_="links", aria_label="this run elsewhere")


def _table_of_samples(first: str, rows: Sequence[tuple[str, str]], caption: str) -> Markup:
    cells = [(tag("div", a, class_="said"), tag("div", b, class_="said")) for a, b in rows]
    return table((first, "answer"), cells, caption, num_text=2)


def _show_bytes(num_bytes: float | None) -> str:
    return NONE if num_bytes is None else show_bytes(int(num_bytes))


def _show_peak(row: RankRow) -> str:
    is_on_cpu = row.cpu_percent is not None  # then it is the process's, with all libraries, which no plan counts
    if row.peak_bytes is None or not row.planned_bytes or is_on_cpu:
        return _show_bytes(row.peak_bytes)
    return f"{show_bytes(int(row.peak_bytes))} ({row.peak_bytes / row.planned_bytes:.0%} of plan)"


def _show_use(row: RankRow) -> str:
    percent = row.cpu_percent if row.utilization_percent is None else row.utilization_percent
    return NONE if percent is None else f"{percent:.0f} %"


def _show_wait(row: RankRow) -> str:
    if row.wait_s is None:
        return NONE
    share = "" if row.wait_share is None else f" ({row.wait_share:.0%} recently)"
    return f"{show_duration(row.wait_s)}{share}"
