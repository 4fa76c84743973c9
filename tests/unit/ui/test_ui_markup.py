from __future__ import annotations

import pytest

pytest.importorskip("gradio")

from lorashard_ui.drawing.markup import Markup, badge, join, link, note, table, tag
from lorashard_ui.pages import run_markup
from lorashard_ui.pages.chat import draw_talk
from lorashard_ui.pages.runs import choose_order, draw_runs, filter_runs, sort_runs
from lorashard_ui.reading.eta import Progress
from lorashard_ui.reading.samples import Sample
from lorashard_ui.reading.summaries import Summary, find_quantization

EVIL = "<script>alert('x')</script>\"&${1+1}{{value}}"


def make_summary(name: str = "first", state: str = "running", **facts) -> Summary:
    blank = dict.fromkeys(Summary.__dataclass_fields__)
    return Summary(**blank | {"name": name, "state": state, "phase": "train", "has_adapter": False} | facts)


def test_text_is_escaped_wherever_it_enters():
    """A model's output or a run's name that holds markup would be run by the browser of whoever looks."""
    shown = [
        tag("p", EVIL, title=EVIL),
        join(["a", EVIL]),
        link("run", EVIL, name=EVIL),
        badge(EVIL),
        note(EVIL, "error"),
        table([EVIL], [[EVIL]], EVIL),
        run_markup.draw_missing(EVIL),
        run_markup.draw_header(make_summary(EVIL, model=EVIL, dataset=EVIL)),
        run_markup.draw_samples([Sample(1, EVIL, EVIL)], run_markup.ALL_PROMPTS),
        run_markup.draw_samples([Sample(1, EVIL, EVIL)], EVIL),
        draw_runs([make_summary(EVIL, model=EVIL)], {}, {"by": "name", "down": True}),
        draw_talk("adapter", [{"role": "user", "content": EVIL}, {"role": "assistant", "content": EVIL}]),
    ]
    for markup in shown:
        assert isinstance(markup, Markup)
        assert "<script" not in markup and "alert('x')" not in markup


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"quantization": "nf4", "bnb_4bit_use_double_quant": True}, "nf4 with double quantization"),
        ({"quantization": "none", "load_in_4bit": True}, "nf4"),
        ({"load_in_8bit": True}, "int8"),
        ({"quantization": "none", "load_in_4bit": False}, None),
        ({"quantization": "none", "bnb_4bit_use_double_quant": True}, None),
        ({}, None),
    ],
)
def test_a_run_tells_of_a_quantized_base_and_of_no_other(options, shown):
    """The spelling that was asked for is not the one that is resolved; most runs have nothing to tell."""
    found = find_quantization(options)
    assert found == shown
    header = run_markup.draw_header(make_summary(quantization=found))
    assert ("quantization" in header) is (shown is not None) and (shown or "") in header


def test_markup_within_markup_stays_and_attributes_say_what_they_are():
    """Escaping twice would show people &lt;; an attribute that is False would still disable a button."""
    button = tag("button", tag("b", "a<b"), disabled=False, data_sort="loss", class_="wide", hidden=True)
    assert button == '<button data-sort="loss" class="wide" hidden><b>a&lt;b</b></button>'
    assert link("run", "x", name="a b/c&d") == '<a href="run?name=a%20b%2Fc%26d">x</a>'


def test_runs_without_a_number_come_last_either_way():
    """NaN or None among the losses would make the order depend on where they stood, or raise."""
    losses = {"none": None, "two": 2.0, "nan": float("nan"), "one": 1.0}
    runs = [make_summary(name, loss=loss) for name, loss in losses.items()]
    assert [row.name for row in sort_runs(runs, "loss", down=False)] == ["one", "two", "none", "nan"]
    assert [row.name for row in sort_runs(runs, "loss", down=True)] == ["two", "one", "none", "nan"]


def test_a_second_click_turns_the_order_round_and_others_are_refused():
    """The arrow would lie; a column that a browser makes up would be read from the object."""
    order = choose_order({"by": "begin_s", "down": True}, "loss")
    assert order == {"by": "loss", "down": False}
    assert choose_order(order, "loss") == {"by": "loss", "down": True}
    assert choose_order(order, "__class__") == order


def test_filter_takes_all_words_in_any_case():
    """Somebody with a hundred runs would not find the one with that model and that dataset."""
    runs = [make_summary("a", model="Org/Llama", dataset="x.jsonl"), make_summary("b", "done", model="org/llama")]
    assert [row.name for row in filter_runs(runs, "LLAMA x.js", "any state")] == ["a"]
    assert [row.name for row in filter_runs(runs, "llama", "done")] == ["b"]


@pytest.mark.parametrize(
    ("pressed", "summary", "expected"),
    [
        ('{"word": "stop"}', make_summary(step=41), "this step"),
        ('{"word": "stop"}', make_summary(state="stopped", step=42), "Ended at step 42"),
        ('{"word": "save", "saved": 40}', make_summary(step=42), "training continues"),
        ('{"word": "save", "saved": 40}', make_summary(state="done"), "ended before"),
        ('{"word": "stop", "error": "it is gone"}', make_summary(), "it is gone"),
        ("", make_summary(), ""),
    ],
)
def test_what_was_pressed_is_answered_as_far_as_it_has_come(pressed, summary, expected):
    """The page would still say `stopping` when the run has long ended, or promise what never came."""
    answer = run_markup.draw_answer(pressed, summary, [])
    assert expected in answer if expected else answer == ""


def test_phase_is_told_by_words_and_not_by_color_alone():
    """A screen reader, or a color-blind person, would not know which phase it is."""
    progress = Progress("evaluate", 3, 10, "batches", 0.3, None, "Evaluating: 3 of 10 batches")
    shown = run_markup.draw_progress(make_summary(phase="evaluate"), progress)
    present = shown[shown.index('aria-current="step"') :]
    assert present.index("evaluate") < present.index("</li>")
    assert 'aria-valuenow="30.0"' in shown and "3 of 10 batches" in shown
