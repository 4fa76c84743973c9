from __future__ import annotations

import json
import re

import pytest
from helpers.ui_runs import make_run, write_lines

pytest.importorskip("gradio")

from lorashard_ui.drawing.markup import Markup, badge, facts, join, link, note, table, tag
from lorashard_ui.drawing.run_facts import list_facts
from lorashard_ui.pages import run_figures, run_markup
from lorashard_ui.pages.chat import collect_settings, draw_talk
from lorashard_ui.pages.compare import draw_ends
from lorashard_ui.pages.export import draw_started
from lorashard_ui.pages.runs import choose_order, draw_runs, draw_trend, filter_runs, sort_runs
from lorashard_ui.reading.eta import Progress
from lorashard_ui.reading.runs import Runs
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
        run_markup.draw_header(make_summary(EVIL)),
        facts(list_facts(make_summary(EVIL, model=EVIL, dataset=EVIL), EVIL)),
        run_figures.draw_chosen({"dataset": EVIL, EVIL: EVIL}),
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
    shown_facts = facts(list_facts(make_summary(quantization=found)))
    assert ("quantization" in shown_facts) is (shown is not None) and (shown or "") in shown_facts


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


def test_what_is_set_reaches_the_sampling():
    """A slider that does nothing; greedy decoding asked with what it does not take."""
    assert collect_settings(0.5, 0.8, 9, None) == {
        "do_sample": True, "temperature": 0.5, "top_p": 0.8, "max_new_tokens": 9
    }  # fmt: skip
    assert collect_settings(0, 0.8, None, 3) == {"do_sample": False, "seed": 3}


def test_a_second_click_turns_the_order_round_and_others_are_refused():
    """The arrow would lie; a column that a browser makes up would be read from the object."""
    order = choose_order({"by": "begin_s", "down": True}, "loss")
    assert order == {"by": "loss", "down": False}
    assert choose_order(order, "loss") == {"by": "loss", "down": True}
    assert choose_order(order, "__class__") == order


def test_a_started_job_is_said_until_it_has_ended():
    """Catches "Started" beside a job that is done, and a mistake that a refresh takes away."""
    assert "Started" in draw_started({"id": "a"}, ["b", "a"])
    assert draw_started({"id": "a"}, ["b"]) == "" == draw_started(None, ["a"])
    assert "no folder" in draw_started({"error": "no folder"}, [])


def test_a_row_shows_the_end_of_a_path_and_the_reason_of_a_failure():
    """Catches a path of forty folders in the place of its last, one that nobody can read whole any more, and a failure
    whose reason is on another page."""
    row = make_summary(state="failed", model="/a/b/base", dataset="org/data", error="no <b>", step=5, max_steps=10)
    text = draw_runs([row], {}, {"by": "name", "down": False}, ["gone"])
    assert 'title="/a/b/base">base<' in text and 'title="org/data">data<' in text
    assert "no &lt;b&gt;" in text and "width: 50.0%" in text and "5 / 10" in text and "[&quot;gone&quot;]" in text


def test_the_least_of_a_small_curve_is_at_its_bottom():
    """A curve upside down says that a run diverges that learns."""
    places = re.search('points="(.*?)"', draw_trend([(10, 4.0), (20, 1.0), (30, 2.0)]))[1].split()
    (x0, y0), (x1, y1), (x2, y2) = (map(float, place.split(",")) for place in places)
    assert x0 < x1 < x2 and y0 < y2 < y1
    assert draw_trend([(1, 2.0)]) == ""


def test_runs_are_measured_against_the_baseline(tmp_path):
    """Catches a difference of the wrong sign, of two other runs, or to a run that is not shown."""
    readers = []
    for name, loss in (("base", 2.0), ("better", 1.5)):
        folder = make_run(tmp_path, name, steps=1)
        write_lines(folder / "metrics.jsonl", [{"step": 2, "loss": loss}])
        readers.append(Runs(tmp_path).get(name))
    assert "\u22120.5 (-25.0 %)" in draw_ends(readers, "loss", "base")
    assert "+0.5 (+33.3 %)" in draw_ends(readers, "loss", "better")
    assert "baseline" not in draw_ends(readers, "loss", "gone")


def test_filter_takes_all_words_in_any_case():
    """Somebody with a hundred runs would not find the one with that model and that dataset."""
    runs = [make_summary("a", model="Org/Llama", dataset="x.jsonl"), make_summary("b", "done", model="org/llama")]
    assert [row.name for row in filter_runs(runs, "LLAMA x.js", "any state")] == ["a"]
    assert [row.name for row in filter_runs(runs, "llama", "done")] == ["b"]


_SAVE = {"word": "save", "saved": 40, "begin_s": 100.0, "state": "running"}
_STOP = {"word": "stop", "begin_s": 100.0, "state": "stopping"}
_LATE = {"word": "resume", "begin_s": 100.0, "state": "starting", "error": "it is alive"}


@pytest.mark.parametrize("is_here", (True, False))
@pytest.mark.parametrize(
    ("state", "is_at_once", "expected"),
    [
        ("stopping", False, "saves a checkpoint"),
        ("stopping", True, "nothing is saved"),
        ("starting", False, "Resuming from step 41"),
        ("running", False, ""),
        ("stopped", False, ""),
    ],
)
def test_every_tab_is_told_the_same_of_a_stop_and_a_resume(state, is_at_once, expected, is_here):
    """A tab in which `stop` was pressed says `stopping` of a run that another tab has resumed."""
    pressed = json.dumps(_STOP) if is_here else ""
    begin_s = 200.0 if state in ("starting", "running") else 100.0
    answer = run_markup.draw_answer(pressed, make_summary(state=state, step=41, begin_s=begin_s), [], is_at_once)
    assert expected in answer if expected else answer == ""


@pytest.mark.parametrize(
    ("said", "summary", "expected"),
    [
        (_SAVE, make_summary(begin_s=100.0), "training continues"),
        (_SAVE, make_summary(state="done", begin_s=99.0), "ended before"),
        (_SAVE, make_summary(begin_s=200.0), ""),
        (_LATE, make_summary(state="starting", begin_s=100.0), "it is alive"),
        (_LATE, make_summary(state="running", begin_s=100.0), ""),
    ],
)
def test_a_reply_holds_for_the_start_of_a_run_that_it_was_given_of(said, summary, expected):
    """The page promises to save in a run that was stopped and resumed since, or shows an error that no longer holds."""
    answer = run_markup.draw_answer(json.dumps(said), summary, [], False)
    assert expected in answer if expected else answer == ""


def test_phase_is_told_by_words_and_not_by_color_alone():
    """A screen reader, or a color-blind person, would not know which phase it is."""
    progress = Progress("evaluate", 3, 10, "batches", 0.3, None, "Evaluating: 3 of 10 batches")
    shown = run_markup.draw_progress(make_summary(phase="evaluate"), progress)
    present = shown[shown.index('aria-current="step"') :]
    assert present.index("evaluate") < present.index("</li>")
    assert 'aria-valuenow="30.0"' in shown and "3 of 10 batches" in shown
