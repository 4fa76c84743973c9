"""Charts that keep the user's zoom while new points arrive.

`gr.Plot` draws a new chart for each new value: the zoom is lost every time, and the page flickers. So a chart is a
`gr.HTML` here whose script hands each new figure to the Plotly that Gradio has loaded for a `gr.Plot`. The script also
takes the colors of text from the page, because no gray reads both on white and on black.
"""

from __future__ import annotations

import json
from typing import Any

import gradio as gr
import plotly.graph_objects as go

from ..drawing.markup import tag

# Colors of curves that are too dark on black, and their replacements there.
_ON_BLACK = {"#0072B2": "#3E9BDC", "#3A94C6": "#9AD3F5"}

CLASSES = ("markup", "chart-block")

_SCRIPT = """
const onBlack = ON_BLACK;
const box = element.querySelector('.chart');
const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d']};
const draw = () => {
  if (!props.value || !box.isConnected) return;
  if (!window.Plotly) { setTimeout(draw, 100); return; }
  let value = props.value;
  if (document.body.classList.contains('dark')) {
    for (const [color, brighter] of Object.entries(onBlack)) value = value.replaceAll(color, brighter);
  }
  const figure = JSON.parse(value);
  const styles = getComputedStyle(box);
  figure.layout.font.color = styles.getPropertyValue('--body-text-color-subdued').trim() || styles.color;
  window.Plotly.react(box, figure.data, figure.layout, config);
};
// Drawn in a tab that is not shown, a chart has no width yet.
new ResizeObserver(() => { if (box.data && box.offsetWidth) window.Plotly.Plots.resize(box); }).observe(box);
watch('value', draw);
draw();
""".replace("ON_BLACK", json.dumps(_ON_BLACK))


def load_plotly() -> None:
    """Have the page that is being built load what draws its charts."""
    gr.Plot(go.Figure(), visible="hidden")


def make_chart(label: str, **properties: Any) -> gr.HTML:
    """Return a chart, whose value is a figure as JSON."""
    template = tag("figure", tag("figcaption", label), tag("div", class_="chart"), class_="chart-frame")
    return gr.HTML(
        html_template=template, js_on_load=_SCRIPT, apply_default_css=False, elem_classes=list(CLASSES),
        **properties,
    )  # fmt: skip
