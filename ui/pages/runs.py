"""The page "Runs": a table of all runs of the folder, kept up to date, and the machine's GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError
from lorashard.runtime.disk import show_bytes
from lorashard.runtime.gpus import Gpu, list_gpus

from ..app_context import AppContext
from ..drawing.markup import Markup, badge, join, link, note, table, tag
from ..drawing.wording import NONE, show_count, show_duration, show_number, show_time
from ..reading.places import show_paths, write_path
from ..reading.summaries import Summary
from ..reading.sweeps import JobRow, find_best
from .refreshing import QUIET, Parts, make_html, show_if_any
from .warming import warm_up_on_open

_REFRESH_S = 3.0
_MOST_ROWS = 200
_MOST_MISNAMED = 5
_ANY = "any state"
_STATES = ("queued", "starting", "running", "stopping", "done", "stopped", "failed", "dead")
# Each column: header, attribute to sort by, whether the first click sorts in descending order.
_COLUMNS = (
    ("name", "name", False),
    ("state", "state", False),
    ("progress", "step", True),
    ("model", "model", False),
    ("dataset", "dataset", False),
    ("loss", "loss", False),
    ("eval loss", "eval_loss", False),
    ("tokens/s", "tokens_per_s", True),
    ("duration", "duration_s", True),
    ("started", "begin_s", True),
    ("ranks", "num_ranks", True),
)
_NUM_TEXT = 6  # the box and the text columns
_TREND_WIDTH, _TREND_HEIGHT = 84, 22
_NEWEST_FIRST = {"by": "begin_s", "down": True}

# The browser keeps the ticked boxes: rows move when runs are added, and the ticks move with them.
_SCRIPT = """
const chosen = new Set();
const opened = new Set();
const unfold = () => {
  for (const job of element.querySelectorAll('.of-sweep')) {
    job.classList.toggle('open', opened.has(job.dataset.sweep));
  }
  for (const button of element.querySelectorAll('[data-open]')) {
    button.setAttribute('aria-expanded', opened.has(button.dataset.open));
  }
};
const tell = () => {
  const button = element.querySelector('button[type=submit]');
  if (!button) return;
  button.disabled = chosen.size === 0;
  button.textContent = chosen.size ? `Compare ${chosen.size} selected` : 'Select runs to compare';
  const remove = element.querySelector('[data-delete]');
  remove.hidden = chosen.size === 0;
  remove.textContent = `Delete ${chosen.size} selected`;
};
element.addEventListener('change', (event) => {
  if (event.target.name !== 'runs') return;
  if (event.target.checked) chosen.add(event.target.value); else chosen.delete(event.target.value);
  tell();
});
element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-sort]');
  if (button) trigger('sort', {column: button.dataset.sort});
  const name = event.target.closest('[data-open]')?.dataset.open;
  if (name) { if (!opened.delete(name)) opened.add(name); unfold(); }
  if (event.target.closest('[data-delete]')) trigger('delete', {names: [...chosen]});
});
const tick = () => {
  const deleted = element.querySelector('form')?.dataset.deleted;
  for (const name of JSON.parse(deleted || '[]')) chosen.delete(name);
  const boxes = [...element.querySelectorAll('input[name=runs]')];
  for (const box of boxes) box.checked = chosen.has(box.value);
  tell();
  unfold();
};
watch('value', tick);
tick();
"""


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    warm_up_on_open(context)  # from here one goes to the form
    timer = gr.Timer(_REFRESH_S)
    order = gr.Textbox(visible=False, value=json.dumps(_NEWEST_FIRST))
    make_html(draw_head(context.has_login))
    said = make_html(visible=False)
    gpus = make_html()
    with gr.Row():
        text = gr.Textbox(label="Filter", placeholder="name, model or dataset", scale=3, min_width=200)
        state = gr.Dropdown([_ANY, *_STATES], value=_ANY, label="State", scale=1, min_width=140)
    # The names to delete, and those that were deleted, of which no box is ticked any more.
    asked_names, deleted = gr.State([]), gr.State([])
    with gr.Column(visible=False) as question:
        question_text = make_html()
        with gr.Row():
            delete = gr.Button("Delete permanently", variant="stop", min_width=120)
            keep = gr.Button("Keep them", min_width=120)
    runs = make_html(js_on_load=_SCRIPT)
    misnamed = make_html(visible=False)
    parts = Parts(gpus=gpus, runs=runs, misnamed=misnamed)

    def arrive(request: gr.Request) -> dict[str, Any]:
        name = request.query_params.get("deleted", "")
        is_gone = name and all(row.name != name for row in context.runs.list_with_jobs())
        return show_if_any(note(f"Deleted: {name}") if is_gone else "")

    def refresh(seen: str, text: str, state: str, order: str, deleted: list[str]) -> dict[Any, Any]:
        summaries = context.runs.list()
        deleted = [
            name for name in deleted if all(row.name != name for row in context.runs.list_with_jobs())
        ]  # not a new one of that name
        shown = sort_runs(filter_runs(summaries, text, state), **json.loads(order))
        waits = {row.name: _read_wait(context, row.name) for row in shown if row.state == "queued"}
        values: dict[str, Any] = {"gpus": draw_gpus(list_gpus())}
        values["runs"] = (
            draw_runs(shown, waits, json.loads(order), deleted, _list_jobs(context, shown))
            if summaries
            else draw_empty(write_path(str(context.root)))
        )
        values["misnamed"] = show_if_any(draw_misnamed(context.runs.list_misnamed()))
        return parts.send(seen, values)

    def sort(order: str, event: gr.EventData) -> str:
        return json.dumps(choose_order(json.loads(order), str(event.column)))

    def ask(event: gr.EventData) -> list[Any]:
        names = [str(name) for name in event.names]
        sizes = {row.name: row.size_bytes for row in context.runs.list_with_jobs()}
        known = [name for name in names if name in sizes]
        return [known, draw_question(known, sizes), gr.update(visible=bool(known))]

    def delete_all(names: list[str], deleted: list[str]) -> list[Any]:
        gone, problems = [], []
        for name in names:
            try:
                context.delete_run(name)
                gone.append(name)
            except ConfigError as error:
                problems.append(note(str(error), "error"))
        told = [note(f"Deleted: {', '.join(gone)}")] if gone else []
        return [show_if_any(join([*told, *problems])), gr.update(visible=False), gone]

    asked = parts.refresh_by(timer, refresh, [text, state, order, deleted])
    gr.on(None, arrive, None, said, **QUIET).then(**asked)
    text.change(**asked)
    state.input(**asked)
    runs.sort(sort, order, order, **QUIET).then(**asked)
    runs.delete(ask, None, [asked_names, question_text, question], **QUIET)
    keep.click(lambda: gr.update(visible=False), None, question, **QUIET)
    delete.click(delete_all, [asked_names, deleted], [said, question, deleted], **QUIET).then(**asked)


def _read_wait(context: AppContext, name: str) -> str:
    try:
        return context.runs.get(name).progress().sentence
    except ConfigError:  # it has just been deleted
        return ""


def _list_jobs(context: AppContext, shown: Sequence[Summary]) -> dict[str, Sequence[JobRow]]:
    jobs = {}
    for row in shown[:_MOST_ROWS]:
        with suppress(ConfigError):  # it has just been deleted
            jobs[row.name] = context.runs.list_jobs(row.name)
    return jobs


def filter_runs(summaries: Sequence[Summary], text: str, state: str) -> list[Summary]:
    """Return the runs whose name, model or dataset has all the words, in any case, and that are in the state."""
    words = text.lower().split()

    def fits(row: Summary) -> bool:
        place = " ".join(filter(None, (row.name, row.model, row.dataset, row.method))).lower()
        return state in (_ANY, row.state) and all(word in place for word in words)

    return [row for row in summaries if fits(row)]


def sort_runs(summaries: Sequence[Summary], by: str, down: bool) -> list[Summary]:
    """Return the runs in order of an attribute; those that have none of it, or NaN, come last either way."""

    def has(row: Summary) -> bool:
        value = getattr(row, by)
        return value is not None and not (isinstance(value, float) and math.isnan(value))

    known = sorted((row for row in summaries if has(row)), key=lambda row: getattr(row, by), reverse=down)
    return known + [row for row in summaries if not has(row)]


def choose_order(order: dict[str, Any], column: str) -> dict[str, Any]:
    """Return the order after a click on a column: the other way round where it is the order already."""
    firsts = {by: down for _, by, down in _COLUMNS}
    if column not in firsts:
        return order
    return {"by": column, "down": not order["down"] if order["by"] == column else firsts[column]}


def draw_gpus(gpus: Sequence[Gpu]) -> Markup:
    """Return the machine's GPUs in a line."""
    if not gpus:
        return tag("p", "This machine has no usable GPU; runs use its CPU.", class_="subdued")
    words = []
    for gpu in gpus:
        use = "" if gpu.utilization_percent is None else f", {gpu.utilization_percent} % busy"
        heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} \u00b0C"
        free = f"{show_bytes(gpu.free_bytes)} of {show_bytes(gpu.total_bytes)} free"
        words.append(tag("li", tag("strong", f"GPU {gpu.index}"), f" {gpu.name}: {free}{use}{heat}"))
    return tag("ul", *words, class_="gpus", aria_label="GPUs of this machine")


