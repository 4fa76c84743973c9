"""A plan as bars: what each placement takes of a rank's memory, against what there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from lorashard.planning.wording import show_speed, show_time
from lorashard.runtime.disk import show_bytes

from .charts import lay_out

# Okabe and Ito's colors.
_PARTS = (
    ("base at rest", "#0072B2"),
    ("slots", "#E69F00"),
    ("adapter", "#009E73"),
    ("workspace", "#56B4E9"),
    ("activations", "#CC79A7"),
)
# How well a placement fits: a mark, words and a color. The page takes brighter colors on black.
_FITS, _TIGHT, _LACKS = ("\u2713 fits", "#15803D"), ("! tight", "#B45309"), ("\u2715 does not fit", "#B91C1C")
_TIGHT_SHARE = 0.9
PLACEMENT_FIELDS = ("placement", "shard_group_size", "resident_layers", "activation_checkpointing_layers") + (
    "sequence_parallel_size",
)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def plan_chart(plan: Mapping[str, Any]) -> go.Figure:
    """Draw a bar for each placement, of one rank, the chosen one first, with a line where its memory ends.

    Args:
        plan: as `Plan.to_json` gives it, and `names` of the placements where they are known.
    """
    free_bytes = plan["free_bytes"]
    order = order_rows(plan)
    rows = [plan["rows"][index] for index in order]
    labels = [_label(plan, index) for index in order]
    most_bytes = max([free_bytes, *(row["peak_bytes"] for row in rows)])
    size, unit = next(((size, unit) for size, unit in _UNITS if most_bytes >= size), (1, "bytes"))
    parts = [_split(row) for row in rows]
    bars = [(name, color, [part[number] for part in parts]) for number, (name, color) in enumerate(_PARTS)]
    bars.append(("free", "rgba(128,128,128,0.12)", [max(0, free_bytes - row["peak_bytes"]) for row in rows]))
    traces = [
        go.Bar(
            y=labels,
            x=[num_bytes / size for num_bytes in values],
            name=name,
            orientation="h",
            marker={"color": color, "line": {"color": "rgba(128,128,128,0.6)", "width": 0.5}},
            hovertemplate=f"{name}: %{{x:.2f}} {unit}<extra></extra>",
        )
        for name, color, values in bars
        if any(values)
    ]
    figure = go.Figure(traces, _lay_out(len(rows)))
    # Above the bar: on phones a label next to it would leave no room for the bar.
    for label, row in zip(labels, rows, strict=True):
        word, color = _judge(row, free_bytes)
        text = f'{label}: <span style="color:{color}"><b>{word}</b></span>, {_describe(row)}'
        figure.add_annotation(
            x=0, y=label, xref="paper", yref="y", text=text, showarrow=False, xanchor="left", yshift=21,
            font={"size": 12}, align="left",
        )  # fmt: skip
    figure.add_vline(x=free_bytes / size, line={"color": "#D55E00", "dash": "dash", "width": 2})
    figure.update_xaxes(title=f"{unit}; dashed: {show_bytes(free_bytes)} available")
    figure.update_xaxes(range=[0, 1.05 * most_bytes / size])
    return figure


def order_rows(plan: Mapping[str, Any]) -> list[int]:
    """Return the indices of a plan's rows as its chart shows them: the chosen one first."""
    return sorted(range(len(plan["rows"])), key=lambda index: index != plan["chosen"])


def list_placements(plan: Mapping[str, Any]) -> list[str]:
    """Return the placements as the chart orders and judges them, a line for each."""
    rows, free_bytes = plan["rows"], plan["free_bytes"]
    return [f"{plan['names'][index]}: {_judge(rows[index], free_bytes)[0]}" for index in order_rows(plan)]


def fill_placement(plan: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return the texts of the form's fields by which a run takes a plan's row."""
    placement = plan["rows"][index]["placement"]
    is_grouped = placement["placement"] in ("shard", "host") and placement["group_size"] != plan["num_ranks"]
    return {
        "placement": placement["placement"],
        "shard_group_size": str(placement["group_size"]) if is_grouped else "",
        "resident_layers": "" if placement["placement"] == "replicate" else str(placement["resident_layers"]),
        "activation_checkpointing_layers": str(placement["activation_checkpointing_layers"]),
        "sequence_parallel_size": str(placement.get("sequence_parallel_size", 1)),  # plans of older runs have none
    }


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


def _judge(row: Mapping[str, Any], free_bytes: int) -> tuple[str, str]:
    if row["lacks"]:
        return _LACKS
    return _TIGHT if row["peak_bytes"] > _TIGHT_SHARE * free_bytes else _FITS


def _describe(row: Mapping[str, Any]) -> str:
    if row["lacks"]:
        return row["lacks"]
    # No longer than a phone is wide.
    step = f", {show_time(row['step_s'])} a step" if row["tokens_per_s"] < 1 else ""
    return f"{show_bytes(row['peak_bytes'])}, {show_speed(row['tokens_per_s'])}{step}"


def _lay_out(num_rows: int) -> dict[str, Any]:
    return lay_out(
        {"fixedrange": True},
        {"autorange": "reversed", "showticklabels": False, "fixedrange": True, "showgrid": False},
        barmode="stack",
        bargap=0.62,
        height=110 + 58 * num_rows,
        margin={"l": 8, "r": 12, "t": 30, "b": 52},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        uirevision="plan",
        meta={"clicks": "#plan-take"},
    )
