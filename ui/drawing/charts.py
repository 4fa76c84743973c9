"""Curves and bars as Plotly figures that read on light and dark pages and can be told apart without color."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

# Okabe and Ito's colors, which color-blind people tell apart; the bright ones darker, for three to one on white.
_COLORS = ("#0072B2", "#D55E00", "#009068", "#C0659A", "#A87400", "#3A94C6")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_FEW_POINTS = 40  # up to here each point has a marker: a line of one point is invisible
TEXT = "#7a7a7a"  # of lines; text takes the page's color when it is drawn
_GRID = "rgba(128,128,128,0.18)"
_HEIGHT = 280
_SMALL = 0.01  # below, as a learning rate is, 1e-4 reads better than 100\u00b5
_FEW_STEPS = 10  # up to here Plotly would put ticks between whole steps
_LEGEND_HEIGHT = 12  # for each curve; on a phone each name takes a line


@dataclass(frozen=True)
class Curve:
    """One curve: its name, its points, and the same smoothed, or empty where it is not."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    smoothed: Sequence[float] = ()


def draw_curves(
    curves: Sequence[Curve],
    x_title: str,
    y_title: str,
    is_log: bool = False,
    revision: str = "",
    is_from_zero: bool = False,
    span: tuple[float, float] | None = None,
) -> go.Figure:
    """Draw curves in one chart; with a smoothed curve, the raw one is faint.

    Args:
        x_title: `step` is counted in whole numbers.
        is_log: a logarithmic y axis; values without a logarithm are left out.
        revision: while it stays the same, so do the user's zoom and choice of curves.
        is_from_zero: the y axis begins at zero.
        span: the first and the last x that the user looks at; None: all.
    """
    traces = [trace for number, curve in enumerate(curves) for trace in _trace_curve(curve, number)]
    figure = go.Figure(traces, _lay_out(x_title, y_title, revision))
    if not any(len(curve.xs) for curve in curves):
        _show_no_data(figure)
    ends = span or [end(curve.xs) for curve in curves if len(curve.xs) for end in (min, max)]
    if x_title == "step":
        figure.update_xaxes(hoverformat=",d")
        if ends and max(ends) - min(ends) <= _FEW_STEPS:
            figure.update_xaxes(dtick=1, tick0=0)
    if all(abs(y) < _SMALL for curve in curves for y in curve.ys if math.isfinite(y)):
        figure.update_yaxes(exponentformat="e")
    if is_from_zero:
        figure.update_yaxes(rangemode="tozero")
    if len(curves) > 1:
        figure.update_layout(showlegend=True, height=_HEIGHT + _LEGEND_HEIGHT * len(curves))
    if is_log:
        # The zoom is kept in the axis's values, logarithms here, so it cannot survive the change.
        figure.update_yaxes(type="log", uirevision=f"{revision} log", exponentformat="power")
    return figure


def draw_bars(
    ranks: Sequence[int], bars: Mapping[str, Sequence[float | None]], line: tuple[str, float] | None, y_title: str
) -> go.Figure:
    """Draw bars for each rank, side by side, and a line across all of them.

    Args:
        bars: by name, a value for each rank.
        line: its name and height.
    """
    names = [f"rank {rank}" for rank in ranks]
    traces: list[go.Bar | go.Scatter] = [
        go.Bar(
            x=names,
            y=values,
            name=name,
            marker={"color": _COLORS[number]},
        )
        for number, (name, values) in enumerate(bars.items())
    ]
    figure = go.Figure(traces, _lay_out("", y_title, "bars"))
    figure.update_layout(showlegend=True, barmode="group", bargap=0.3)
    if line is not None:
        figure.add_hline(y=line[1], line={"color": TEXT, "dash": "dash"})
        # Its name is in the legend: next to the line it would cover the bars.
        figure.add_scatter(x=[None], y=[None], name=line[0], mode="lines", line={"color": TEXT, "dash": "dash"})
        # A line of the layout does not count when the axis is fitted.
        highest = max((value for values in bars.values() for value in values if value is not None), default=0.0)
        figure.update_yaxes(range=[0, 1.15 * max(highest, line[1])])
    if not any(value is not None for values in bars.values() for value in values):
        _show_no_data(figure)
    return figure


def _show_no_data(figure: go.Figure) -> None:
    """Show a message in place of the axes, whose values would mean nothing."""
    figure.add_annotation(
        text="Nothing logged yet", showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font_size=14
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.update_layout(height=_HEIGHT // 2)


def _trace_curve(curve: Curve, number: int) -> list[go.Scatter]:
    color = _COLORS[number % len(_COLORS)]
    dash = _DASHES[(number + number // len(_COLORS)) % len(_DASHES)]  # no two of 30 curves look alike
    marker = {"symbol": _MARKERS[number % len(_MARKERS)], "size": 6}
    is_smoothed = len(curve.smoothed) > 0
    xs = np.asarray(curve.xs, dtype=np.float64)
    common = {"x": xs, "legendgroup": curve.name, "connectgaps": False}
    mode = "lines+markers" if len(xs) <= _FEW_POINTS else "lines"
    raw = go.Scatter(
        y=np.asarray(curve.ys, dtype=np.float32),
        name=curve.name,
        hovertemplate=f"{html.escape(curve.name)}: %{{y:.5g}}<extra></extra>",
        mode="lines" if is_smoothed else mode,
        line={"color": color, "width": 1 if is_smoothed else 2, "dash": dash if not is_smoothed else "solid"},
        marker=marker,
        opacity=0.35 if is_smoothed else 1,
        showlegend=not is_smoothed,
        **common,
    )
    if not is_smoothed:
        return [raw]
    smoothed = go.Scatter(
        y=np.asarray(curve.smoothed, dtype=np.float32),
        name=curve.name,
        hovertemplate=f"{html.escape(curve.name)}, smoothed: %{{y:.5g}}<extra></extra>",
        mode=mode,
        line={"color": color, "width": 2.5, "dash": dash},
        marker=marker,
        **common,
    )
    return [raw, smoothed]


def lay_out(x_axis: dict[str, Any], y_axis: dict[str, Any], **properties: Any) -> dict[str, Any]:
    """Return a layout that reads on light and on dark pages.

    Args:
        x_axis, y_axis: of Plotly's axes, more than all charts have.
        properties: of Plotly's layout, likewise.
    """
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": _GRID, "automargin": True}
    return {
        "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": TEXT, "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {"bgcolor": "#333", "bordercolor": "#333", "font": {"color": "#fff"}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": TEXT, "activecolor": TEXT},
        "xaxis": axis | {"showgrid": False} | x_axis,
        "yaxis": axis | y_axis,
    } | properties


def _lay_out(x_title: str, y_title: str, revision: str) -> dict[str, Any]:
    return lay_out(
        {"title": {"text": x_title, "standoff": 6}},
        {"title": {"text": y_title}},
        height=_HEIGHT,
        margin={"l": 56, "r": 12, "t": 12, "b": 48},
        hovermode="x unified",
        showlegend=False,
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        uirevision=revision or "constant",
    )