def draw_empty(root: str) -> Markup:
    """Say what to do where there is no run."""
    first = tag("p", tag("strong", "No runs yet."), " A run needs a model and a dataset.")
    there = tag(
        "p", "Runs started with ", tag("code", f"--output_dir {root}/NAME"), " appear here too.", class_="subdued"
    )
    return tag("div", first, tag("p", link("new", "Start the first run", "button button-primary")), there)


def draw_head(has_login: bool) -> Markup:
    """Return the page's title and links; who has logged in can log out.

    It is drawn once: a link that came later would push "New run" away, and a click meant for it would log out.
    """
    out = [link("logout", "Log out")] if has_login else []
    links = tag("div", *out, link("new", "New run", "button button-primary"), class_="links")
    return tag("div", tag("h1", "Runs"), links, class_="page-head")


def draw_misnamed(names: Sequence[str]) -> str:
    """Say which runs are not in the table; nothing if all are."""
    if not names:
        return ""
    which = ", ".join(f"\u201c{name}\u201d" for name in names[:_MOST_MISNAMED])
    more = f" and {len(names) - _MOST_MISNAMED} more" if len(names) > _MOST_MISNAMED else ""
    return note(
        f"Not listed, because of the names of their folders: {which}{more}. Rename them with letters, digits and "
        "\u201c_\u201d, and within the name also \u201c. + = @ -\u201d and spaces.",
        "warning",
    )


