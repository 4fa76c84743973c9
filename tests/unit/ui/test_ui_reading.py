"""All runs of a folder, and one of them in detail, as they go on, are cut, deleted and begun anew."""

import json
import math
import os
import threading
import time

import pytest
from helpers.ui_runs import make_rank_lines, make_run, make_steps, owned, write_lines

from lorashard.errors import ConfigError
from lorashard_ui.reading.runs import Runs


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_the_table_has_every_run_and_nothing_else(runs, tmp_path):
    """A folder of jobs, a file, or a merged model is offered to be stopped and deleted, or a run whose name a browser
    may not send is left out without a word."""
    make_run(tmp_path, "old", begin_s=1.0)
    make_run(tmp_path, "new", begin_s=2.0)
    make_run(tmp_path, ".jobs")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/config.json").write_text("{}")
    (tmp_path / "a file").touch()
    (tmp_path / "link").symlink_to("/")
    make_run(tmp_path, "\U0001f600<b>")
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked/asked.yaml").write_text("model_name_or_path: org/other\nmethod: dpo\ngpus: [0, 2]\n")
    rows = runs.list()
    assert [row.name for row in rows] == ["asked", "new", "old"]
    assert (rows[0].state, rows[0].model, rows[0].method, rows[0].num_ranks) == ("starting", "org/other", "dpo", 2)
    assert runs.list_misnamed() == ["\U0001f600<b>"]


def test_a_row_says_what_its_run_does(runs, tmp_path):
    """A wrong column is believed: nobody opens each run to compare."""
    folder = make_run(tmp_path, steps=20, begin_s=5.0)
    write_lines(folder / "metrics.jsonl", [{"step": 20, "time": 1050.0, "eval_loss": 0.25}])
    write_lines(folder / "metrics.jsonl", make_steps([21], tokens_per_s=77.0))
    (folder / "adapter_model.safetensors").touch()
    (row,) = runs.list()
    assert (row.name, row.state, row.step, row.max_steps, row.num_ranks) == ("one", "done", 21, 100, 2)
    assert (row.loss, row.eval_loss, row.tokens_per_s) == (pytest.approx(10 / 21), 0.25, 77.0)
    assert (row.model, row.dataset, row.method, row.begin_s) == ("org/model", "rows.jsonl", "sft", 5.0)
    assert row.has_adapter and not row.has_samples and row.size_bytes > 1000 and row.eta_s is None
    assert runs.get("one").summary() == row
    assert row.duration_s == row.update_s - row.begin_s and row.trend[0] == (1, 10) and row.trend[-1][0] == 21


def test_the_small_curve_of_a_long_run_is_of_all_of_it(runs, tmp_path):
    """Catches a curve of the last steps alone, one that reads hundreds of megabytes for each row of the table, and one
    that runs back where steps were run again."""
    folder = make_run(tmp_path, steps=5)
    write_lines(folder / "metrics.jsonl", make_steps(range(3, 20_000)))
    (row,) = runs.list()
    steps = [step for step, _ in row.trend]
    assert steps == sorted(set(steps)) and steps[0] < 50 and steps[-1] == 19_999 and len(steps) <= 48
    assert max(after - before for before, after in zip(steps, steps[1:], strict=False)) < 2_000


def test_an_evaluation_long_ago_is_found(runs, tmp_path):
    """Of a run that evaluates seldom the table shows no evaluation."""
    folder = make_run(tmp_path)
    write_lines(folder / "metrics.jsonl", [{"step": 10, "time": 1020.0, "eval_loss": 0.5}])
    write_lines(folder / "metrics.jsonl", make_steps(range(11, 2000)))
    (row,) = runs.list()
    assert row.eval_loss == 0.5 and row.step == 1999


