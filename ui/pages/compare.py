"""The page "Compare": curves of several runs in one chart, their last values, and the options that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gradio as gr
import numpy as np

from lorashard.errors import ConfigError

from ..app_context import AppContext
from ..drawing.charts import Curve, draw_curves
from ..drawing.markup import Markup, badge, join, link, note, table
from ..drawing.wording import NONE, show_count, show_duration, show_number
from ..reading.comparing import differences
from ..reading.places import show_paths
from ..reading.runs import RunReader
from .plotting import load_plotly, make_chart
from .refreshing import QUIET, Parts, make_html, show_if_any

_REFRESH_S = 4.0
_MOST_RUNS = 12
_MOST_POINTS = 500
_FIRST_METRICS = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_s")
_UNCHARTED = ("time", "step", "epoch")
_AXES = {"step": "step", "time": "minutes", "tokens": "tokens"}


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    timer = gr.Timer(_REFRESH_S)
    load_plotly()
    make_html("<h1>Compare runs</h1>")
    # Custom values: a run of the address may be deleted, and then Gradio would refuse the whole event.
    runs = gr.Dropdown(
        [],
        value=[],
        multiselect=True,
        allow_custom_value=True,
        label="Runs",
        info=f"Up to {_MOST_RUNS}; type to search",
    )
    with gr.Row():
        metric = gr.Dropdown(list(_FIRST_METRICS), value="loss", label="Metric", min_width=160)
        axis = gr.Radio(list(_AXES), value="step", label="Over", min_width=160)
        smoothing = gr.Slider(0, 0.99, 0.6, step=0.01, label="Smoothing", min_width=200)
        is_log = gr.Checkbox(label="Logarithmic axis", min_width=140)
    said = make_html(visible=False)
    with gr.Column(visible=False) as body:
        plot = make_chart("Curves")
        ends = make_html()
        make_html("<h2>Options that differ</h2>")
        options = make_html()
    parts = Parts(runs=runs, metric=metric, said=said, body=body, plot=plot, ends=ends, options=options)

    def refresh(seen: str, names: list[str], metric: str, axis: str, smoothing: float, is_log: bool) -> dict[Any, Any]:
        values: dict[str, Any] = {"runs": gr.update(choices=[row.name for row in context.runs.list()])}
        readers, problems = _find_readers(context, names)
        values["body"] = gr.update(visible=bool(readers))
        if readers:
            found = sorted({name for reader in readers for name in reader.series_names()} - {*_UNCHARTED})
            choices = [name for name in _FIRST_METRICS if name in found]
            choices += [name for name in found if name not in choices]
            values["metric"] = gr.update(choices=choices)
            curves = [curve for reader in readers if (curve := _read_curve(reader, metric, axis, smoothing))]
            title = _AXES[axis]
            values["plot"] = draw_curves(curves, title, metric.replace("_", " "), is_log, f"{axis} {metric}")
            values["ends"] = draw_ends(readers, metric)
            values["options"] = draw_differences(readers)
            missing = [reader.name for reader in readers if metric not in reader.series_names()]
            problems += [f"{name} has no {metric} (yet)." for name in missing]
        else:
            problems.append("Choose two or more runs to see their curves and the options that differ.")
        values["said"] = show_if_any(join(note(problem) for problem in problems))
        return parts.send(seen, values)

    def read_names(request: gr.Request) -> Any:
        words = request.query_params.getlist("runs") if hasattr(request.query_params, "getlist") else []
        names = list(dict.fromkeys(name for word in words for name in word.split(",") if name))
        return gr.update(choices=[row.name for row in context.runs.list()], value=names)

    inputs = [parts.seen, runs, metric, axis, smoothing, is_log]
    asked = {"fn": refresh, "inputs": inputs, "outputs": parts.outputs} | QUIET
    gr.on(None, read_names, None, runs, **QUIET).then(**asked)
    timer.tick(**asked)
    for component in (runs, metric, axis):
        component.input(**asked)
    smoothing.change(**asked)
    is_log.change(**asked)


def _find_readers(context: AppContext, names: Sequence[str]) -> tuple[list[RunReader], list[str]]:
    readers, problems = [], []
    for name in names[:_MOST_RUNS]:
        try:
            readers.append(context.runs.get(name))
        except ConfigError:
            problems.append(f"There is no run \u201c{name}\u201d: it was deleted or never existed.")
    if len(names) > _MOST_RUNS:
        problems.append(f"Only the first {_MOST_RUNS} runs are shown.")
    return readers, problems


def _read_curve(reader: RunReader, metric: str, axis: str, smoothing: float) -> Curve | None:
    series = reader.series([metric], _MOST_POINTS, smoothing)
    if metric not in series or not series[metric][0]:
        return None
    steps, values, smoothed = series[metric]
    xs = np.asarray(steps)
    if axis != "step":
        name = "time" if axis == "time" else "num_tokens"
        known = reader.series([name], _MOST_POINTS)
        if name not in known or not known[name][0]:
            return None
        at, counts, _ = known[name]
        # The two series were thinned differently; interpolate tokens or time between their points.
        xs = np.interp(xs, at, counts)
        xs = (xs - counts[0]) / 60 if axis == "time" else xs
    return Curve(reader.name, xs.tolist(), values, smoothed if smoothing else ())


def draw_ends(readers: Sequence[RunReader], metric: str) -> Markup:
    """Return each run's last, lowest and highest value of a metric."""
    rows = []
    for reader in readers:
        summary = reader.summary()
        xs, ys, _ = reader.series([metric], _MOST_POINTS).get(metric, ([], [], []))
        known = [(y, x) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        name = join((link("run", reader.name, name=reader.name), " ", badge(summary.state)))
        times = reader.series(["time"], _MOST_POINTS).get("time", ([], [], []))[1]
        lived = show_duration(times[-1] - times[0]) if times else NONE
        ends = (show_number(known[-1][0]), _show_at(min(known)), _show_at(max(known))) if known else (NONE, NONE, NONE)
        rows.append((name, *ends, show_number(summary.eval_loss), show_count(summary.step), lived))
    what = metric.replace("_", " ")
    headers = ("run", f"last {what}", f"lowest {what}", f"highest {what}", "last eval loss", "step", "trained for")
    return table(headers, rows, f"{what} of each run", class_="cards")


def draw_differences(readers: Sequence[RunReader]) -> Markup:
    """Return the options whose values differ between the runs."""
    if len(readers) < 2:
        return note("Choose another run to compare with.")
    rows = [(option, *(_show_value(value) for value in values)) for option, values in differences(readers)]
    if not rows:
        return note("All options are the same.")
    headers = ("option", *(reader.name for reader in readers))
    return table(headers, rows, "Options that differ", num_text=len(headers), class_="cards")


def _show_at(found: tuple[float, float]) -> str:
    return f"{show_number(found[0])} at {show_count(found[1])}"


def _show_value(value: Any) -> str:
    return NONE if value is None else show_paths(str(value))