def draw_question(names: Sequence[str], sizes: Mapping[str, int | None]) -> Markup:
    """Ask whether to delete these runs."""
    total = show_bytes(sum(sizes[name] or 0 for name in names))
    count = "this run" if len(names) == 1 else f"these {len(names)} runs"
    text = f"Delete {count}, with checkpoints and adapters ({total})? {', '.join(names)}"
    return note(text, "warning")


def draw_runs(
    shown: Sequence[Summary],
    waits: dict[str, str],
    order: dict[str, Any],
    deleted: Sequence[str] = (),
    jobs: Mapping[str, Sequence[JobRow]] | None = None,
) -> Markup:
    """Return the table, in a form whose ticked runs the page "Compare" is opened with.

    Args:
        waits: of queued runs, for what they wait.
        deleted: the runs that were just deleted, which are ticked no more.
        jobs: of the sweeps among the runs, by name; the browser shows them below their sweep once it is opened.
    """
    if not shown:
        return note("No run matches the filter.")
    headers = [tag("th", "compare", scope="col", class_="text")]
    headers += [_draw_header(number, *column[:2], order) for number, column in enumerate(_COLUMNS, 1)]
    rows = [cells for row in shown[:_MOST_ROWS] for cells in _draw_rows(row, waits, (jobs or {}).get(row.name, []))]
    content = table(headers, rows, "Runs", _NUM_TEXT, class_="cards")
    submit = tag("button", "Select runs to compare", type="submit", class_="button", disabled=True)
    remove = tag("button", "Delete", type="button", class_="button", data_delete=True, hidden=True)
    num_more = len(shown) - _MOST_ROWS
    more = note(f"{num_more} more are not shown; use the filter.") if num_more > 0 else ""
    buttons = tag("p", submit, " ", remove)
    names = json.dumps(list(deleted))
    return tag("form", buttons, content, more, action="compare", method="get", data_deleted=names)


def _draw_header(number: int, text: str, by: str, order: dict[str, Any]) -> Markup:
    is_order = order["by"] == by
    arrow = tag("span", ("\u25bc" if order["down"] else "\u25b2") if is_order else "", aria_hidden="true")
    button = tag("button", text, " ", arrow, type="button", data_sort=by, title=f"Sort by {text}")
    direction = ("descending" if order["down"] else "ascending") if is_order else None
    kind = "text" if number < _NUM_TEXT else "number"
    return tag("th", button, scope="col", class_=kind, aria_sort=direction)


