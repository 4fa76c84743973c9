"""The page "Run": the progress of one run, rank by rank, and the buttons that stop, save, resume and delete it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gradio as gr

from lorashard.errors import ConfigError

from ..app_context import AppContext
from ..drawing.charts import Curve, draw_bars, draw_curves
from ..drawing.markup import facts, figures, join
from ..drawing.run_facts import describe_placement, list_facts, list_figures
from ..reading.metrics import is_noisy
from ..reading.runs import RunReader
from ..reading.series import Span, to_finite
from ..reading.states import LAUNCHER_LOG
from . import run_controls, run_figures, run_markup
from .log_box import make_log
from .plotting import load_plotly, make_chart, make_charts, write_charts
from .refreshing import QUIET, Parts, make_html, show_if_any
from .run_markup import ALL_PROMPTS
from .titles import make_title

_LIVE_S = 2.0
_OVER_S = 15.0
_MOST_POINTS = 500
_LAUNCHER: Literal["launcher"] = "launcher"
_LABELS = {"grad_norm": "Gradient norm", "tokens_per_s": "Tokens per second", "num_tokens": "Tokens, over all resumes"}
_FIRST_CHARTS = ["loss", "learning_rate", "grad_norm", "tokens_per_s"]
_UNCHARTED = ("time", "step")
_EVAL = "eval_"  # an evaluation's number is drawn beside the training's
# A reload shows the same tab. Before the run's name is known, it is the page that selects a tab, and not a person.
_NOTE_TAB = """(name, shown) => {
  if (!name) return shown;
  const words = new URLSearchParams(location.search);
  words.set('tab', 'KEY');
  history.replaceState(history.state, '', location.pathname + '?' + words);
  return 'KEY';
}"""


def build(context: AppContext) -> None:
    """Add the page's components and events to the page that is being built."""
    name = gr.Textbox(visible=False)
    shown = gr.Textbox(visible=False, value="curves")  # the tab
    timer = gr.Timer(_LIVE_S)
    load_plotly()
    title = make_title()
    missing = make_html(visible=False)
    with gr.Column(visible="hidden") as body:  # in the page, or its tabs could not be chosen before it is shown
        header = make_html()
        figures = make_html()
        progress = make_html()
        controls = run_controls.Controls(context, name)
        alerts = make_html(visible=False)  # below the buttons, which stay where they are
        facts = make_html()
        with gr.Tabs() as all_tabs:
            with gr.Tab("Curves", id="curves") as curves_tab:
                with gr.Row():
                    smoothing = gr.Slider(
                        0, 0.99, 0.6, step=0.01, label="Smoothing", info="0 shows the values as logged", min_width=200
                    )
                    is_log = gr.Checkbox(label="Logarithmic loss axis", min_width=180)
                shown_charts = gr.Dropdown(
                    _FIRST_CHARTS,
                    value=_FIRST_CHARTS,
                    multiselect=True,
                    allow_custom_value=True,  # the choices come with the run
                    label="Charts",
                    info="Choose from everything that the run has logged",
                )
                charts = make_charts()
                zooms = gr.Textbox(visible=False, value="{}")
            with gr.Tab("Ranks", id="ranks") as ranks_tab:
                ranks = make_html()
                with gr.Row():
                    with gr.Column(min_width=300):
                        memory = make_chart("Memory per rank")
                    with gr.Column(min_width=300):
                        shares = make_chart("Share of the time waiting for gathers")
                waits = make_chart("Time waiting for gathers")
            with gr.Tab("Logs", id="logs") as logs_tab:
                with gr.Row():
                    log_of = gr.Dropdown([], value=None, label="Log of", min_width=140, scale=1)
                    query = gr.Textbox(
                        label="Search", placeholder="only lines that contain this", min_width=200, scale=3
                    )
                    follow = gr.Checkbox(value=True, label="Follow", min_width=100, scale=1)
                log = make_log()
                log_shown = gr.Textbox(visible=False)  # which log that is
            with gr.Tab("Samples", id="samples") as samples_tab:
                prompt = gr.Dropdown([ALL_PROMPTS], value=ALL_PROMPTS, label="Prompt")
                samples = make_html()
            with gr.Tab("Set-up", id="setup") as setup_tab:
                make_html("<h2>Options that differ from the defaults</h2>")
                chosen = make_html()
                checkpoints = make_html()
                config = gr.Code(language="yaml", label="All options", interactive=False, lines=8, max_lines=30)
    parts = Parts(
        timer=timer, missing=missing, body=body, title=title, header=header, figures=figures, progress=progress,
        alerts=alerts, facts=facts, shown_charts=shown_charts, charts=charts, ranks=ranks, memory=memory,
        shares=shares, waits=waits, log_of=log_of, log=log, log_shown=log_shown, prompt=prompt, samples=samples,
        chosen=chosen, checkpoints=checkpoints, config=config, **controls.parts,
    )  # fmt: skip

    inputs = [name, shown, controls.pressed, smoothing, is_log, shown_charts, zooms, log_of, query, follow]
    inputs += [log_shown, prompt]

    def refresh(
        seen: str,
        name: str,
        tab: str,
        pressed: str,
        smoothing: float,
        is_log: bool,
        shown_charts: list[str],
        zooms: str,
        log_of: str | None,
        query: str,
        follow: bool,
        log_shown: str,
        prompt: str,
    ) -> dict[Any, Any]:
        if not name:
            return gr.skip()
        try:
            reader = context.runs.get(name)
            values = _show_top(context, reader, pressed)
            if tab == "curves":
                values |= _show_curves(reader, smoothing, is_log, shown_charts, _read_zooms(zooms))
            elif tab == "ranks":
                values |= _show_ranks(reader)
            elif tab == "logs" and (follow or log_shown != _name_log(log_of, query)):
                values |= _show_log(reader, log_of, query)
            elif tab == "samples":
                values |= _show_samples(reader, prompt)
            elif tab == "setup":
                values |= {"chosen": run_figures.draw_chosen(reader.options())}
                values |= {"checkpoints": run_markup.draw_checkpoints(reader.checkpoints())}
                values |= {"config": reader.config_yaml()}
        except ConfigError:
            values = {"missing": show_if_any(run_markup.draw_missing(name)), "body": gr.update(visible=False)}
        return parts.send(seen, values, pressed)

    asked = parts.refresh_by(timer, refresh, inputs)
    tabs = {"curves": curves_tab, "ranks": ranks_tab, "logs": logs_tab, "samples": samples_tab, "setup": setup_tab}

    def read_address(request: gr.Request) -> list[Any]:
        asked_for, tab = request.query_params.get("name", ""), request.query_params.get("tab", "")
        told = gr.skip() if asked_for else show_if_any(run_markup.draw_missing(""))
        return [asked_for, told, *((tab, gr.update(selected=tab)) if tab in tabs else (gr.skip(), gr.skip()))]

    def zoom(zooms: str, event: gr.EventData) -> str:
        return json.dumps(add_zoom(_read_zooms(zooms), event.name, event.span))

    gr.on(None, read_address, None, [name, missing, shown, all_tabs], **QUIET).then(**asked)
    for key, tab in tabs.items():
        tab.select(None, [name, shown], shown, js=_NOTE_TAB.replace("KEY", key), show_progress="hidden").then(**asked)
    charts.zoom(zoom, zooms, zooms, **QUIET).then(**asked)
    shown_charts.input(**asked)
    smoothing.change(**asked)
    is_log.change(**asked)
    log_of.input(**asked)
    query.change(**asked)
    prompt.input(**asked)
    controls.connect(asked)


