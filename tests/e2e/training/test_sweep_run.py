"""`lorashard finetune` of a sweep: each job is a run of its own, with the bits that it has alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.finetune import LORASHARD, build_task, read_lines, read_losses, run
from helpers.survival import count_steps, finish, is_same_adapter, kill_all, kill_when, sees, start, train
from helpers.waiting import wait_until

CPU_BUDGET_S = 230  # some ten forked runs, most of several jobs

STEPS = 10
JOBS: list[dict[str, Any]] = [
    {"name": "few", "lora_r": 4, "learning_rate": 5e-3},
    {"name": "dora", "lora_r": 8, "use_dora": True, "seed": 5, "lora_dropout": 0.2},
    {"name": "other-rows", "target_modules": "q_proj,v_proj", "lr_scheduler_type": "constant"},
]
NAMES = [job["name"] for job in JOBS]
WILD = {"name": "wild", "lora_r": 4, "learning_rate": 1e30}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """The same task as elsewhere, on more layers than stay in the slots: each step gathers."""
    folder = build_task(tmp_path_factory.mktemp("task"), num_layers=5)
    (folder / "others.jsonl").write_text("".join((folder / "rows.jsonl").read_text().splitlines(keepends=True)[40:70]))
    JOBS[2]["dataset"] = str(folder / "others.jsonl")
    return folder


def make_sweep(task: Path, out: str, jobs: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the options of a sweep, for `helpers.survival`."""
    file = task / f"{out}.yaml"
    file.write_text(yaml.safe_dump({"sweep": {"jobs": jobs}, **options}))
    return {
        "config": file,
        "max_steps": STEPS,
        "eval_dataset": task / "eval.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
    }


def read_rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((folder / "sweep.json").read_text())["jobs"]}


def read_status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


@pytest.fixture(scope="module")
def whole(task) -> Path:
    """A sweep of three jobs that nothing interrupts."""
    return train(task, "whole", **make_sweep(task, "whole", JOBS))


