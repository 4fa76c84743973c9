from __future__ import annotations

import dataclasses
import json
import re

import pytest

pytest.importorskip("plotly")

import numpy as np

from lorashard.config.run_config import RunConfig
from lorashard.planning.choose import Checkpointing
from lorashard_ui.drawing.charts import Curve, draw_bars, draw_curves
from lorashard_ui.drawing.plan_chart import (
    PLACEMENT_FIELDS,
    describe_checkpointing,
    fill_placement,
    list_placements,
    plan_chart,
)


def test_smoothed_curve_is_strong_and_the_raw_one_faint_and_named_once():
    """A legend with every name twice, or noise drawn over the curve that one wants to see."""
    figure = draw_curves([Curve("loss", [1, 2, 3], [3.0, 1.0, 2.0], [3.0, 2.0, 2.0])], "step", "")
    raw, smoothed = figure.data
    assert raw.opacity < 0.5 < (smoothed.opacity or 1) and raw.line.width < smoothed.line.width
    assert [trace.showlegend for trace in figure.data] == [False, None]


def test_hover_tells_the_logged_value_beside_the_smoothed_one():
    """`loss: 0.2766698` was the smoothed value: what the run has logged could not be read anywhere."""
    raw, smoothed = draw_curves([Curve("<b>loss", [1, 2], [3.0, 1.0], [3.0, 2.0])], "step", "").data
    assert raw.hoverinfo != "skip" and raw.y[1] == 1.0 and "smoothed" not in raw.hovertemplate
    assert "smoothed" in smoothed.hovertemplate
    assert "<b>" not in raw.hovertemplate + smoothed.hovertemplate


def test_there_is_no_step_between_two_steps():
    """A young run, or a close look, has ticks at steps of 1.5; a long one must not have one at every step."""
    young, old = ([Curve("loss", list(range(n)), [1.0] * n)] for n in (4, 1000))
    axes = [
        draw_curves(*args).layout.xaxis for args in ((young, "step", ""), (old, "step", ""), (young, "minutes", ""))
    ]
    assert [axis.dtick for axis in axes] == [1, None, None]
    assert draw_curves(old, "step", "", span=(5.2, 9.9)).layout.xaxis.dtick == 1


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
    assert len({trace.marker.color for trace in figure.data if trace.type == "bar"}) == 2
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
    row |= {"adapter_bytes": 3, "peak_bytes": 15, "tokens_per_s": 1.0, "step_s": 1.0, "lacks": None}
    for more, expected in (({"workspace_bytes": 4}, [1, 2, 3, 4, 5]), ({}, [1, 2, 3, 9])):
        figure = plan_chart({"rows": [row | more], "chosen": 0, "free_bytes": 16})
        parts = [trace for trace in figure.data if trace.name != "free"]
        assert [trace.x[0] for trace in parts] == expected
        assert len({trace.marker.color for trace in parts}) == len(parts)


def test_a_plan_tells_what_fits_by_word_and_color_and_never_draws_a_small_model_as_full():
    """Color alone says nothing to some; a bar scaled to a small model hid the memory's end; speeds read 0 tokens/s."""
    placement = {"placement": "shard", "group_size": 2, "resident_layers": 3, "activation_checkpointing_layers": 4}
    row = {"placement": placement, "rest_bytes": 1 << 20, "slot_bytes": 0, "adapter_bytes": 0, "peak_bytes": 2 << 20}
    row |= {"tokens_per_s": 0.002, "step_s": 589_366.0, "lacks": None}
    rows = [row, row | {"peak_bytes": 95 << 28}, row | {"peak_bytes": 1 << 40, "lacks": "1024 of 25 GiB"}]
    plan = {"rows": rows, "chosen": 1, "free_bytes": 25 << 30, "names": ["a", "b", "c"], "num_ranks": 4}
    figure = plan_chart(plan)
    texts = [note.text for note in figure.layout.annotations]
    assert [word in text for word, text in zip(("tight", "fits", "not fit"), texts, strict=True)] == [True] * 3
    assert len({re.search("color:(#......)", text)[1] for text in texts}) == 3
    assert "8.3 min for a token, 6.8 days a step" in texts[1]
    assert list_placements(plan) == ["b: ! tight", "a: \u2713 fits", "c: \u2715 does not fit"]
    small = plan_chart(plan | {"rows": rows[:1], "chosen": 0})
    assert small.layout.xaxis.range[1] > 25 and small.data[0].x[0] < 0.01
    fields = fill_placement(plan, 0)
    assert fields == {
        "placement": "shard", "shard_group_size": "2", "resident_layers": "3", "activation_checkpointing_layers": "4",
        "sequence_parallel_size": "1",
    }  # fmt: skip
    assert set(fields) == set(PLACEMENT_FIELDS) <= set(RunConfig.model_fields)
    shared = plan | {"rows": [row | {"placement": placement | {"sequence_parallel_size": 2}}]}
    assert fill_placement(shared, 0)["sequence_parallel_size"] == "2"


@pytest.mark.parametrize(
    "found", (Checkpointing(12, 32, 4100.0, 3000.4), Checkpointing(32, 32, 1.0, 1.0), None), ids=str
)
def test_a_plan_says_how_many_layers_recompute_as_the_log_does(found):
    """The form would be silent on what was chosen, or say it in other words; older plans have no such field."""
    plan = {} if found is None else {"checkpointing": dataclasses.asdict(found)}
    assert describe_checkpointing(plan) == (str(found) if found else None)
