"""Sweeps as the web UI and a terminal read them: a sweep is a run, and so is each of its jobs."""

from __future__ import annotations

import json
import os
import zipfile

import pytest
from helpers.ui_runs import make_run, make_sweep, owned

from lorashard.cli import main
from lorashard.errors import ConfigError
from lorashard.runs.root import find_place, find_run
from lorashard_ui.drawing.job_chart import draw_parallel
from lorashard_ui.pages.runs import draw_runs
from lorashard_ui.pages.sweep_markup import draw_jobs
from lorashard_ui.reading.runs import Runs
from lorashard_ui.running import control
from lorashard_ui.running.packing import pack_adapter

_ORDER = {"by": "begin_s", "down": True}


@pytest.mark.parametrize("name", ["sweep/../one", "sweep//a", "sweep/a/b", "/a", "one/a", "sweep/", "../x", "sweep/.a"])
def test_no_other_name_with_a_slash_is_a_jobs(tmp_path, name):
    """Catches a name from a browser that leads out of the folder of runs, or into a folder that is no sweep."""
    make_sweep(tmp_path)
    make_run(tmp_path, "one")
    assert find_run(tmp_path, "sweep/a") == tmp_path / "sweep/a"
    for find in (find_run, find_place):
        with pytest.raises(ConfigError):
            find(tmp_path, name)
    with pytest.raises(ConfigError):  # nothing new is put into a sweep
        find_place(tmp_path, "sweep/a")
    os.symlink("/etc", tmp_path / "sweep/link")
    with pytest.raises(ConfigError):
        find_run(tmp_path, "sweep/link")


def test_a_job_is_read_as_a_run(tmp_path):
    """Catches jobs of another order than by their value, a job that was halved and is called stopped, one that lives
    and is called dead since its sweep holds the lock, and one that has ended and is called stopping until all have."""
    folder = make_sweep(tmp_path, phase="train", a="halved", b="done", c="running", d="waiting")
    runs = Runs(tmp_path)
    with owned(folder):
        rows = runs.list_jobs("sweep")
        assert [(row.name, row.state) for row in rows] == [
            ("c", "running"), ("b", "done"), ("a", "halved"), ("d", "waiting"),
        ]  # fmt: skip
        assert [row.can_stop for row in rows] == [True, False, False, False]
        assert rows[0].value == 1.3 and rows[0].options == {"lora_r": 8, "learning_rate": 3e-3}
        assert runs.get("sweep/c").summary().state == "running" and runs.get("sweep").summary().state == "running"
        control.stop_run(tmp_path, "sweep/c")
        assert (folder / "c/stop").exists() and runs.list_jobs("sweep")[0].state == "stopping"
        for act in (control.save_run, control.resume_run, control.delete_run):
            with pytest.raises(ConfigError, match="sweep|alive"):
                act(tmp_path, "sweep/c")
        with pytest.raises(ConfigError, match="not running"):
            control.stop_run(tmp_path, "sweep/b")
    (folder / "c/stop").unlink()
    assert runs.list_jobs("sweep")[0].state == "dead"
    assert [row.name for row in runs.list()] == ["sweep"]
    assert [row.name for row in runs.list_with_jobs()] == ["sweep", "sweep/a", "sweep/b", "sweep/c"]
    assert runs.get("sweep/c").series(["eval_loss"])["eval_loss"][1] == [1.3]
    control.delete_run(tmp_path, "sweep/c")
    assert not (folder / "c").exists() and len(runs.list_jobs("sweep")) == 4


def test_a_sweep_that_is_misspelled_breaks_no_page(tmp_path):
    """Catches a traceback for a sweep.json that was written by hand, or leads out of the sweep."""
    folder = make_sweep(tmp_path)
    for text in ("", "[]", '{"jobs": 3}', '{"jobs": [3, {}, {"name": "../../x"}, {"name": "a", "value": "x"}]}'):
        (folder / "sweep.json").write_text(text)
        names = [row.name for row in Runs(tmp_path).list_jobs("sweep")]
        assert names == (["a"] if "value" in text else [])


def test_pages_draw_the_jobs_of_a_sweep(tmp_path):
    """Catches a name that is not escaped, a link whose slash is not, a job without its button, and a chart that leaves
    out an option or stands on its head."""
    folder = make_sweep(tmp_path, phase="train", a="halved")
    runs = Runs(tmp_path)
    with owned(folder):
        rows = runs.list_jobs("sweep")
        drawn = draw_jobs(rows)
        table = draw_runs(runs.list(), {}, _ORDER, (), {"sweep": rows})
    assert drawn.count("Stop this job") == 3 and "run?name=sweep%2Fb" in drawn and "lora_r 16" in drawn
    assert table.count("of-sweep") == 4 and 'data-open="sweep"' in table and "best d: eval loss 1.2" in table
    axes = draw_parallel(rows).data[0].dimensions
    assert [axis.label for axis in axes] == ["lora_r", "learning_rate", "eval loss"]
    assert list(axes[1].ticktext) == ["0.0001", "0.003"] and list(axes[0].values) == [16, 8, 16, 8]
    assert not draw_parallel([]).data


def test_adapters_of_jobs_do_not_take_each_others_place(tmp_path):
    """Catches a zip of another sweep's job of that name, packed earlier."""
    for sweep in ("one", "two"):
        job = make_sweep(tmp_path, sweep) / "a"
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (job / name).write_text(sweep)
            os.utime(job / name, (1e9, 1e9))
        packed = pack_adapter(job, tmp_path / "zips")
        assert packed.name == f"{sweep}-a-adapter.zip"
        with zipfile.ZipFile(packed) as file:
            assert file.read(f"{sweep}-a-adapter/adapter_config.json").decode() == sweep


def test_a_terminal_shows_the_jobs_of_a_sweep(tmp_path, monkeypatch, capsys):
    """Catches jobs that are listed as runs of their own, and a watched sweep that does not tell of its jobs."""
    monkeypatch.chdir(tmp_path)
    make_sweep(tmp_path / "runs", a="halved")
    assert main(["runs"]) == 0
    assert [line[:4] for line in capsys.readouterr().out.splitlines()[1:]] == ["swee", "  a ", "  b ", "  c ", "  d "]
    assert main(["watch", "sweep", "--once"]) == 0
    said = capsys.readouterr().out
    assert "what differs" in said and said.index("lora_r 16, learning_rate 0.003") < said.index("halved")
    assert main(["watch", "sweep/b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "sweep/b"
