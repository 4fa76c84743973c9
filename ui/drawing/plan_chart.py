"""A plan as bars: what each placement takes of a rank's memory, against what there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from .charts import TEXT, lay_out

# Okabe and Ito's colors, each with a pattern.
_PARTS = (
    ("base at rest", "#0072B2", ""),
    ("slots", "#E69F00", "/"),
    ("adapter", "#009E73", "x"),
    ("workspace", "#56B4E9", "\\"),
    ("activations", "#CC79A7", "."),
)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def plan_chart(plan: Mapping[str, Any]) -> go.Figure:
    """Draw a bar for each placement, of one rank, the chosen one first, with a line where its memory ends.

    Args:
        plan: as `Plan.to_json` gives it, and `names` of the placements where they are known.
    """
    chosen = plan["chosen"]
    order = sorted(range(len(plan["rows"])), key=lambda index: index != chosen)
    free_bytes = plan["free_bytes"]
    rows = [plan["rows"][index] for index in order]
    labels = [_label(plan, index) for index in order]
    most_bytes = max([free_bytes, *(row["peak_bytes"] for row in rows)])
    # A small model in a large memory would be a sliver: then the chart is scaled to the model.
    is_tiny = max((row["peak_bytes"] for row in rows), default=0) < free_bytes / 20
    scale_bytes = max(row["peak_bytes"] for row in rows) if is_tiny and rows else most_bytes
    size, unit = next(((size, unit) for size, unit in _UNITS if scale_bytes >= size), (1, "bytes"))
    parts = [_split(row) for row in rows]
    traces = [
        go.Bar(
            y=labels,
            x=[part[number] / size for part in parts],
            name=name,
            orientation="h",
            marker={
                "color": color,
                "pattern": {"shape": pattern, "bgcolor": color, "fgcolor": "white", "size": 7, "solidity": 0.3},
                "line": {"color": "rgba(128,128,128,0.6)", "width": 0.5},
            },
            hovertemplate=f"{name}: %{{x:.2f}} {unit}<extra></extra>",
        )
        for number, (name, color, pattern) in enumerate(_PARTS)
        if any(part[number] for part in parts)
    ]
    if not is_tiny:
        traces.append(
            go.Bar(
                y=labels,
                x=[max(0, free_bytes - row["peak_bytes"]) / size for row in rows],
                name="free",
                orientation="h",
                marker={"color": "rgba(128,128,128,0.12)", "line": {"color": TEXT, "width": 0.5}},
                hovertemplate=f"free: %{{x:.2f}} {unit}<extra></extra>",
            )
        )
    there_is = f"{free_bytes / 2**30:.1f} GiB for each rank"
    figure = go.Figure(traces, _lay_out(len(rows)))
    # Above the bar: on phones a label next to it would leave no room for the bar.
    for label, words in zip(labels, _describe(rows, free_bytes), strict=True):
        figure.add_annotation(
            x=0, y=label, xref="paper", yref="y", text=f"{label}: {words}", showarrow=False, xanchor="left",
            yshift=21, font={"size": 12}, align="left",
        )  # fmt: skip
    if is_tiny:
        figure.update_xaxes(title=f"{unit} of {there_is}")
    else:
        figure.add_vline(x=free_bytes / size, line={"color": "#D55E00", "dash": "dash", "width": 2})
        figure.update_xaxes(title=f"{unit}; dashed line: available memory, {there_is}")
        figure.update_xaxes(range=[0, 1.05 * most_bytes / size])
    return figure


def describe_checkpointing(plan: Mapping[str, Any]) -> str | None:
    """Return how many layers recompute and what that gains; None where the plan did not choose, or is an older one."""
    found = plan.get("checkpointing")
    if not found:
        return None
    line = f"activation checkpointing: {found['num_recomputed']} of {found['num_layers']} layers recompute"
    before = found["recomputed_tokens_per_s"]
    if before is None or found["num_recomputed"] == found["num_layers"]:
        return line
    return f"{line}; predicted {found['tokens_per_s']:,.0f} tokens/s instead of {before:,.0f}"


def _label(plan: Mapping[str, Any], index: int) -> str:
    placement = plan["rows"][index]["placement"]
    layers = placement["resident_layers"]
    name = placement["placement"] + (f" resident_layers {layers}" if layers else "")
    name = plan["names"][index] if "names" in plan else name
    return f"\u25b6 {name} (chosen)" if index == plan["chosen"] else name


def _split(row: Mapping[str, Any]) -> tuple[int, ...]:
    workspace_bytes = row.get("workspace_bytes", 0)  # of a quantized base; plans of older runs have none
    fixed = row["rest_bytes"], row["slot_bytes"], row["adapter_bytes"], workspace_bytes
    return *fixed, max(0, row["peak_bytes"] - sum(fixed))


def _describe(rows: list[Mapping[str, Any]], free_bytes: int) -> list[str]:
    words = []
    for row in rows:
        peak = f"{row['peak_bytes'] / 2**30:.2f} of {free_bytes / 2**30:.1f} GiB"
        speed = f"{row['tokens_per_s']:,.0f} tokens/s"
        words.append(f"\u2715 does not fit, {row['lacks']}" if row["lacks"] else f"{peak}, {speed}")
    return words


def _lay_out(num_rows: int) -> dict[str, Any]:
    return lay_out(
        {"fixedrange": True},
        {"autorange": "reversed", "showticklabels": False, "fixedrange": True},
        barmode="stack",
        bargap=0.62,
        height=110 + 58 * num_rows,
        margin={"l": 8, "r": 12, "t": 30, "b": 52},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        uirevision="plan",
    )