def test_a_sweep_leaves_a_whole_run_for_each_job(whole):
    """Catches jobs whose folders the UI, chat or export cannot read, and rows that do not say how a job ended."""
    rows = read_rows(whole)
    assert list(rows) == NAMES and read_status(whole)["phase"] == "done"
    for name in NAMES:
        folder, row = whole / name, rows[name]
        assert (row["state"], row["step"], row["max_steps"], row["why"]) == ("done", STEPS, STEPS, "")
        assert list(read_losses(folder)) == list(range(1, STEPS + 1))
        evaluations = [line for line in read_lines(folder / "metrics.jsonl") if "eval_loss" in line]
        assert [line["step"] for line in evaluations] == [2, 4, 6, 8, 10]
        assert row["value"] == evaluations[-1]["eval_loss"]
        status = read_status(folder)
        assert (status["phase"], status["step"], status["world_size"], status["error"]) == ("done", STEPS, 2, None)
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-8"]
        assert (folder / "config.yaml").exists() and (folder / "tokenizer.json").exists()
        assert yaml.safe_load((folder / "config.yaml").read_text()).get("sweep") is None
    assert rows["dora"]["options"] == {key: value for key, value in JOBS[1].items() if key != "name"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dora", "few", "other-rows"])
def test_a_job_is_the_run_that_its_own_options_make_alone(task, whole, name):
    """Catches random numbers, rows, schedules or options of one job that another has, and a config.yaml that lies."""
    words = ["--config", str(whole / name / "config.yaml"), "--output_dir", str(task / f"{name} alone"), "--cpu", "2"]
    result = run([*LORASHARD, "finetune", *words], task)
    assert result.returncode == 0, result.stdout + result.stderr
    assert is_same_adapter(whole / name, task / f"{name} alone")
    assert read_losses(whole / name) == read_losses(task / f"{name} alone")


@pytest.mark.slow
def test_a_killed_sweep_ends_as_the_uninterrupted_one(task, whole):
    """Catches jobs that resume from another step, order or random state than they were killed at."""
    options, out = make_sweep(task, "killed", JOBS), task / "killed"
    process = start(task, "killed", last_step=5, **options)
    try:
        # The first job waits before its next step, while the others have still to end theirs.
        assert kill_when(process, lambda: count_steps(out / NAMES[0]) >= 5, "1"), (task / "killed.log").read_text()
    finally:
        kill_all(process)
    assert process.returncode == 1 and read_status(out)["phase"] == "failed"
    train(task, "killed", **options)
    for name in NAMES:
        assert is_same_adapter(out / name, whole / name)
        assert read_losses(out / name) == read_losses(whole / name)
        assert read_rows(out)[name]["state"] == "done"


@pytest.mark.slow
def test_a_sweep_that_one_rank_was_asked_to_stop_stops_on_all(task, whole):
    """Catches a rank that takes the end of all jobs for the sweep's, and jobs that are not saved."""
    options, out = make_sweep(task, "asked", JOBS), task / "asked"
    assert finish(start(task, "asked", stop=(3, 1), **options), task, "asked") == 75
    assert read_status(out)["phase"] == "stopped"
    for name in NAMES:
        row = read_rows(out)[name]
        assert row["state"] == "stopped" and (out / name / f"checkpoint-{row['step']}").exists()
    train(task, "asked", **options)
    assert all(is_same_adapter(out / name, whole / name) for name in NAMES)


@pytest.mark.slow
def test_a_file_stops_one_job_which_can_be_resumed(task, whole):
    """Catches a file that stops the others or has no effect, that stays and stops the job again, and lost steps."""
    options, out = make_sweep(task, "stopped", JOBS), task / "stopped"
    process = start(task, "stopped", slow_s=0.02, **options)
    try:
        wait_until(lambda: process.poll() is not None or count_steps(out / "dora") >= 2, deadline_s=180)
        (out / "dora" / "stop").touch()
    finally:
        assert finish(process, task, "stopped") == 0, (task / "stopped.log").read_text()[-3000:]
    rows = read_rows(out)
    assert [rows[name]["state"] for name in NAMES] == ["done", "stopped", "done"]
    step = rows["dora"]["step"]
    status = read_status(out / "dora")
    assert 2 <= step < STEPS and (status["phase"], status["step"]) == ("stopped", step)
    assert (out / "dora" / f"checkpoint-{step}").exists() and not (out / "dora" / "stop").exists()
    assert not (out / "dora" / "adapter_config.json").exists()
    assert read_status(out)["phase"] == "done"
    assert all(is_same_adapter(out / name, whole / name) for name in ("few", "other-rows"))
    train(task, "stopped", **options)
    assert all(is_same_adapter(out / name, whole / name) for name in NAMES)
    assert read_losses(out / "dora") == read_losses(whole / "dora")


@pytest.mark.slow
def test_halving_gives_the_losers_up_for_good(task, whole):
    """Catches the better jobs given up, losers that a resume trains on, and survivors that a loser has changed."""
    rule = {"metric": "eval_loss", "keep": 0.5, "every": 4}
    options, out = make_sweep(task, "halved", JOBS, sweep_stop=rule), task / "halved"

    def read_value(name: str, step: int) -> float:
        lines = read_lines(whole / name / "metrics.jsonl")
        return next(line["eval_loss"] for line in lines if "eval_loss" in line and line["step"] == step)

    ranked = sorted(NAMES, key=lambda name: read_value(name, 4))
    second, best = sorted(ranked[:2], key=lambda name: -read_value(name, 8))
    train(task, "halved", **options)
    rows = read_rows(out)
    assert {name: rows[name]["state"] for name in NAMES} == {best: "done", second: "halved", ranked[2]: "halved"}
    assert (rows[ranked[2]]["step"], rows[second]["step"]) == (4, 8)
    assert (out / second / "checkpoint-8").exists() and not (out / second / "checkpoint-9").exists()
    assert "step 4" in rows[ranked[2]]["why"] and read_status(out)["phase"] == "done"
    assert is_same_adapter(out / best, whole / best)
    train(task, "halved", **options)
    assert {name: (row["state"], row["step"]) for name, row in read_rows(out).items()} == {
        name: (row["state"], row["step"]) for name, row in rows.items()
    }


@pytest.mark.slow
def test_a_job_that_diverges_fails_alone(task, whole):
    """Catches a diverging job that ends or changes the others, and a sweep that hides it behind an exit code of 0."""
    options, out = make_sweep(task, "wild", [JOBS[0], WILD]), task / "wild"
    assert finish(start(task, "wild", **options), task, "wild") == 1
    said = (task / "wild.log").read_text()
    errors = [line for line in said.splitlines() if "error: " in line]
    assert len(errors) == 1 and "wild" in errors[0] and "1 of 2 jobs" in errors[0], said
    assert "Traceback" not in said, said
    rows = read_rows(out)
    assert [rows[name]["state"] for name in ("few", "wild")] == ["done", "failed"] and rows["wild"]["why"]
    assert [read_status(folder)["phase"] for folder in (out / "few", out / "wild", out)] == ["done", "failed", "failed"]
    assert is_same_adapter(out / "few", whole / "few")


@pytest.mark.slow
def test_an_overwriting_sweep_that_is_killed_leaves_nothing_of_the_earlier_one(task, whole):
    """Catches a job that a resume takes on from the checkpoints that it was to overwrite, since another job had begun
    before the kill."""
    options, out = make_sweep(task, "overwritten", JOBS), task / "overwritten"
    for name in NAMES:
        shutil.copytree(whole / name, out / name)
    overwriting = {"resume": "false", "overwrite_output_dir": "true"} | options
    process = start(task, "overwritten", last_step=0, **overwriting)
    try:  # the first job stays in its first step, and the others would only begin after it
        assert kill_when(process, sees(task, "overwritten_rows_0.jsonl"), "all"), (task / "overwritten.log").read_text()
    finally:
        kill_all(process)
    assert list(out.glob("*/checkpoint-*")) == list(out.glob("*/adapter_model.safetensors")) == []
    assert read_status(out)["has_begun"]
