"""What stands large on the page of a run, in its tab's title, in its list of charts, and of its options."""

from __future__ import annotations

import json
import re

import pytest
import yaml

pytest.importorskip("gradio")

from helpers.ui_runs import make_run, owned, write_lines

from lorashard.config.run_config import RunConfig
from lorashard_ui.app_context import AppContext
from lorashard_ui.drawing.markup import figures
from lorashard_ui.drawing.run_facts import describe_placement, list_figures
from lorashard_ui.pages.run import add_zoom
from lorashard_ui.pages.run_controls import show_controls
from lorashard_ui.pages.run_figures import draw_chosen, write_title
from lorashard_ui.reading.defaults import find_chosen
from lorashard_ui.reading.metrics import is_noisy
from lorashard_ui.reading.reader import RunReader


def read_figures(reader: RunReader) -> dict[str, str]:
    """What is large, by name: the value, and what stands below."""
    shown = figures(list_figures(reader.summary(), reader.progress(), reader.ranks(), reader.num_tokens()))
    words = [re.sub("<[^>]*>", "|", part) for part in shown.split("<dt>")[1:]]
    return {name: more.strip("|").replace("||", " / ") for name, _, more in (word.partition("|") for word in words)}


def test_memory_is_that_of_the_fullest_rank_against_its_plan(tmp_path):
    """The mean, or rank 0's, hides the one rank that is about to run out."""
    folder = make_run(tmp_path, steps=63)
    for rank, peak_gib in enumerate((3, 5, 4)):
        line = {"step": 63, "time": 1.0, "device_peak_bytes": peak_gib << 30}
        write_lines(folder / f"ranks/rank_{rank}.jsonl", [line], mode="w")
    row = {"peak_bytes": 8 << 30, "placement": {"placement": "host", "resident_layers": 2, "group_size": 4}}
    (folder / "plan.json").write_text(json.dumps({"rows": [{}, row], "chosen": 1}))
    reader = RunReader(folder)
    found = read_figures(reader)
    assert found["peak memory, fullest rank"] == "5.0 GiB / rank 1, 62% of the planned 8.0 GiB"
    assert found["step"] == "63 of 100 / 63 %" and found["loss"].startswith("0.1587")
    assert describe_placement(reader.plan(), {"placement": "auto"}) == (
        "host, resident_layers 2, sharded over 4, chosen by the plan"
    )
    assert describe_placement({"rows": [], "chosen": None}, {"placement": "file"}) == "file"


def test_the_libraries_of_a_process_are_not_held_against_the_plan(tmp_path):
    """On a CPU every run would seem to take a hundred times what was planned."""
    folder = make_run(tmp_path, steps=0, num_ranks=0)
    write_lines(folder / "ranks/rank_0.jsonl", [{"step": 1, "rss_bytes": 1 << 30, "cpu_percent": 90}])
    (folder / "plan.json").write_text(json.dumps({"rows": [{"peak_bytes": 1 << 20}], "chosen": 0}))
    assert "%" not in read_figures(RunReader(folder))["peak memory, fullest rank"]


@pytest.mark.parametrize(
    ("phase", "status", "expected"),
    [
        ("train", {"step": 63}, "63 % one"),
        ("train", {"step": 999, "max_steps": 1000}, "99 % one"),
        ("done", {}, "done one"),
    ],
)
def test_the_tab_tells_how_far_which_run_is(tmp_path, phase, status, expected):
    """Five tabs look alike, and one that is not in sight must be opened to see whether it is done."""
    folder = make_run(tmp_path, steps=10, phase=phase, **status)
    if phase == "done":
        assert write_title(RunReader(folder).summary()) == expected
        return
    with owned(folder):
        assert write_title(RunReader(folder).summary()) == expected


def test_the_button_of_the_next_step_stands_out(tmp_path):
    """Catches a button that cannot be pressed in the color of the one to press, as "Stop and save" of a run that is
    over; and two in that color."""
    context = AppContext.open(tmp_path)
    folder = make_run(tmp_path, phase="train")

    def list_buttons() -> dict[str, tuple[bool, str]]:
        reader = context.runs.get("one")
        shown = show_controls(context, reader, reader.summary(), "")
        return {name: (shown[name]["interactive"], shown[name]["variant"]) for name in ("stop", "resume")}

    with owned(folder):
        assert list_buttons() == {"stop": (True, "primary"), "resume": (False, "secondary")}
    places = {"model_name_or_path": str(tmp_path), "dataset": str(folder / "metrics.jsonl")}
    (folder / "config.yaml").write_text(yaml.safe_dump(places | {"overwrite_output_dir": True}))
    assert list_buttons() == {"stop": (False, "secondary"), "resume": (True, "primary")}
    context.close()


def test_zooms_of_charts_are_kept_apart_and_nonsense_is_none():
    """A zoom in one chart would be another's; or what a browser sends would break each refresh from then on."""
    zooms = add_zoom(add_zoom({}, "loss", [30, 2.5]), "grad_norm", [0, 9])
    assert zooms == {"loss": (2.5, 30.0), "grad_norm": (0.0, 9.0)}
    assert add_zoom(zooms, "loss", None) == {"grad_norm": (0.0, 9.0)}
    for span in ([1], ["a", 2], {"a": 1}, "12", [None, None], [1, 2, 3]):
        assert add_zoom({}, "loss", span) == {}
    assert add_zoom({}, {"a": 1}, [1, 2]) == {}


@pytest.mark.parametrize("method", ("sft", "dpo", "kto", "reward", "grpo"))
def test_options_that_were_chosen_come_apart_from_150_defaults(method):
    """What makes this run another one is between 150 lines of null; or a method's own default seems to be chosen."""
    given = {"model_name_or_path": "m", "dataset": "d.jsonl", "output_dir": "o", "lora_r": 32, "max_steps": 7}
    more = {"reward_funcs": ["f"]} if method == "grpo" else {}
    options = yaml.safe_load(RunConfig(method=method, **given, **more).to_yaml())
    chosen = {name for name, *_ in find_chosen(options)}
    assert chosen - {"method"} == given.keys() | more.keys()
    assert "<script" not in draw_chosen(options | {"dataset": "<script"})


def test_an_evaluation_is_drawn_as_it_was_measured():
    """Catches a strong curve of four smoothed points, of which none is the number that stands above it."""
    assert is_noisy("loss") and is_noisy("grad_norm")
    assert not any(map(is_noisy, ("eval_loss", "learning_rate", "num_tokens", "epoch")))