def test_a_row_that_is_known_is_made_anew_when_its_run_goes_on(runs, tmp_path):
    """Rows of ended runs are kept; one that is resumed, or that is begun anew, stays as it was."""
    folder = make_run(tmp_path, steps=10)
    assert runs.list()[0].step == 10
    write_lines(folder / "metrics.jsonl", make_steps([11]))
    assert runs.list()[0].step == 11
    with owned(folder):
        assert runs.list()[0].state == "starting"
        (folder / "status.json").write_text(json.dumps({"phase": "train", "time": time.time()}))
        assert runs.list()[0].state == "running"
    assert runs.list()[0].state == "dead"
    for path in folder.iterdir():
        path.rename(tmp_path / f"gone {path.name}")
    assert runs.list() == []


@pytest.mark.parametrize("name", ["", "..", "../one", "a/b", "/etc", ".jobs", "none", "one\n", "link"])
def test_a_name_that_is_no_run_is_refused(runs, tmp_path, name):
    """A name comes from a browser: it must not lead anywhere else, nor end in a traceback."""
    make_run(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with pytest.raises(ConfigError):
        runs.get(name)


def test_everybody_gets_the_same_reader(runs, tmp_path):
    """Each tab would read the whole run again."""
    make_run(tmp_path)
    assert runs.get("one") is runs.get("one")


def test_curves_grow_with_the_run(runs, tmp_path):
    """Points that came later are missing, or come twice."""
    folder = make_run(tmp_path, steps=3)
    reader = runs.get("one")
    xs, ys, smoothed = reader.series(["loss", "eval_loss"])["loss"]
    assert xs == [1, 2, 3] and ys == smoothed == [10, 5, pytest.approx(10 / 3)]
    write_lines(folder / "metrics.jsonl", [*make_steps([4], loss=math.nan), {"step": 4, "time": 9.0, "eval_loss": 1.5}])
    found = reader.series(["loss", "eval_loss"])
    assert found["loss"][0] == [1, 2, 3, 4] and math.isnan(found["loss"][1][-1])
    assert found["eval_loss"][:2] == ([4], [1.5])
    assert "eval_loss" in reader.series_names() and len(reader.series(["loss"], max_points=-1)["loss"][0]) <= 4


def test_curves_of_a_resumed_run_have_each_step_once(runs, tmp_path):
    """The run cuts its lines to the checkpoint, and runs the steps behind it again."""
    folder = make_run(tmp_path, steps=10)
    reader = runs.get("one")
    reader.series(["loss"])
    write_lines(folder / "metrics.jsonl", make_steps(range(1, 5)), mode="w")
    assert reader.series(["loss"])["loss"][0] == [1, 2, 3, 4]
    write_lines(folder / "metrics.jsonl", make_steps(range(5, 30)))
    assert reader.series(["loss"])["loss"][0] == list(range(1, 30))
    (folder / "metrics.jsonl").unlink()
    assert reader.series(["loss"]) == {}


@pytest.mark.parametrize("is_cut", (True, False))
@pytest.mark.parametrize("is_told", (True, False))
def test_tokens_are_those_of_the_whole_run(runs, tmp_path, is_cut, is_told):
    """The trainer counts from 0 again after a resume: a curve over tokens runs back and overlays itself."""
    folder = make_run(tmp_path, steps=0)
    lines = [{"step": step, "num_tokens": 100 * step} for step in range(1, 7)]
    again = [{"step": step, "num_tokens": 100 * (step - 4)} for step in range(5, 8)]
    reader = runs.get("one")
    write_lines(folder / "metrics.jsonl", lines)
    assert reader.series(["num_tokens"])["num_tokens"][1][-1] == 600
    if is_told:
        write_lines(folder / "events.jsonl", [{"time": 1.0, "kind": "start", "rank": 0, "resumed_step": 4}])
    if is_cut:
        write_lines(folder / "metrics.jsonl", lines[:4], mode="w")
    for line in again:
        write_lines(folder / "metrics.jsonl", [line])
        reader.series(["num_tokens"])
    for one in (reader, Runs(tmp_path).get("one")):
        assert one.series(["num_tokens"])["num_tokens"][:2] == (list(range(1, 8)), [100 * x for x in range(1, 8)])


def test_a_count_that_is_larger_after_a_resume_is_added_too(runs, tmp_path):
    """Only a smaller count would tell that the run was resumed; the event tells it always."""
    folder = make_run(tmp_path, steps=0)
    write_lines(folder / "events.jsonl", [{"time": 1.0, "kind": "start", "rank": 0, "resumed_step": 1}])
    lines = [{"step": 1, "num_tokens": 100}, {"step": 11, "num_tokens": 1000}]
    write_lines(folder / "metrics.jsonl", lines)
    assert runs.get("one").series(["num_tokens"])["num_tokens"][1] == [100, 1100]


def test_a_refresh_reads_what_is_new_alone(runs, tmp_path, monkeypatch):
    """The cost of watching a run grows with its length."""
    folder = make_run(tmp_path, steps=20_000)
    reader = runs.get("one")
    num_read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: num_read.append(len(found := pread(*args))) or found)
    for look in (lambda: reader.series(["loss"]), lambda: reader.ranks(), lambda: reader.alerts()):
        look()
    assert sum(num_read) > 1_000_000
    num_read.clear()
    write_lines(folder / "metrics.jsonl", make_steps(range(20_001, 20_011)))
    write_lines(folder / "ranks/rank_1.jsonl", make_rank_lines(range(20_001, 20_011)))
    reader.series(["loss"]), reader.ranks(), reader.alerts()
    assert sum(num_read) < 5000


