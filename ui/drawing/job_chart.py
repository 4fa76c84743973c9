"""The options in which the jobs of a sweep differ against their result, as parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ..reading.comparing import show_option
from ..reading.sweeps import JobRow
from .charts import TEXT, lay_out

# From Viridis, without its ends, which are too faint on white and on black.
_SCALE = [[0.0, "#287c8e"], [0.5, "#3fa06f"], [1.0, "#b08d00"]]
_LOG_RATIO = 20.0  # numbers that span more than this stand on a logarithmic axis
_HEIGHT = 320


def draw_parallel(jobs: Sequence[JobRow]) -> go.Figure:
    """Draw a line for each job that has a value, through an axis for each of the options and one for the result."""
    known = [job for job in jobs if job.value is not None]
    names = list(dict.fromkeys(name for job in jobs for name in job.options))
    axes = [_build_axis(name, [job.options.get(name) for job in known]) for name in names]
    values = [job.value or 0.0 for job in known]
    metric = known[0].metric.replace("_", " ") if known else "result"
    axes.append({"label": metric, "values": values})
    line = {"color": values, "colorscale": _SCALE, "showscale": False}
    trace = go.Parcoords(dimensions=axes if known else [], line=line, labelangle=0, labelside="top")
    figure = go.Figure([trace] if known else [], lay_out({"visible": False}, {"visible": False}, height=_HEIGHT))
    figure.update_layout(margin={"l": 70, "r": 50, "t": 50, "b": 24})
    if not known:
        figure.add_annotation(text="No results yet", showarrow=False, font={"color": TEXT})
    return figure


def _build_axis(name: str, given: Sequence[Any]) -> dict[str, Any]:
    """Return an axis with a tick for each value: by its number, where all are numbers, else by its place."""
    if given and all(isinstance(value, int | float) and not isinstance(value, bool) for value in given):
        numbers = [float(value) for value in given]
        is_log = min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RATIO
        places = [math.log10(number) for number in numbers] if is_log else numbers
        shown = dict(sorted(zip(places, (f"{number:g}" for number in numbers), strict=True)))
    else:
        texts = [show_option(value) for value in given]
        order = sorted(set(texts))
        places = [float(order.index(text)) for text in texts]
        shown = dict(enumerate(order))
    return {"label": name, "values": places, "tickvals": list(shown), "ticktext": list(shown.values())}
