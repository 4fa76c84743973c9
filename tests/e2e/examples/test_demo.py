"""The demo, the benchmark and the example of a sweep, as a person runs them."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest
from helpers import warm
from helpers.forked_ranks import QUICK_START
from helpers.paths import DEMO, ROOT

CPU_BUDGET_S = 320  # the demo is given 180, the sweep trains four jobs, and the benchmark of peers starts ranks


def run(script: str, *arguments: str, start: Callable = subprocess.run) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | QUICK_START
    command = [sys.executable, script, *arguments]
    return start(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def test_the_run_of_the_demo_begins(tmp_path):
    """Catches a base, a tokenizer, rows and a config that do not go together, and questions that were trained on."""
    demo = runpy.run_path(str(DEMO / "run.py"), run_name="demo")
    trained, asked = (set((DEMO / name).read_text().splitlines()) for name in ("train.jsonl", "test.jsonl"))
    assert asked and not trained & asked
    words = demo["FINETUNE"].replace("runs/demo", str(tmp_path / "run")).replace("--cpu 2", "--cpu 1").split()
    shorter = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"]
    result = run("-m", "lorashard", *words, *shorter, start=warm.run)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "run/status.json").read_text())["step"] == 2


@pytest.mark.slow
def test_the_demo_learns_its_task():
    """The first thing that a person runs; it ends with an error below 90 % of the held-out requests.

    Also catches warnings, dicts and broken bars on the person's console.
    """
    result = run("examples/demo/run.py")
    assert result.returncode == 0, result.stdout + result.stderr
    for part in ("Exact match on held-out requests", "What each rank held", "lorashard finetune --model meta-llama"):
        assert part in result.stdout
    for noise in ("Warning", "Failed to", "\r", "{'", "it/s"):
        assert noise not in result.stdout + result.stderr


@pytest.mark.slow
def test_the_example_of_a_sweep_leaves_four_adapters(tmp_path):
    """Catches a worked example that trains no job, compares none, or leaves what is no run of its own."""
    words = ["finetune", "--config", "examples/sweep.yaml", "--output_dir", str(tmp_path / "sweep")]
    result = run("-m", "lorashard", *words, start=warm.run)
    assert result.returncode == 0, result.stdout + result.stderr
    jobs = json.loads((tmp_path / "sweep/sweep.json").read_text())["jobs"]
    assert len(jobs) == 4 and {(job["state"], job["step"]) for job in jobs} == {("done", 40)}
    assert len({job["value"] for job in jobs}) == 4  # the losses of their evaluations
    for job in jobs:
        status = json.loads((tmp_path / "sweep" / job["name"] / "status.json").read_text())
        assert status["phase"] == "done" and (tmp_path / "sweep" / job["name"] / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    """A benchmark that broke since its record was made cannot be repeated. It compares gradients before it times."""
    sizes = ["--layers", "2", "--hidden", "128", "--intermediate", "256", "--vocab", "500", "--sequence", "32"]
    words = [*sizes, "--steps", "2", "--out", str(tmp_path / "record.json")]
    result = run("benchmarks/peers.py", *words, start=warm.run)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "record.json").read_text())["benchmark"] == "peers"
    assert "| lorashard |" in result.stdout
