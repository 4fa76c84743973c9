"""The page "Run": the progress of one run, rank by rank, and the buttons that stop, save, resume and delete it."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Literal

import gradio as gr

from lorashard.errors import ConfigError

from ..app_context import AppContext
from ..drawing.charts import Curve, draw_bars, draw_curves
from ..drawing.markup import join
from ..reading.runs import RunReader
from ..reading.states import LAUNCHER_LOG
from . import run_controls, run_markup
from .log_box import make_log
from .plotting import load_plotly, make_chart
from .refreshing import QUIET, Parts, make_html, show_if_any
from .run_markup import ALL_PROMPTS

_LIVE_S = 2.0
_OVER_S = 15.0
_MOST_POINTS = 500
_LAUNCHER: Literal["launcher"] = "launcher"
_CHARTS = {  # of a part's name: the series, the label
    "loss": (("loss", "eval_loss"), "Loss"),
    "learning_rate": (("learning_rate",), "Learning rate"),
    "grad_norm": (("grad_norm",), "Gradient norm"),
    "tokens_per_s": (("tokens_per_s",), "Tokens per second"),
}
_NOISY = ("loss", "grad_norm", "tokens_per_s")  # the others are not smoothed


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    name = gr.Textbox(visible=False)
    shown = gr.Textbox(visible=False, value="curves")  # the tab
    timer = gr.Timer(_LIVE_S)
    load_plotly()
    missing = make_html(visible=False)
    with gr.Column(visible=False) as body:
        header = make_html()
        alerts = make_html(visible=False)
        progress = make_html()
        controls = run_controls.Controls(context, name)
        with gr.Tabs():
            with gr.Tab("Curves", id="curves") as curves_tab:
                with gr.Row():
                    smoothing = gr.Slider(
                        0, 0.99, 0.6, step=0.01, label="Smoothing", info="0 shows the values as logged"
                    )
                    is_log = gr.Checkbox(label="Logarithmic loss axis")
                plots = {"loss": make_chart("Loss")}
                with gr.Row():
                    for key, (_, label) in list(_CHARTS.items())[1:]:
                        with gr.Column(min_width=300):
                            plots[key] = make_chart(label)
            with gr.Tab("Ranks", id="ranks") as ranks_tab:
                ranks = make_html()
                with gr.Row():
                    with gr.Column(min_width=300):
                        memory = make_chart("Memory per rank")
                    with gr.Column(min_width=300):
                        waits = make_chart("Time waiting for gathers")
            with gr.Tab("Logs", id="logs") as logs_tab:
                with gr.Row():
                    log_of = gr.Dropdown([], value=None, label="Log of", min_width=140, scale=1)
                    query = gr.Textbox(
                        label="Search", placeholder="only lines that contain this", min_width=200, scale=3
                    )
                    follow = gr.Checkbox(value=True, label="Follow", min_width=100, scale=1)
                log = make_log()
            with gr.Tab("Samples", id="samples") as samples_tab:
                prompt = gr.Dropdown([ALL_PROMPTS], value=ALL_PROMPTS, label="Prompt")
                samples = make_html()
            with gr.Tab("Set-up", id="setup") as setup_tab:
                checkpoints = make_html()
                config = gr.Code(language="yaml", label="Options", interactive=False, lines=8, max_lines=30)
    parts = Parts(
        timer=timer, missing=missing, body=body, header=header, alerts=alerts, progress=progress,
        ranks=ranks, memory=memory, waits=waits, log_of=log_of, log=log, prompt=prompt, samples=samples,
        checkpoints=checkpoints, config=config, **controls.parts, **plots,
    )  # fmt: skip

    inputs = [parts.seen, name, shown, controls.pressed, smoothing, is_log, log_of, query, follow, prompt]

    def refresh(
        seen: str,
        name: str,
        tab: str,
        pressed: str,
        smoothing: float,
        is_log: bool,
        log_of: str | None,
        query: str,
        follow: bool,
        prompt: str,
        is_asked: bool = False,
    ) -> dict[Any, Any]:
        if not name:
            return gr.skip()
        try:
            reader = context.runs.get(name)
            values = _show_top(context, reader, pressed)
            if tab == "curves":
                values |= _show_curves(reader, smoothing, is_log)
            elif tab == "ranks":
                values |= _show_ranks(reader)
            elif tab == "logs" and (follow or is_asked):
                values |= _show_log(reader, log_of, query)
            elif tab == "samples":
                values |= _show_samples(reader, prompt)
            elif tab == "setup":
                values |= {"checkpoints": run_markup.draw_checkpoints(reader.checkpoints())}
                values |= {"config": reader.config_yaml()}
        except ConfigError:
            values = {"missing": show_if_any(run_markup.draw_missing(name)), "body": gr.update(visible=False)}
        return parts.send(seen, values)

    asked = {"fn": partial(refresh, is_asked=True), "inputs": inputs, "outputs": parts.outputs} | QUIET

    def read_name(request: gr.Request) -> tuple[str, Any]:
        asked_for = request.query_params.get("name", "")
        return asked_for, gr.skip() if asked_for else show_if_any(run_markup.draw_missing(""))

    gr.on(None, read_name, None, [name, missing], **QUIET).then(**asked)
    timer.tick(refresh, inputs, parts.outputs, **QUIET)
    tabs = {"curves": curves_tab, "ranks": ranks_tab, "logs": logs_tab, "samples": samples_tab, "setup": setup_tab}
    for key, tab in tabs.items():
        tab.select(None, None, shown, js=f"() => '{key}'", show_progress="hidden").then(**asked)
    smoothing.change(**asked)
    is_log.change(**asked)
    log_of.input(**asked)
    query.change(**asked)
    prompt.input(**asked)
    controls.connect(asked)


def _show_top(context: AppContext, reader: RunReader, pressed: str) -> dict[str, Any]:
    summary = reader.summary()
    return {
        "timer": gr.update(value=_LIVE_S if summary.is_live else _OVER_S),
        "missing": gr.update(visible=False),
        "body": gr.update(visible=True),
        "header": run_markup.draw_header(summary),
        "alerts": show_if_any(run_markup.draw_alerts(summary, reader.alerts())),
        "progress": run_markup.draw_progress(summary, reader.progress()),
    } | run_controls.show_controls(context, reader, summary, pressed)


def _show_curves(reader: RunReader, smoothing: float, is_log: bool) -> dict[str, Any]:
    series = reader.series([name for names, _ in _CHARTS.values() for name in names], _MOST_POINTS, smoothing)
    figures = {}
    for key, (names, _) in _CHARTS.items():
        curves = [
            Curve(name.replace("_", " "), xs, ys, smoothed if smoothing and name in _NOISY else ())
            for name, (xs, ys, smoothed) in series.items()
            if name in names and len(xs)
        ]
        figures[key] = draw_curves(curves, "step", "", is_log and key == "loss", reader.name, key == "tokens_per_s")
    return figures


def _show_ranks(reader: RunReader) -> dict[str, Any]:
    rows = reader.ranks()
    planned = [row.planned_bytes for row in rows if row.planned_bytes]
    bars = {
        "now": [row.memory_bytes and row.memory_bytes / 2**30 for row in rows],
        "peak": [row.peak_bytes and row.peak_bytes / 2**30 for row in rows],
    }
    is_on_cpu = any(row.cpu_percent is not None for row in rows)
    name = "planned, without libraries" if is_on_cpu else "planned"
    line = (name, max(planned) / 2**30) if planned else None
    waits = [Curve(f"rank {rank}", xs, ys) for rank, (xs, ys) in reader.rank_series("wait_s", _MOST_POINTS).items()]
    return {
        "ranks": run_markup.draw_ranks(rows, time.time(), reader.summary().is_live),
        "memory": draw_bars([row.rank for row in rows], bars, line, "GiB"),
        "waits": draw_curves(waits, "step", "seconds, total", revision=reader.name, is_from_zero=True),
    }


def _show_log(reader: RunReader, log_of: str | None, query: str) -> dict[str, Any]:
    choices = [(f"rank {row.rank}", str(row.rank)) for row in reader.ranks()]
    if (reader.folder / LAUNCHER_LOG).exists():  # a run that was started by hand has none
        choices.insert(0, (_LAUNCHER, _LAUNCHER))
    if log_of not in [word for _, word in choices]:
        log_of = choices[0][1] if choices else None
    text, empty = "", "The log is empty."
    if log_of is not None:
        try:
            text = reader.log(_LAUNCHER if log_of == _LAUNCHER else int(log_of), query)
        except ConfigError as error:
            empty = str(error)
        if query and not text:
            empty = f"No line contains \u201c{query}\u201d."
    return {"log_of": gr.update(choices=choices, value=log_of), "log": join([text or empty])}


def _show_samples(reader: RunReader, prompt: str) -> dict[str, Any]:
    samples = reader.samples()
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    return {
        "prompt": gr.update(choices=[ALL_PROMPTS, *prompts]),
        "samples": run_markup.draw_samples(samples, prompt),
    }