def add_zoom(zooms: Mapping[str, Span], name: Any, span: Any) -> dict[str, Span]:
    """Return the spans of the charts that are zoomed, after one has changed.

    Args:
        zooms: by name of a chart.
        name, span: as a browser sends them; a span that is none ends the zoom.
    """
    ends = [number for number in span if to_finite(number) is not None] if isinstance(span, list) else []
    kept = {chart: old for chart, old in zooms.items() if chart != name}
    is_span = isinstance(name, str) and len(ends) == 2
    return kept | {name: (float(min(ends)), float(max(ends)))} if is_span else kept


def _read_zooms(text: str) -> dict[str, Span]:
    return {chart: (begin, end) for chart, (begin, end) in json.loads(text).items()}


def _show_top(context: AppContext, reader: RunReader, pressed: str) -> dict[str, Any]:
    summary, progress = reader.summary(), reader.progress()
    return {
        "timer": gr.update(value=_LIVE_S if summary.is_live else _OVER_S),
        "missing": gr.update(visible=False),
        "body": gr.update(visible=True),
        "title": run_figures.write_title(summary),
        "header": run_markup.draw_header(summary),
        "figures": figures(list_figures(summary, progress, reader.ranks(), reader.num_tokens())),
        "progress": run_markup.draw_progress(summary, progress),
        "alerts": show_if_any(run_markup.draw_alerts(reader.alerts())),
        "facts": facts(list_facts(summary, describe_placement(reader.plan(), reader.options()))),
    } | run_controls.show_controls(context, reader, summary, pressed)


