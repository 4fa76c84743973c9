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
from ..drawing.markup import Markup, badge, join, link, note, table, tag
from ..drawing.wording import NONE, show_count, show_duration, show_number
from ..reading.comparing import differences
from ..reading.metrics import is_noisy
from ..reading.places import show_paths
from ..reading.runs import RunReader
from .plotting import load_plotly, make_chart
from .refreshing import QUIET, Parts, make_html, show_if_any

_REFRESH_S = 4.0
_MOST_RUNS = 12
_MOST_METRICS = 6
_MOST_POINTS = 500
_FIRST_METRICS = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_s")
_UNCHARTED = ("time", "step", "epoch")
_AXES = {"step": "step", "time": "minutes", "tokens": "tokens"}
_NO_BASELINE = ""
# What is compared stands in the address, so that a reload or a bookmark shows the same.
_KEEP = """(runs, metrics, axis, baseline) => {
  const words = new URLSearchParams({runs: runs.join(','), metric: metrics.join(','), over: axis});
  if (baseline) words.set('baseline', baseline);
  history.replaceState(history.state, '', location.pathname + '?' + words);
}"""


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
        metrics = gr.Dropdown(
            list(_FIRST_METRICS),
            value=["loss"],
            multiselect=True,
            max_choices=_MOST_METRICS,
            allow_custom_value=True,  # of an address too
            label="Metrics",
            min_width=200,
        )
        baseline = gr.Dropdown(
            [("none", _NO_BASELINE)], value=_NO_BASELINE, allow_custom_value=True, label="Baseline", min_width=160
        )
        axis = gr.Radio(list(_AXES), value="step", label="Over", min_width=160)
        smoothing = gr.Slider(0, 0.99, 0.6, step=0.01, label="Smoothing", min_width=200)
        is_log = gr.Checkbox(label="Logarithmic axis", min_width=140)
    said = make_html(visible=False)
    with gr.Column(visible=False) as body:
        plots = [make_chart("Curves", visible=False) for _ in range(_MOST_METRICS)]
        ends = make_html()
        make_html("<h2>Options that differ</h2>")
        options = make_html()
    charts = {f"plot {number}": plot for number, plot in enumerate(plots)}
    parts = Parts(
        runs=runs, metrics=metrics, baseline=baseline, said=said, body=body, ends=ends, options=options, **charts
    )

    def refresh(
        seen: str,
        names: list[str],
        chosen: list[str],
        baseline: str | None,
        axis: str,
        smoothing: float,
        is_log: bool,
    ) -> dict[Any, Any]:
        values: dict[str, Any] = {"runs": gr.update(choices=[row.name for row in context.runs.list_with_jobs()])}
        readers, problems = _find_readers(context, names)
        values["baseline"] = gr.update(choices=[("none", _NO_BASELINE), *((one.name, one.name) for one in readers)])
        values["body"] = gr.update(visible=bool(readers))
        if readers:
            found = sorted({name for reader in readers for name in reader.series_names()} - {*_UNCHARTED})
            choices = [name for name in _FIRST_METRICS if name in found]
            choices += [name for name in found if name not in choices]
            values["metrics"] = gr.update(choices=choices)
            chosen = chosen[:_MOST_METRICS]
            for number in range(_MOST_METRICS):
                values[f"plot {number}"] = gr.update(visible=False)
            for number, metric in enumerate(chosen):
                curves = [curve for reader in readers if (curve := _read_curve(reader, metric, axis, smoothing))]
                revision = f"{axis} {metric}"
                figure = draw_curves(curves, _AXES[axis], metric.replace("_", " "), is_log, revision)
                values[f"plot {number}"] = gr.update(value=figure.to_json(), visible=True)
                missing = [reader.name for reader in readers if metric not in reader.series_names()]
                problems += [f"{name} has no {metric} (yet)." for name in missing]
            ordered = sorted(readers, key=lambda reader: reader.name != baseline)  # the baseline first
            values["ends"] = join(draw_ends(ordered, metric, baseline) for metric in chosen)
            values["options"] = draw_differences(ordered, baseline)
            if not chosen:
                problems.append("Choose a metric to see its curves.")
        else:
            problems.append("Choose two or more runs to see their curves and the options that differ.")
        values["said"] = show_if_any(join(note(problem) for problem in problems))
        return parts.send(seen, values)

    def arrive(request: gr.Request) -> list[Any]:
        names = _read_list(request, "runs")
        over = request.query_params.get("over", "")
        return [
            gr.update(choices=[row.name for row in context.runs.list_with_jobs()], value=names),
            _read_list(request, "metric")[:_MOST_METRICS] or ["loss"],
            over if over in _AXES else "step",
            request.query_params.get("baseline", _NO_BASELINE),
        ]

    compared = [runs, metrics, axis, baseline]
    asked = parts.refresh_by(timer, refresh, [runs, metrics, baseline, axis, smoothing, is_log])
    gr.on(None, arrive, None, compared, **QUIET).then(**asked)
    for component in compared:
        component.input(None, compared, None, js=_KEEP, **QUIET).then(**asked)
    smoothing.change(**asked)
    is_log.change(**asked)


