"""Programs that drive runs through the web UI's endpoints, against a real server."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile

import pytest
from gradio_client.exceptions import AppError
from helpers.paths import ROOT as REPOSITORY
from helpers.waiting import wait_until

DEMO = {"model_name_or_path": "examples/demo/base", "dataset": "examples/demo/train.jsonl", "cpu": 2}


@pytest.fixture(scope="module")
def call(ui_server):
    """Call an endpoint: `call("get_run", name="first")`."""
    client = ui_server.connect()

    def call(endpoint: str, **arguments: object) -> object:
        return client.predict(api_name=f"/{endpoint}", **arguments)

    return call


@pytest.mark.slow
def test_an_example_drives_a_run_from_its_start_to_its_adapter(ui_server):
    """The example is what people copy: each of its calls must work, in this order, on a run that lives."""
    options = DEMO | {"cpu": 1, "dtype": "float32", "max_steps": 300, "max_train_samples": 300, "max_length": 128}
    options |= {"per_device_train_batch_size": 1, "logging_steps": 1, "save_steps": 1000}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(REPOSITORY / "examples/ui_client.py"), "--url", ui_server.url, "--stop_at", "4"]
    command += ["--name", "by program", *words]
    environment = os.environ | {"LORASHARD_TOKEN": ui_server.token}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr + ui_server.log_path.read_text()
    lines = result.stdout.splitlines()
    losses = [line for line in lines if line.startswith("  step ")]
    steps = [int(line.split()[1]) for line in losses]
    assert steps == list(range(1, 301)), "each step is told once, also across the stop"
    assert any(line.startswith("stopped after step ") for line in lines)
    assert sum(line.startswith("rank ") for line in lines) == 1
    names = zipfile.ZipFile(lines[-1].removeprefix("adapter: ")).namelist()
    assert "by program-adapter/adapter_model.safetensors" in names


def test_the_endpoints_tell_of_a_run(ui_server, call, add_demo_run):
    """A number that JSON does not have, or a type that it does not know, would fail the whole answer."""
    run = add_demo_run(ui_server.root, "told")
    max_steps = json.loads((run / "status.json").read_text())["max_steps"]
    (run / "metrics.jsonl").open("a").write(json.dumps({"step": max_steps + 1, "time": 2e9, "loss": math.nan}) + "\n")
    assert "told" in [row["name"] for row in call("list_runs")]
    told = call("get_run", name="told")
    assert told["max_steps"] == max_steps and told["has_adapter"] and len(told["checkpoints"]) > 1
    assert told["options"]["dataset"].endswith("train.jsonl")
    series = call("get_series", name="told", names=["loss", "eval_loss", "nothing"])
    assert set(series) == {"loss", "eval_loss"} and series["eval_loss"]["steps"][-1] == max_steps
    assert set(call("get_series", name="told", names=[])) > {"loss", "learning_rate"}
    assert [row["rank"] for row in call("get_ranks", name="told")] == [0, 1]
    assert [row["step"] for row in call("get_samples", name="told")][-1] == max_steps
    assert "nan" in [alert["kind"] for alert in call("get_alerts", name="told")]
    assert isinstance(call("get_log", name="told", rank="0", query="rank"), str)
    add_demo_run(ui_server.root, "told again")
    text = (ui_server.root / "told again/config.yaml").read_text()
    (ui_server.root / "told again/config.yaml").write_text(text.replace("lora_r: 16", "lora_r: 8"))
    assert call("compare_runs", names=["told", "told again"]) == [
        {"option": "lora_r", "values": {"told": "16", "told again": "8"}}
    ]
    assert call("delete_run", name="told again") is True
    assert not (ui_server.root / "told again").exists()


MISTAKES = {
    "an option that is none": ("plan", {"options": DEMO | {"learning_rte": 1}}, "learning_rate"),
    "a value of another type": ("start_run", {"name": "a", "options": DEMO | {"lora_r": "many"}}, "lora_r"),
    "nothing": ("start_run", {"name": "a", "options": {}}, "model_name_or_path"),
    "a file elsewhere": ("plan", {"options": DEMO | {"model_name_or_path": "/etc"}}, "--allow"),
    "a model's code": ("start_run", {"name": "a", "options": DEMO | {"trust_remote_code": True}}, "trust_remote_code"),
    "a folder elsewhere": ("start_run", {"name": "../a", "options": DEMO}, "name of a"),
    "its own folder": ("start_run", {"name": "a", "options": DEMO | {"output_dir": "/tmp/x"}}, "output_dir"),
    "another type": ("get_run", {"name": ["finished"]}, "name: "),
    "a number in place of text": ("compare_runs", {"names": [1]}, "names: "),
    "text in place of options": ("plan", {"options": "all"}, "options: "),
    "an unknown run": ("stop_run", {"name": "none"}, "none"),
    "a climbing name": ("delete_run", {"name": ".."}, "name of a"),
    "an unknown job": ("get_job", {"job_id": "../x"}, "job"),
    "a merge elsewhere": ("start_merge", {"name": "finished", "out": "/tmp/merged"}, "out: "),
    "an unknown log": ("get_log", {"name": "finished", "rank": "../config.yaml"}, "../config.yaml"),
}


def test_mistakes_are_answered_in_the_command_lines_words(call, add_demo_run, ui_server):
    """`AppError: None` tells a program's author nothing; a traceback tells too much."""
    add_demo_run(ui_server.root, "finished")  # other files' tests have runs called "first" here
    for mistake, (endpoint, arguments, expected) in MISTAKES.items():
        with pytest.raises(AppError) as error:
            call(endpoint, **arguments)
        said = str(error.value)
        assert expected in said and "\n" not in said and said not in ("None", "Error", ""), mistake
    assert not (ui_server.root / "a").exists()


def test_pages_events_are_no_endpoints(call, ui_server):
    """An event of a page takes the page's own state: as an endpoint it is a second, unlooked-at way in."""
    info = ui_server.connect().view_api(return_format="dict", print_info=False)
    assert not info["unnamed_endpoints"] and "/list_runs" in info["named_endpoints"]


@pytest.mark.slow  # a process that checks loads torch
def test_a_slow_answer_keeps_nobody_waiting(call, ui_server):
    """Gradio's default is one at a time of each event: a second tab waits for the first tab's check of its data."""
    slow = ui_server.connect().submit(options=DEMO | {"seed": 7}, api_name="/validate")
    wait_until(lambda: slow.status().code.name == "PROCESSING")
    with pytest.raises(AppError, match="model_name_or_path"):
        call("validate", options={})
    assert not slow.done()
    slow.result(timeout=100)
