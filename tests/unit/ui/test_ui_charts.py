from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("plotly")

import numpy as np

from lorashard.planning.choose import Checkpointing
from lorashard_ui.drawing.charts import Curve, draw_bars, draw_curves
from lorashard_ui.drawing.plan_chart import describe_checkpointing, plan_chart


def test_smoothed_curve_is_strong_and_the_raw_one_faint_and_named_once():
    """A legend with every name twice, or noise drawn over the curve that one wants to see."""
    figure = draw_curves([Curve("loss", [1, 2, 3], [3.0, 1.0, 2.0], [3.0, 2.0, 2.0])], "step", "")
    raw, smoothed = figure.data
    assert raw.opacity < 0.5 < (smoothed.opacity or 1) and raw.line.width < smoothed.line.width
    assert [trace.showlegend for trace in figure.data] == [False, None]


def test_curves_differ_in_more_than_color():
    """Two of a dozen runs could not be told apart on a gray print or by a color-blind person."""
    figure = draw_curves([Curve(str(i), [1, 2], [i, i], [i, i]) for i in range(12)], "step", "loss")
    strong = figure.data[1::2]
    assert len({(trace.line.color, trace.line.dash) for trace in strong}) == 12
    assert len({(trace.line.dash, trace.marker.symbol) for trace in strong[:6]}) == 6


def test_zoom_outlives_new_points_but_not_another_axis():
    """The chart would jump back at every refresh; or a zoom of 0 to 3 would be taken for 10^0 to 10^3."""
    linear, longer, log = (
        draw_curves([Curve("loss", list(range(n)), [1.0] * n)], "step", "", is_log, "run")
        for n, is_log in ((2, False), (3, False), (3, True))
    )
    assert linear.layout.uirevision == longer.layout.uirevision
    assert log.layout.yaxis.type == "log" and log.layout.yaxis.uirevision not in (None, linear.layout.uirevision)


def test_figures_are_small_and_plain_json_also_with_nan():
    """NaN is no JSON; 500 points as text would be sent to every tab every two seconds."""
    ys = np.linspace(3, 1, 500)
    ys[7] = np.nan
    text = draw_curves([Curve("loss", list(range(500)), list(ys), list(ys))], "step", "").to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in the JSON"))
    assert len(text) < 20_000


def test_planned_line_is_within_the_chart():
    """A run far below its plan would show bars and no plan."""
    figure = draw_bars([0, 1], {"now": [1.0, None], "peak": [2.0, 2.5]}, ("planned", 10.0), "GiB")
    assert figure.layout.yaxis.range[1] > 10
    assert [trace.marker.pattern.shape for trace in figure.data if trace.type == "bar"] == ["", "/"]
    assert figure.data[-1].name == "planned"


def test_a_chart_without_points_says_so():
    """Axes from -1 to 6 would look as if something had been measured."""
    for figure in (draw_curves([], "step", ""), draw_bars([0], {"now": [None]}, None, "GiB")):
        assert figure.layout.annotations[0].text == "Nothing logged yet" and not figure.layout.yaxis.visible
        assert figure.layout.xaxis.visible is False
    assert not draw_curves([Curve("loss", [1], [2.0])], "step", "").layout.annotations


def test_a_plan_shows_what_a_quantized_base_unpacks_to_apart():
    """It was drawn as activations, which activation checkpointing would then seem not to shrink."""
    row = {"placement": {"placement": "shard", "resident_layers": 0}, "rest_bytes": 1, "slot_bytes": 2}
    row |= {"adapter_bytes": 3, "peak_bytes": 15, "tokens_per_s": 1.0, "lacks": None}
    for more, expected in (({"workspace_bytes": 4}, [1, 2, 3, 4, 5]), ({}, [1, 2, 3, 9])):
        figure = plan_chart({"rows": [row | more], "chosen": 0, "free_bytes": 16})
        parts = [trace for trace in figure.data if trace.name != "free"]
        assert [trace.x[0] for trace in parts] == expected
        assert len({trace.marker.pattern.shape for trace in parts}) == len(parts)


@pytest.mark.parametrize(
    "found", (Checkpointing(12, 32, 4100.0, 3000.4), Checkpointing(32, 32, 1.0, 1.0), None), ids=str
)
def test_a_plan_says_how_many_layers_recompute_as_the_log_does(found):
    """The form would be silent on what was chosen, or say it in other words; older plans have no such field."""
    plan = {} if found is None else {"checkpointing": dataclasses.asdict(found)}
    assert describe_checkpointing(plan) == (str(found) if found else None)