def _draw_rows(row: Summary, waits: dict[str, str], jobs: Sequence[JobRow]) -> list[list[str]]:
    """Return the cells of a run, and below it those of a sweep's jobs."""
    cells = _draw_row(row, waits)
    if not jobs:
        return [cells]
    best = find_best(jobs)
    told = f"best {best.name}: {best.metric.replace('_', ' ')} {show_number(best.value)}" if best else ""
    opener = tag(
        "button", f"{len(jobs)} jobs", type="button", class_="disclosure", data_open=row.name, aria_expanded="false",
        aria_label=f"{len(jobs)} jobs of {row.name}",
    )  # fmt: skip
    cells[1] = tag("div", link("sweep", row.name, name=row.name), tag("div", opener), class_="run-name")
    cells[1] = join((cells[1], tag("div", told, class_="reason subdued")))
    return [cells, *(_draw_job(job, row.name) for job in jobs)]


def _draw_job(job: JobRow, sweep: str) -> list[str]:
    row = job.summary
    name = link("run", job.name, name=job.run) if row is not None else job.name
    shown = _draw_row(row, {}) if row is not None else [""] * (len(_COLUMNS) + 1)
    of_sweep = tag("div", name, class_="run-name of-sweep", data_sweep=sweep)
    why = tag("div", job.why, class_="reason subdued", title=job.why) if job.why else Markup("")
    return [shown[0], of_sweep, tag("div", badge(job.state), why), shown[3], "", *shown[5:]]


def _draw_row(row: Summary, waits: dict[str, str]) -> list[str]:
    return [
        tag("input", type="checkbox", name="runs", value=row.name, aria_label=f"compare {row.name}"),
        tag("div", link("run", row.name, name=row.name), class_="run-name"),
        tag("div", badge(row.state), _draw_more(row, waits)),
        draw_progress(row),
        _draw_last_part(row.model),
        _draw_last_part(row.dataset),
        tag("div", draw_trend(row.trend), show_number(row.loss), class_="trend-cell")
        if row.trend
        else show_number(row.loss),
        show_number(row.eval_loss),
        show_count(row.tokens_per_s),
        show_duration(row.duration_s),
        tag("div", show_time(row.begin_s).replace(" ", "\n"), class_="date"),
        show_count(row.num_ranks),
    ]


def _draw_more(row: Summary, waits: dict[str, str]) -> Markup:
    """Return what a state needs said with it: for what it waits, its phase, or why it ended."""
    if row.error and row.state in ("failed", "dead"):
        reason = show_paths(row.error)
        return tag("div", reason, class_="reason subdued", title=reason)
    more = waits.get(row.name) or (row.phase if row.state == "running" and row.phase != "train" else "")
    return tag("div", more, class_="reason subdued") if more else Markup("")


def draw_progress(row: Summary) -> Markup:
    """Return a bar, the steps, and the time left of a run that trains."""
    if row.step is None:
        return Markup(NONE)
    if not row.max_steps:
        return tag("div", show_count(row.step))
    percent = min(100.0, 100 * row.step / row.max_steps)
    bar = tag("div", tag("span", style=f"width: {percent:.1f}%"), class_="bar", aria_hidden="true")
    steps = tag("div", f"{show_count(row.step)} / {show_count(row.max_steps)}")
    left = tag("div", f"{show_duration(row.eta_s)} left", class_="subdued") if row.eta_s is not None else Markup("")
    return tag("div", bar, steps, left, class_="run-progress")


def draw_trend(trend: Sequence[tuple[float, float]]) -> Markup:
    """Return a small curve of a run's losses, drawn to its own least and greatest; nothing for a single point."""
    if len(trend) < 2:
        return Markup("")
    xs, ys = zip(*trend, strict=True)
    x_span, y_span = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    places = (
        f"{1 + (x - min(xs)) / x_span * (_TREND_WIDTH - 2):.1f},{1 + (max(ys) - y) / y_span * (_TREND_HEIGHT - 2):.1f}"
        for x, y in trend
    )
    said = f"loss from {show_number(ys[0])} to {show_number(ys[-1])}"
    size: dict[str, Any] = {
        "width": _TREND_WIDTH,
        "height": _TREND_HEIGHT,
        "viewBox": f"0 0 {_TREND_WIDTH} {_TREND_HEIGHT}",
    }
    return tag("svg", tag("polyline", points=" ".join(places)), class_="trend", role="img", aria_label=said, **size)


def _draw_last_part(place: str | None) -> str:
    """Return the last part of a path or hub id, with the whole as its title."""
    if not place:
        return ""
    return tag("div", Path(place).name or place, class_="last-part", title=show_paths(place))