def _read_list(request: gr.Request, name: str) -> list[str]:
    """Return what an address gives once or several times, each time one word or several with commas between."""
    params = request.query_params
    words = params.getlist(name) if hasattr(params, "getlist") else []
    return list(dict.fromkeys(one for word in words for one in word.split(",") if one))


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
    return Curve(reader.name, xs.tolist(), values, smoothed if smoothing and is_noisy(metric) else ())


def draw_ends(readers: Sequence[RunReader], metric: str, baseline: str | None = None) -> Markup:
    """Return each run's last, lowest and highest value of a metric, and by how much the last differs from a baseline's.

    Args:
        baseline: the name of one of the runs.
    """
    known_by_name = {reader.name: _read_known(reader, metric) for reader in readers}
    base = known_by_name.get(baseline or "")
    rows = []
    for reader in readers:
        summary = reader.summary()
        known = known_by_name[reader.name]
        name = join((link("run", reader.name, name=reader.name), " ", badge(summary.state)))
        times = reader.series(["time"], _MOST_POINTS).get("time", ([], [], []))[1]
        lived = show_duration(times[-1] - times[0]) if times else NONE
        ends: tuple[str, ...] = (NONE, NONE, NONE)
        if known:
            ends = (show_number(known[-1][0]), _show_at(min(known)), _show_at(max(known)))
        if base is not None:
            ends = (ends[0], _show_difference(known, base, reader.name == baseline), *ends[1:])
        rows.append((name, *ends, show_number(summary.eval_loss), show_count(summary.step), lived))
    what = metric.replace("_", " ")
    against = () if base is None else ("against the baseline",)
    headers = (
        "run",
        f"last {what}",
        *against,
        f"lowest {what}",
        f"highest {what}",
        "last eval loss",
        "step",
        "trained for",
    )
    return table(headers, rows, f"{what} of each run", class_="cards")


def _read_known(reader: RunReader, metric: str) -> list[tuple[float, float]]:
    """Return the finite values of a metric, each with its step."""
    xs, ys, _ = reader.series([metric], _MOST_POINTS).get(metric, ([], [], []))
    return [(y, x) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]


def _show_difference(known: Sequence[tuple[float, float]], base: Sequence[tuple[float, float]], is_base: bool) -> str:
    if is_base:
        return "baseline"
    if not known or not base:
        return NONE
    difference = known[-1][0] - base[-1][0]
    share = f" ({100 * difference / abs(base[-1][0]):+.1f} %)" if base[-1][0] else ""
    sign = "+" if difference >= 0 else "\u2212"
    return f"{sign}{show_number(abs(difference))}{share}"


def draw_differences(readers: Sequence[RunReader], baseline: str | None = None) -> Markup:
    """Return the options whose values differ between the runs; those that differ from the baseline's in bold.

    Args:
        baseline: the name of the first of the runs; another name means none.
    """
    if len(readers) < 2:
        return note("Choose another run to compare with.")
    has_baseline = readers[0].name == baseline
    rows = [
        (option, *(_mark(_show_value(value), has_baseline and value != values[0]) for value in values))
        for option, values in differences(readers)
    ]
    if not rows:
        return note("All options are the same.")
    headers = ("option", *(reader.name for reader in readers))
    return table(headers, rows, "Options that differ", num_text=len(headers), class_="cards")


def _mark(text: str, is_other: bool) -> str:
    return tag("strong", text) if is_other else text


def _show_at(found: tuple[float, float]) -> str:
    return f"{show_number(found[0])} at {show_count(found[1])}"


def _show_value(value: Any) -> str:
    return NONE if value is None else show_paths(str(value))
