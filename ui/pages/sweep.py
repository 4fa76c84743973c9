"""The page "Sweep": the jobs of one sweep against each other, and the buttons for all of them and for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError, UserError

from ..app_context import AppContext
from ..drawing.charts import Curve, draw_curves
from ..drawing.job_chart import draw_parallel
from ..drawing.markup import note
from ..reading.metrics import is_noisy
from ..reading.sweeps import JobRow, is_sweep
from ..running import control
from . import run_controls, run_figures, run_markup, sweep_markup
from .plotting import load_plotly, make_chart
from .refreshing import QUIET, Parts, make_html, show_if_any
from .titles import make_title

_LIVE_S = 2.0
_OVER_S = 15.0
_MOST_POINTS = 300
_MOST_CURVES = 24  # of the best jobs: more cannot be told apart
_FIRST_METRICS = ("eval_loss", "loss", "learning_rate", "grad_norm")
_UNCHARTED = ("time", "step", "epoch")
_STOP = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-stop]');
  if (!button) return;
  button.disabled = true;
  trigger('stop', {job: button.dataset.stop});
});
"""


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    name = gr.Textbox(visible=False)
    timer = gr.Timer(_LIVE_S)
    load_plotly()
    title = make_title()
    missing = make_html(visible=False)
    said = make_html(visible=False)
    with gr.Column(visible=False) as body:
        header = make_html()
        progress = make_html()
        controls = run_controls.Controls(context, name)
        alerts = make_html(visible=False)
        best = make_html()
        jobs = make_html(js_on_load=_STOP)
        with gr.Row():
            metric = gr.Dropdown(
                list(_FIRST_METRICS), value="loss", label="Metric", allow_custom_value=True, min_width=200
            )
            smoothing = gr.Slider(0, 0.99, 0.6, step=0.01, label="Smoothing", min_width=200)
        curves = make_chart("Curves")
        parallel = make_chart("Options against the result")
    parts = Parts(
        timer=timer, missing=missing, body=body, title=title, header=header, progress=progress, alerts=alerts,
        best=best, jobs=jobs, metric=metric, curves=curves, parallel=parallel, **controls.parts,
    )  # fmt: skip

    def refresh(seen: str, name: str, pressed: str, metric: str, smoothing: float) -> dict[Any, Any]:
        if not name:
            return gr.skip()
        try:
            reader = context.runs.get(name)
            rows = context.runs.list_jobs(name)
            if not is_sweep(reader.folder):
                raise ConfigError(f"{name} is no sweep")
            summary = reader.summary()
            values: dict[str, Any] = {
                "timer": gr.update(value=_LIVE_S if summary.is_live else _OVER_S),
                "missing": gr.update(visible=False),
                "body": gr.update(visible=True),
                "title": run_figures.write_title(summary),
                "header": run_markup.draw_header(summary),
                "progress": run_markup.draw_progress(summary, reader.progress()),
                "alerts": show_if_any(run_markup.draw_alerts(reader.alerts())),
                "best": sweep_markup.draw_best(rows, context.root),
                "jobs": sweep_markup.draw_jobs(rows),
                "parallel": draw_parallel(rows),
            }
            values |= run_controls.show_controls(context, reader, summary, pressed)
            values |= _show_curves(context, rows, metric, smoothing)
        except ConfigError:
            values = {"missing": show_if_any(run_markup.draw_missing(name)), "body": gr.update(visible=False)}
        return parts.send(seen, values, pressed)

    def arrive(request: gr.Request) -> list[Any]:
        asked_for = request.query_params.get("name", "")
        return [asked_for, gr.skip() if asked_for else show_if_any(run_markup.draw_missing(""))]

    def stop(name: str, event: gr.EventData) -> dict[str, Any]:
        try:
            control.stop_run(context.root, f"{name}/{event.job}")
        except UserError as error:
            return show_if_any(note(str(error), "error"))
        return show_if_any(note(f"{event.job} saves a checkpoint at its next step, then ends; the others continue."))

    asked = parts.refresh_by(timer, refresh, [name, controls.pressed, metric, smoothing])
    gr.on(None, arrive, None, [name, missing], **QUIET).then(**asked)
    metric.input(**asked)
    smoothing.change(**asked)
    jobs.stop(stop, name, said, **QUIET).then(**asked)
    controls.connect(asked)


def _show_curves(context: AppContext, rows: Sequence[JobRow], metric: str, smoothing: float) -> dict[str, Any]:
    """Return the choices of metrics, and the curves of the best jobs over each other."""
    curves, names = [], set()
    for job in [job for job in rows if job.summary is not None][:_MOST_CURVES]:
        reader = context.runs.get(job.run)
        names |= {*reader.series_names()}
        for xs, ys, smoothed in reader.series([metric], _MOST_POINTS, smoothing).values():
            curves.append(Curve(job.name, xs, ys, smoothed if smoothing and is_noisy(metric) else ()))
    found = sorted(names - {*_UNCHARTED})
    choices = [one for one in _FIRST_METRICS if one in found]
    choices += [one for one in found if one not in choices]
    figure = draw_curves(curves, "step", metric.replace("_", " "), revision=metric)
    return {"metric": gr.update(choices=choices or list(_FIRST_METRICS)), "curves": figure}
