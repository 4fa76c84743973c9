"""The page "Runs": a table of all runs of the folder, kept up to date, and the machine's GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError
from lorashard.runtime.disk import show_bytes
from lorashard.runtime.gpus import Gpu, list_gpus

from ..app_context import AppContext
from ..drawing.markup import Markup, badge, link, note, table, tag
from ..drawing.wording import show_count, show_duration, show_number, show_time
from ..reading.places import show_paths, write_path
from ..reading.summaries import Summary
from .refreshing import QUIET, Parts, make_html

_REFRESH_S = 3.0
_MOST_ROWS = 200
_ANY = "any state"
_STATES = ("queued", "starting", "running", "stopping", "done", "stopped", "failed", "dead")
# Each column: header, attribute to sort by, whether the first click sorts in descending order.
_COLUMNS = (
    ("name", "name", False),
    ("state", "state", False),
    ("model", "model", False),
    ("dataset", "dataset", False),
    ("step", "step", True),
    ("loss", "loss", False),
    ("eval loss", "eval_loss", False),
    ("tokens/s", "tokens_per_s", True),
    ("time left", "eta_s", False),
    ("started", "begin_s", True),
    ("ranks", "num_ranks", True),
)
_NUM_TEXT = 5  # the box and the text columns
_NEWEST_FIRST = {"by": "begin_s", "down": True}

# The browser keeps the ticked boxes: rows move when runs are added, and the ticks move with them.
_SCRIPT = """
const chosen = new Set();
const tell = () => {
  const button = element.querySelector('button[type=submit]');
  if (button) {
    button.disabled = chosen.size === 0;
    button.textContent = chosen.size ? `Compare ${chosen.size} selected` : 'Select runs to compare';
  }
};
element.addEventListener('change', (event) => {
  if (event.target.name !== 'runs') return;
  if (event.target.checked) chosen.add(event.target.value); else chosen.delete(event.target.value);
  tell();
});
element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-sort]');
  if (button) trigger('sort', {column: button.dataset.sort});
});
const tick = () => {
  const boxes = [...element.querySelectorAll('input[name=runs]')];
  for (const box of boxes) box.checked = chosen.has(box.value);
  tell();
};
watch('value', tick);
tick();
"""


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    timer = gr.Timer(_REFRESH_S)
    order = gr.Textbox(visible=False, value=json.dumps(_NEWEST_FIRST))
    make_html(tag("div", tag("h1", "Runs"), link("new", "New run", "button button-primary"), class_="page-head"))
    gpus = make_html()
    with gr.Row():
        text = gr.Textbox(label="Filter", placeholder="name, model or dataset", scale=3, min_width=200)
        state = gr.Dropdown([_ANY, *_STATES], value=_ANY, label="State", scale=1, min_width=140)
    runs = make_html(js_on_load=_SCRIPT)
    parts = Parts(gpus=gpus, runs=runs)
    inputs = [parts.seen, text, state, order]

    def refresh(seen: str, text: str, state: str, order: str) -> dict[Any, Any]:
        summaries = context.runs.list()
        shown = sort_runs(filter_runs(summaries, text, state), **json.loads(order))
        waits = {row.name: _read_wait(context, row.name) for row in shown if row.state == "queued"}
        values = {"gpus": draw_gpus(list_gpus())}
        values["runs"] = (
            draw_runs(shown, waits, json.loads(order)) if summaries else draw_empty(write_path(str(context.root)))
        )
        return parts.send(seen, values)

    def sort(order: str, event: gr.EventData) -> str:
        return json.dumps(choose_order(json.loads(order), str(event.column)))

    asked = {"fn": refresh, "inputs": inputs, "outputs": parts.outputs} | QUIET
    gr.on(None, lambda: None, **QUIET).then(**asked)  # without inputs: when the page is opened, and only then
    timer.tick(**asked)
    text.change(**asked)
    state.input(**asked)
    runs.sort(sort, order, order, **QUIET).then(**asked)


def _read_wait(context: AppContext, name: str) -> str:
    try:
        return context.runs.get(name).progress().sentence
    except ConfigError:  # it has just been deleted
        return ""


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


def draw_runs(shown: Sequence[Summary], waits: dict[str, str], order: dict[str, Any]) -> Markup:
    """Return the table, in a form whose ticked runs the page "Compare" is opened with.

    Args:
        waits: of queued runs, for what they wait.
    """
    if not shown:
        return note("No run matches the filter.")
    headers = [tag("th", "compare", scope="col", class_="text")]
    headers += [_draw_header(number, *column[:2], order) for number, column in enumerate(_COLUMNS, 1)]
    content = table(headers, [_draw_row(row, waits) for row in shown[:_MOST_ROWS]], "Runs", _NUM_TEXT, class_="cards")
    submit = tag("button", "Select runs to compare", type="submit", class_="button", disabled=True)
    num_more = len(shown) - _MOST_ROWS
    more = note(f"{num_more} more are not shown; use the filter.") if num_more > 0 else ""
    return tag("form", tag("p", submit), content, more, action="compare", method="get")


def _draw_header(number: int, text: str, by: str, order: dict[str, Any]) -> Markup:
    is_order = order["by"] == by
    arrow = tag("span", ("\u25bc" if order["down"] else "\u25b2") if is_order else "", aria_hidden="true")
    button = tag("button", text, " ", arrow, type="button", data_sort=by, title=f"Sort by {text}")
    direction = ("descending" if order["down"] else "ascending") if is_order else None
    kind = "text" if number < _NUM_TEXT else "number"
    return tag("th", button, scope="col", class_=kind, aria_sort=direction)


def _draw_row(row: Summary, waits: dict[str, str]) -> list[str]:
    box = tag("input", type="checkbox", name="runs", value=row.name, aria_label=f"compare {row.name}")
    more = waits.get(row.name) or (row.phase if row.state == "running" and row.phase != "train" else "")
    state = tag("div", badge(row.state), tag("div", more, class_="subdued") if more else Markup(""))
    step = show_count(row.step) + (f" / {show_count(row.max_steps)}" if row.max_steps else "")
    return [
        box,
        link("run", row.name, name=row.name),
        state,
        show_paths(row.model or ""),
        show_paths(row.dataset or ""),
        step,
        show_number(row.loss),
        show_number(row.eval_loss),
        show_count(row.tokens_per_s),
        show_duration(row.eta_s),
        show_time(row.begin_s),
        show_count(row.num_ranks),
    ]