def test_ranks_say_what_they_hold_and_how_long_they_waited(runs, tmp_path):
    """A rank's bar beside another's number, or a wait since the start shown as one of now."""
    folder = make_run(tmp_path, num_ranks=0)
    one = {"device_used_bytes": 50, "device_peak_bytes": 40, "device_total_bytes": 80, "temperature_c": 60}
    write_lines(folder / "ranks/rank_10.jsonl", make_rank_lines(range(1, 6), wait_s=1.5))
    write_lines(folder / "ranks/rank_2.jsonl", make_rank_lines(range(1, 6), wait_s=0.5, **one))
    write_lines(folder / "ranks/rank_2.jsonl", make_rank_lines([6], wait_s=0.5, **one | {"device_peak_bytes": 30}))
    (folder / "plan.json").write_text(json.dumps({"rows": [{"peak_bytes": 1}, {"peak_bytes": 45}], "chosen": 1}))
    rows = runs.get("one").ranks()
    assert [row.rank for row in rows] == [2, 10]
    two, ten = rows
    assert (two.memory_bytes, two.peak_bytes, two.planned_bytes, two.total_bytes) == (50, 40, 45, 80)
    assert (two.step, two.wait_s, two.wait_share, two.temperature_c) == (6, 3.0, pytest.approx(0.25), 60)
    assert (ten.memory_bytes, ten.peak_bytes, ten.wait_share) == (1005, 1005, pytest.approx(0.75))
    assert ten.total_bytes is ten.temperature_c is ten.utilization_percent is None
    shares = runs.get("one").rank_series("wait_share")
    assert shares[10] == ([2, 3, 4, 5], [pytest.approx(0.75)] * 4) and list(shares) == [2, 10]
    assert runs.get("one").rank_series("temperature_c").keys() == {2}


def test_the_waits_of_a_rank_that_was_started_again_begin_at_nothing(runs, tmp_path):
    """Its count begins at 0: the difference to the line before is negative, or the whole."""
    folder = make_run(tmp_path, num_ranks=1, steps=5)
    write_lines(folder / "ranks/rank_0.jsonl", make_rank_lines([6], wait_s=0.01))
    reader = runs.get("one")
    assert reader.ranks()[0].wait_share is None
    assert all(0 <= share <= 1 for share in reader.rank_series("wait_share")[0][1])


