"""What the form's panels have found: in its summary, at its fields, in its words."""

from __future__ import annotations

import pytest

from lorashard.config.methods import METHODS
from lorashard.errors import ConfigError
from lorashard_ui.form.finding import Finding, read_findings, tell
from lorashard_ui.form.form import Form
from lorashard_ui.pages.new_run_updates import find_bad_rows, place_problems, summarize
from lorashard_ui.pages.plan_panel import find_problem
from lorashard_ui.running.worker import Canceled

GOOD = Form(METHODS["sft"], {"model_name_or_path": "m", "dataset": "d"}, "m-d")
ROW = {"place": "d.jsonl line 1", "problem": None}


@pytest.mark.parametrize(
    ("planned", "previewed", "said"),
    [
        (Finding("plan"), Finding("rows"), "\u2713 All options are valid"),
        (Finding("plan"), Finding("rows of before"), "follow"),
        (Finding("plan of before", "nothing fits", "placement"), Finding("rows"), "follow"),
        (Finding("plan", "nothing fits", "placement"), Finding("rows"), "nothing fits"),
        (Finding("plan"), Finding("rows", "no row can be read", "dataset"), "no row can be read"),
        (Finding("plan"), find_bad_rows("rows", []), "The dataset is empty."),
        (Finding("plan"), find_bad_rows("rows", [ROW | {"problem": "`text` is empty"}]), "line 1 cannot be trained on"),
        (Finding("plan"), find_bad_rows("rows", [ROW | {"problem": "`text` is empty"}, ROW]), "\u2713"),
        (Finding.of_error("plan", Canceled("the plan was canceled")), Finding("rows"), "\u26a0 All options are valid"),
        (Finding("plan", warnings=("bfloat16 is slow here",)), Finding("rows"), "bfloat16 is slow here"),
    ],
)
def test_a_tick_stands_beside_nothing_that_is_wrong(planned, previewed, said):
    """Catches a tick beside a plan that does not fit or a preview that failed, before both have answered, or beside an
    answer to what the form asked before."""
    told, is_waiting = read_findings([("plan", planned), ("rows", previewed)])
    summary = summarize(GOOD, told, is_waiting)
    assert said in summary
    assert ("\u2713" in summary) == (said[0] == "\u2713")
    wrong = {finding.option: finding.problem for finding in told if finding.problem}
    assert place_problems(GOOD, told, {"dataset": None}) == {k: v for k, v in wrong.items() if k == "dataset"}


def test_a_run_that_will_wait_for_memory_may_start():
    """Catches "Fix these first" for a queued run, while the run before it has the memory."""
    found = {"chosen": None, "reason": "nothing fits", "warnings": ["bfloat16 is slow here"]}
    queued = find_problem(["--queue", "true"], found)
    assert not queued.problem and "nothing fits" in queued.warnings[0] and len(queued.warnings) == 2
    assert find_problem(["--queue", "false"], found).problem == "nothing fits"


def test_nothing_is_awaited_that_is_not_asked():
    """Catches a summary that waits forever for a panel that was asked nothing, as of a form without a dataset."""
    assert read_findings([(None, Finding()), ("plan", Finding("plan"))]) == ([Finding("plan")], False)


def test_errors_speak_the_words_of_the_form():
    """Catches dashes and null in a form whose fields have neither; and a flag of the server that lost its dashes."""
    no_gpus = ConfigError(option="gpus", expected="GPUs", found="none", fix="give --cpu N to train with N CPU ranks")
    assert tell(no_gpus).endswith("give cpu N to train with N CPU ranks")
    empty = ConfigError(option="cpu", expected="a whole number of at least 1 or null", found=0)
    assert tell(empty) == "cpu: expected a whole number of at least 1, found 0"
    assert "or null" in tell(ConfigError(option="max_length", expected="a whole number or null", found="'x'"))
    assert "or null" in tell(ConfigError(option="cpu", expected="1 or null", found=0, where="more options, line 2"))
    assert "--allow" in tell(ConfigError("start the server with --allow FOLDER", option="dataset"))
    assert tell(ConfigError(where="command line", option="cpu", expected="1", found=0)).startswith("cpu: ")