def _show_curves(
    reader: RunReader, smoothing: float, is_log: bool, shown: Sequence[str], zooms: Mapping[str, Span]
) -> dict[str, Any]:
    logged = [name for name in reader.series_names() if name not in _UNCHARTED]
    charts = list(dict.fromkeys(_find_chart(name, logged) for name in logged))
    choices = [name for name in _FIRST_CHARTS if name in charts]
    choices += [name for name in charts if name not in choices]
    drawn = [name for name in shown if name in choices] or ["loss"]
    spans = {name: zooms[chart] for chart in drawn if chart in zooms for name in (chart, _EVAL + chart)}
    series = reader.series([name for chart in drawn for name in (chart, _EVAL + chart)], _MOST_POINTS, smoothing, spans)
    figures = {}
    for chart in drawn:
        curves = [
            Curve(name.replace("_", " "), xs, ys, smoothed if smoothing and is_noisy(name) else ())
            for name, (xs, ys, smoothed) in series.items()
            if name in (chart, _EVAL + chart) and len(xs)
        ]
        is_from_zero = chart in ("tokens_per_s", "num_tokens")
        figure = draw_curves(
            curves, "step", "", is_log and chart == "loss", reader.name, is_from_zero, spans.get(chart)
        )
        figures[chart] = (_LABELS.get(chart, chart.replace("_", " ").capitalize()), figure)
    return {"shown_charts": gr.update(choices=choices or _FIRST_CHARTS), "charts": write_charts(figures)}


def _find_chart(name: str, logged: Sequence[str]) -> str:
    """Return the chart that a number is drawn in: an evaluation's in that of the training's."""
    base = name.removeprefix(_EVAL)
    return base if base in logged else name


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
    shares = {"recently": [row.wait_share and 100 * row.wait_share for row in rows]}
    waits = [Curve(f"rank {rank}", xs, ys) for rank, (xs, ys) in reader.rank_series("wait_s", _MOST_POINTS).items()]
    return {
        "ranks": run_markup.draw_ranks(rows, time.time(), reader.summary().is_live),
        "memory": draw_bars([row.rank for row in rows], bars, line, "GiB"),
        "shares": draw_bars([row.rank for row in rows], shares, None, "%"),
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
    shown = {"log": join([text or empty]), "log_shown": _name_log(log_of, query)}
    return {"log_of": gr.update(choices=choices, value=log_of)} | shown


def _name_log(log_of: str | None, query: str) -> str:
    return f"{log_of} {query}"


def _show_samples(reader: RunReader, prompt: str) -> dict[str, Any]:
    samples = reader.samples()
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    return {
        "prompt": gr.update(choices=[ALL_PROMPTS, *prompts]),
        "samples": run_markup.draw_samples(samples, prompt),
    }