def test_a_run_of_an_older_release_is_read(runs, tmp_path):
    """Its ranks' lines have no time, its status neither begin nor progress."""
    folder = make_run(tmp_path, num_ranks=0)
    write_lines(folder / "ranks/rank_0.jsonl", [{"step": 5, "wait_s": 1.0, "rss_bytes": 7}])
    (row,) = runs.get("one").ranks()
    assert (row.step, row.wait_s, row.wait_share, row.memory_bytes) == (5, 1.0, None, 7) and row.update_s is not None
    assert runs.get("one").progress().fraction == 0.1
    assert runs.get("one").plan() is None and runs.get("one").samples() == []


def test_samples_come_by_step(runs, tmp_path):
    """A conversation as a prompt is no text, and a half-written line is no sample yet."""
    folder = make_run(tmp_path)
    reader = runs.get("one")
    turns = [{"role": "user", "content": "Hello?"}]
    write_lines(folder / "samples.jsonl", [{"step": 5, "prompt": "Hi", "completion": "a"}])
    write_lines(folder / "samples.jsonl", [{"step": 10, "prompt": turns, "completion": "b"}])
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 15')
    found = [(sample.step, sample.prompt, sample.completion) for sample in reader.samples()]
    assert found == [(5, "Hi", "a"), (10, "user: Hello?", "b")] and len(reader.samples()) == 2
    write_lines(folder / "samples.jsonl", [{"step": 5, "prompt": "Hi", "completion": "c"}], mode="w")
    assert [sample.completion for sample in reader.samples()] == ["c"]


def test_a_checkpoint_is_seen_at_once(runs, tmp_path):
    """Who asks for one waits for it; what its files hold is read again after seconds alone."""
    folder = make_run(tmp_path)
    reader = runs.get("one")
    for step in (4, 8):
        (folder / f"checkpoint-{step}").mkdir()
        assert reader.checkpoints()[0].step == step
    (folder / "checkpoint-8").rename(folder / ".checkpoint-8.partial")
    assert [row.step for row in reader.checkpoints()] == [4]


def test_options_are_those_that_ran(runs, tmp_path):
    """What was asked for lacks the defaults; before a run begins it is all there is."""
    folder = make_run(tmp_path)
    (folder / "asked.yaml").write_text("lora_r: 8\nhub_token: hf_abcdefghijklmnop\nmore: {api_key: [xyz]}\n")
    reader = runs.get("one")
    assert reader.options()["lora_r"] == 16 and "lora_r: 16" in reader.config_yaml()
    (folder / "config.yaml").unlink()
    assert reader.options() == {"lora_r": 8, "hub_token": "***", "more": {"api_key": ["***"]}}
    assert "hf_abc" not in reader.config_yaml() and "lora_r: 8" in reader.config_yaml()
    (folder / "asked.yaml").write_text("a: [")
    assert reader.options() == {}


def test_several_may_look_while_a_run_writes(runs, tmp_path):
    """Two tabs that share a reader lose or double each other's lines."""
    folder = make_run(tmp_path, steps=1)
    reader = runs.get("one")
    errors = []
    is_over = threading.Event()

    def look():
        while not is_over.is_set():
            try:
                xs = reader.series(["loss"])["loss"][0]
                assert xs == list(range(1, len(xs) + 1))
                reader.ranks(), reader.alerts(), runs.list()
            except Exception as error:
                errors.append(error)
                return

    lookers = [threading.Thread(target=look) for _ in range(4)]
    for looker in lookers:
        looker.start()
    for begin in range(2, 400, 7):
        write_lines(folder / "metrics.jsonl", make_steps(range(begin, min(begin + 7, 400))))
    is_over.set()
    for looker in lookers:
        looker.join()
    assert errors == [] and len(reader.series(["loss"])["loss"][0]) == 399


def test_readers_of_many_runs_are_not_kept_for_ever(runs, tmp_path):
    """A server that is up for months holds the curves of every run that anybody has ever opened."""
    for number in range(20):
        make_run(tmp_path, f"run{number}", steps=1, num_ranks=0)
    first = runs.get("run0")
    for number in range(1, 20):
        runs.get(f"run{number}")
    assert runs.get("run0") is not first and runs.get("run19") is runs.get("run19")
