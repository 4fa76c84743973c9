"""Runs in a terminal: `lorashard runs` and `lorashard watch`."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys

import pytest
from helpers.ui_runs import make_run, make_steps, owned, write_lines
from helpers.waiting import wait_until

from lorashard.cli import main
from lorashard_ui.drawing.run_facts import list_facts, list_figures
from lorashard_ui.pages.run_markup import draw_ranks
from lorashard_ui.pages.runs import draw_runs
from lorashard_ui.reading.runs import Runs


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of runs: one is done, one has failed and its dataset's name would color a terminal."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "first", step=100)
    make_run(tmp_path / "runs", "second-with-a-long-name", 40, phase="failed", error="rank 1: no memory")
    config = tmp_path / "runs/second-with-a-long-name/config.yaml"
    config.write_text('model_name_or_path: org/model\ndataset: "\\e[31mrows.jsonl"\n')
    return tmp_path / "runs"


def test_a_terminal_says_what_the_pages_say(root, capsys):
    """Catches words of another kind than those of the pages, a name that is cut where it is piped, and an escape of a
    run's options that reaches the terminal."""
    assert main(["runs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    runs = Runs(root)
    summaries = runs.list()
    page = draw_runs(summaries, {}, {"by": "begin_s", "down": True})
    headers = [header.strip() for header in head.split("  ") if header.strip()]
    assert len(headers) == 11 and [header for header in headers if header not in page] == []
    assert sorted(line.split()[:2] for line in lines) == [["first", "done"], ["second-with-a-long-name", "failed"]]
    assert main(["watch", "second-with-a-long-name"]) == 1
    said = capsys.readouterr().out
    run = runs.get("second-with-a-long-name")
    page = draw_ranks(run.ranks(), 0.0, False) + run.progress().sentence
    facts = [line.split("  ")[0] for line in said.splitlines()[2:13]]
    page += "".join(
        name
        for name, *_ in (*list_facts(run.summary(), "shard"), *list_figures(run.summary(), run.progress(), [], None))
    )
    assert [name for name in facts if name not in page] == [] and "memory now" in said and "memory now" in page
    assert "Failed: step 40 of 100" in said and "Failed: step 40 of 100" in page
    assert "no memory" in said and "\x1b" not in said


def test_scripts_read_runs_as_json(root, capsys):
    """Catches NaN, which is no JSON, and an exit code that does not say how a run ended."""
    write_lines(root / "first/metrics.jsonl", [{"step": 11, "time": 2000.0, "loss": math.nan}])
    assert main(["runs", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out, parse_constant=pytest.fail)}
    assert rows["first"]["state"] == "done" and rows["first"]["loss"] is None
    assert main(["watch", str(root / "first"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["progress"]["total"] == 100 and len(told["ranks"]) == 2 and told["alerts"]
    for words in (["watch", "third"], ["runs", "--root", "none"], ["watch"]):
        assert main(words) == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_run_is_followed_until_ctrl_c(root):
    """Catches a view that stands still, and a terminal that is left without its cursor."""
    folder = make_run(root, "live", 10, phase="train")
    reader, writer = pty.openpty()
    said = b""

    def read(words: bytes) -> bool:
        nonlocal said
        said += os.read(reader, 1 << 16)
        return words in said

    with owned(folder):
        command = [sys.executable, "-m", "lorashard", "watch", "live", "--root", str(root)]
        process = subprocess.Popen(
            command,
            stdout=writer,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        wait_until(lambda: read(b"step 10 of 100"))
        write_lines(folder / "metrics.jsonl", make_steps([11]))
        wait_until(lambda: read(b"step 11 of 100"))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        wait_until(lambda: read(b"\x1b[?25h"))
    os.close(reader)
    os.close(writer)
