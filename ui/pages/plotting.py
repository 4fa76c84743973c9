"""Charts that keep the user's zoom while new points arrive.

`gr.Plot` draws a new chart for each new value: the zoom is lost every time, and the page flickers. So a chart is a
`gr.HTML` here whose script hands each new figure to the Plotly that Gradio has loaded for a `gr.Plot`. The script also
takes the colors of text from the page, because no gray reads both on white and on black.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import gradio as gr
import plotly.graph_objects as go

from ..drawing.markup import tag

# Colors of curves that are too dark on black, and their replacements there.
_VERDICTS_ON_BLACK = {"#15803D": "#4ADE80", "#B45309": "#FBBF24", "#B91C1C": "#FCA5A5"}
_ON_BLACK = {"#0072B2": "#3E9BDC", "#3A94C6": "#9AD3F5", **_VERDICTS_ON_BLACK}

CLASSES = ("markup", "chart-block")

# A chart's value is a figure; that of several charts a label and a figure by name, and charts come and go with it.
_SCRIPT = """
const onBlack = ON_BLACK;
const grid = element.querySelector('.chart-grid');
const canHover = matchMedia('(hover: hover)').matches;
const config = {
  responsive: true, displaylogo: false, displayModeBar: canHover ? 'hover' : false,
  modeBarButtonsToRemove: ['select2d', 'lasso2d', 'zoomIn2d', 'zoomOut2d', 'autoScale2d'],
};
// Drawn in a tab that is not shown, a chart has no width yet.
const sizes = new ResizeObserver((entries) => {
  for (const {target} of entries) if (target.data && target.offsetWidth) window.Plotly.Plots.resize(target);
});
const addFrame = (name) => {
  const frame = document.createElement('figure');
  frame.className = 'chart-frame';
  frame.dataset.name = name;
  frame.append(document.createElement('figcaption'), document.createElement('div'));
  frame.lastChild.className = 'chart';
  return frame;
};
const drawOne = (frame, figure, name) => {
  const box = frame.querySelector('.chart');
  const styles = getComputedStyle(box);
  figure.layout.font.color = styles.getPropertyValue('--body-text-color-subdued').trim() || styles.color;
  const isNew = !box.data;
  window.Plotly.react(box, figure.data, figure.layout, config);
  if (!isNew) return;
  sizes.observe(box);
  // A bar that is clicked answers the question whose choices stand in the bars' order.
  const choices = figure.layout.meta?.clicks;
  if (choices) box.on('plotly_click', ({points}) => {
    document.querySelectorAll(choices + ' input')[points[0].pointIndex]?.click();
  });
  box.on('plotly_relayout', (change) => {
    const isWhole = change['xaxis.autorange'] === true;
    if (!isWhole && !Object.keys(change).some((key) => key.startsWith('xaxis.range'))) return;
    trigger('zoom', {name, span: isWhole ? null : box.layout.xaxis.range.map(Number)});
  });
};
const draw = () => {
  if (!props.value || !element.isConnected) return;
  if (!window.Plotly) { setTimeout(draw, 100); return; }
  let value = props.value;
  if (document.body.classList.contains('dark')) {
    for (const [color, brighter] of Object.entries(onBlack)) value = value.replaceAll(color, brighter);
  }
  const found = JSON.parse(value);
  if (!grid) { drawOne(element.querySelector('.chart-frame'), found, ''); return; }
  for (const frame of [...grid.children]) {
    if (frame.dataset.name in found) continue;
    window.Plotly.purge(frame.lastChild);
    frame.remove();
  }
  Object.entries(found).forEach(([name, {label, figure}], place) => {
    const frame = [...grid.children].find((one) => one.dataset.name === name) ?? addFrame(name);
    if (grid.children[place] !== frame) grid.insertBefore(frame, grid.children[place] ?? null);
    frame.firstChild.textContent = label;
    drawOne(frame, figure, name);
  });
};
watch('value', draw);
// Gradio changes the theme first.
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => setTimeout(draw, 100));
draw();
""".replace("ON_BLACK", json.dumps(_ON_BLACK))


def load_plotly() -> None:
    """Have the page that is being built load what draws its charts."""
    gr.Plot(go.Figure(), visible="hidden")


def make_chart(label: str, **properties: Any) -> gr.HTML:
    """Return a chart, whose value is a figure as JSON."""
    return _make(tag("figure", tag("figcaption", label), tag("div", class_="chart"), class_="chart-frame"), properties)


def make_charts(**properties: Any) -> gr.HTML:
    """Return a grid of charts, whose value `write_charts` makes.

    Its event `zoom` has the `name` of a chart and its `span`: the first and the last x, or null for all of it.
    """
    return _make(tag("div", class_="chart-grid"), properties)


def write_charts(charts: Mapping[str, tuple[str, go.Figure]]) -> str:
    """Return the value of a grid of charts.

    Args:
        charts: by name, a label and a figure; the grid has this order.
    """
    figures = [
        f'{json.dumps(name)}: {{"label": {json.dumps(label)}, "figure": {figure.to_json()}}}'
        for name, (label, figure) in charts.items()
    ]
    return "{" + ", ".join(figures) + "}"


def _make(template: str, properties: Mapping[str, Any]) -> gr.HTML:
    return gr.HTML(
        html_template=template, js_on_load=_SCRIPT, apply_default_css=False, elem_classes=list(CLASSES),
        **properties,
    )  # fmt: skip
