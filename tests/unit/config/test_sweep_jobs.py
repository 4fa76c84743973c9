"""Sweeps: which jobs the options make, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorashard.config.bounds import TRAINER_BOUNDS
from lorashard.config.options import read_trainer_options
from lorashard.config.run_config import RunConfig
from lorashard.config.sweep import (
    ADAPTER_JOB_OPTIONS,
    DATA_JOB_OPTIONS,
    JOB_OPTIONS,
    LOSS_JOB_OPTIONS,
    MOST_JOBS,
    OPTIMIZER_JOB_OPTIONS,
    SweepStop,
    read_jobs,
    read_stop,
)
from lorashard.errors import ConfigError

EVALUATED = "eval_dataset: e.jsonl\neval_strategy: steps\neval_steps: 50\n"
TWO = "sweep: {jobs: [{name: a}, {name: b}]}\n"


def resolve(tmp_path: Path, text: str, *words: str) -> RunConfig:
    """Return the options of a file whose first three lines are those that every run needs."""
    path = tmp_path / "run.yaml"
    path.write_text(f"model: org/model\ndataset: rows.jsonl\noutput_dir: out\n{text}", encoding="utf-8")
    return RunConfig.resolve(path, words)


def test_grid_and_list_become_jobs_of_their_own(tmp_path: Path) -> None:
    """Catches a lost combination, an option that does not reach its job, and words read other than at the top."""
    text = """
warmup_steps: 5
learning_rate: 3.0e-4
optim: adamw_torch
trust_remote_code: true
sweep:
  grid: {r: [8, 16], lr: [1e-4, 2.0e-4]}
  jobs:
  - {name: a, lora_alpha: 4, use_rslora: yes, optim: sgd, dataset: other.jsonl}
max_steps: 10
"""
    jobs = read_jobs(resolve(tmp_path, text))
    assert [(job.name, job.options) for job in jobs] == [
        ("lora_r-8_learning_rate-0.0001", {"lora_r": 8, "learning_rate": 1e-4}),
        ("lora_r-8_learning_rate-0.0002", {"lora_r": 8, "learning_rate": 2e-4}),
        ("lora_r-16_learning_rate-0.0001", {"lora_r": 16, "learning_rate": 1e-4}),
        ("lora_r-16_learning_rate-0.0002", {"lora_r": 16, "learning_rate": 2e-4}),
        ("a", {"lora_alpha": 4, "use_rslora": True, "optim": "sgd", "dataset": "other.jsonl"}),
    ]
    first, last = jobs[0].config, jobs[-1].config
    assert (first.lora_r, first.trainer_options["learning_rate"], first.dataset) == (8, 1e-4, "rows.jsonl")
    assert (last.lora_r, last.use_rslora, last.trainer_options["optim"], last.dataset) == (
        16,
        True,
        "sgd",
        "other.jsonl",
    )
    assert last.trainer_options["learning_rate"] == 3e-4
    assert {job.config.trainer_options["warmup_steps"] for job in jobs} == {5}
    assert [job.config.output_dir for job in jobs] == [f"out/{job.name}" for job in jobs]


@pytest.mark.parametrize(
    "words", ["", "--placement host --bf16 --quantization nf4 --resident_layers auto", "--method dpo"]
)
def test_a_job_is_the_run_that_it_would_be_alone(tmp_path: Path, words: str) -> None:
    """Catches a common option that changes, or becomes a choice, on its way into a job, and a job that is a sweep."""
    sweep = resolve(tmp_path, f"save_steps: 7\n{TWO}", *words.split())
    alone = resolve(tmp_path, "save_steps: 7\n", *words.split(), "--output_dir", "out/a")
    job = read_jobs(sweep)[0].config
    assert job == alone and job.model_fields_set == alone.model_fields_set
    (tmp_path / "again.yaml").write_text(job.to_yaml(), encoding="utf-8")
    assert RunConfig.resolve(tmp_path / "again.yaml", ()).to_yaml() == job.to_yaml()


def test_a_run_without_a_sweep_has_no_jobs(tmp_path: Path) -> None:
    """Catches a run alone that is taken for a sweep of one."""
    assert read_jobs(resolve(tmp_path, "")) == () == read_jobs(resolve(tmp_path, "sweep: null\n"))


def test_a_sweep_comes_from_a_file_a_command_line_or_python(tmp_path: Path) -> None:
    """Catches a way to give a sweep that reads another one, and a sweep that is lost in the ranks' options file."""
    file = tmp_path / "sweep.yaml"
    file.write_text("jobs:\n- {name: 7, lora_r: 4}\n- name: b\n  lora_r: 8\n", encoding="utf-8")
    mapping = {"jobs": [{"name": 7, "lora_r": 4}, {"name": "b", "lora_r": 8}]}
    words = '{"jobs": [{"name": 7, "lora_r": 4}, {"name": "b", "lora_r": 8}]}'
    named = resolve(tmp_path, "", "--sweep", str(file))
    named.to_file(tmp_path / "options.json")
    (tmp_path / "asked.yaml").write_text(named.to_yaml(), encoding="utf-8")
    ways = (
        named,
        resolve(tmp_path, f"sweep: {file}\n"),
        resolve(tmp_path, "sweep: {jobs: [{name: never}]}\n", "--sweep", words),
        RunConfig(model="org/model", dataset="rows.jsonl", output_dir="out", sweep=mapping),
        RunConfig.from_file(tmp_path / "options.json"),
        RunConfig.resolve(tmp_path / "asked.yaml", ()),
    )
    for config in ways:
        assert [(job.name, job.options) for job in read_jobs(config)] == [("7", {"lora_r": 4}), ("b", {"lora_r": 8})]
        assert config.sweep == mapping


def test_what_may_differ_by_job_are_options_that_exist() -> None:
    """Catches a job's option that no method has, one that is common too, and one of the base that jobs share."""
    known = {*RunConfig.model_fields, *read_trainer_options("SFTConfig"), *read_trainer_options("DPOConfig")}
    groups = (ADAPTER_JOB_OPTIONS, OPTIMIZER_JOB_OPTIONS, LOSS_JOB_OPTIONS, DATA_JOB_OPTIONS)
    assert known >= JOB_OPTIONS and sum(map(len, groups)) == len(JOB_OPTIONS)
    assert {"lora_r", "init_lora_weights", "loraplus_lr_ratio", "layers_to_transform", "use_dora"} <= JOB_OPTIONS
    common = {"quantization", "numerics", "torch_compile", "placement", "dtype", "max_length", "max_steps", "method"}
    assert not JOB_OPTIONS & (common | {name for name in TRAINER_BOUNDS if "batch_size" in name or "steps_" in name})


@pytest.mark.parametrize(
    ("text", "option", "line", "mentions"),
    [
        # The shape of a sweep
        ("sweep: {}", "sweep", 4, "at least one job"),
        ("sweep: {jobs: []}", "sweep", 4, "at least one job"),
        ("sweep: {grid: {}}", "sweep.grid", 4, "lists of values nothing"),
        ("sweep:\n  grid:\n    lora_r: []", "sweep.grid.lora_r", 6, "[8, 16] nothing"),
        ("sweep:\n  grid:\n    lora_r: 8", "sweep.grid.lora_r", 6, "[8, 16] found 8"),
        ("sweep:\n  grid: {r: [8], lora_r: [4]}", "sweep.grid.lora_r", 5, "twice lora_r"),
        ("sweep: {jobs: {name: a}}", "sweep.jobs", 4, "a list"),
        ("sweep:\n  jobs:\n  - lora_r: 4", "sweep.jobs.0", 6, "name: a"),
        ("sweep:\n  jobs:\n  - a", "sweep.jobs.0", 6, "mapping 'a'"),
        ("sweep:\n  job: []", "sweep.job", 5, "'jobs'"),
        ("sweep:\n  lora_r: [4]", "sweep.lora_r", 5, "top level"),
        ("sweep: [a]", "sweep", 4, "a mapping"),
        # Names
        ("sweep:\n  jobs: [{name: a},\n    {name: a}]", "name", 6, "two jobs 'a'"),
        ("sweep:\n  jobs: [{name: a},\n    {name: A}]", "name", 6, "'A' 'a' disks"),
        ("sweep:\n  grid: {lora_r: [8, 8]}", "name", 5, "two jobs 'lora_r-8'"),
        ("sweep:\n  jobs:\n  - name: a/b", "name", 6, "'a/b' letters"),
        ("sweep:\n  jobs:\n  - name: ..", "name", 6, "'..' letters"),
        (f"sweep:\n  jobs:\n  - name: {'a' * 201}", "name", 6, "at most 200"),
        ("sweep:\n  jobs:\n  - name: logs", "name", 6, "'logs'"),
        ("sweep:\n  jobs:\n  - name: sweep.json", "name", 6, "'sweep.json'"),
        # Options of a job
        ("sweep:\n  jobs:\n  - name: a\n    max_length: 9", "max_length", 7, "job a top level adapter"),
        ("sweep:\n  jobs:\n  - name: a\n    quantization: nf4", "quantization", 7, "job a top level"),
        ("sweep:\n  grid:\n    per_device_train_batch_size: [1, 2]", "per_device_train_batch_size", 6, "top level"),
        ("sweep:\n  grid:\n    torch_compile: [yes, no]", "torch_compile", 6, "top level"),
        ("sweep:\n  grid:\n    method: [sft, dpo]", "method", 6, "top level"),
        ("sweep:\n  jobs:\n  - name: a\n    lerning_rate: 1", "lerning_rate", 7, "job a 'learning_rate'?"),
        ("sweep:\n  jobs:\n  - name: a\n    beta: 1", "beta", 7, "dpo sft"),
        ("sweep:\n  jobs:\n  - name: a\n    lora_r: many", "lora_r", 7, "job a 'many'"),
        ("sweep:\n  jobs:\n  - name: a\n    lora_r: 0", "lora_r", 7, "job a 0"),
        ("sweep:\n  jobs:\n  - name: a\n    r: 1\n    lora_r: 2", "lora_r", 8, "job a twice"),
        ("sweep:\n  grid:\n    learning_rate: [1e-4,\n      -1]", "learning_rate", 7, "grid -1"),
        ("sweep:\n  jobs:\n  - name: a\n    layers_to_transform: [1]", "layers_to_transform", 7, "job a all-linear"),
        ("sweep:\n  jobs:\n  - {name: a, init_lora_weights: pissa}", "init_lora_weights", 6, "job a rewrites 'pissa'"),
        ("init_lora_weights: olora\nsweep: {grid: {lora_r: [8]}}", "init_lora_weights", 5, "job lora_r-8 rewrites"),
        # Beside the others
        ("method: kto\nsweep: {grid: {lora_r: [8]}}", "method", None, "sft dpo kto"),
        (f"resume: out/checkpoint-3\n{TWO}", "resume_from_checkpoint", None, "auto true"),
        (f"profile_steps: 3-5\n{TWO}", "profile_steps", None, "job alone"),
        (f"sp_size: 2\n{TWO}", "sequence_parallel_size", None, "jobs of a sweep cannot share"),
        (f"torch_compile: true\n{TWO}", "torch_compile", None, "graph alone"),
        (f"numerics: fused\n{TWO}", "numerics", None, "graph alone"),
        (f"auto_find_batch_size: true\n{TWO}", "auto_find_batch_size", None, "per_device_train_batch_size"),
        (f"report_to: wandb\n{TWO}", "report_to", None, "one run tensorboard 'wandb'"),
        (f"report_to: [tensorboard, all]\n{TWO}", "report_to", None, "'all'"),
        (f"push_to_hub: true\nhub_model_id: me/x\n{TWO}", "hub_model_id", None, "overwrite own"),
        ("sweep: {grid: {dataset: [a.jsonl, b.jsonl]}}", "max_steps", None, "dataset num_train_epochs"),
        ("packing: true\nshuffle_dataset: true\nsweep: {grid: {seed: [1, 2]}}", "max_steps", None, "seed"),
        # Stopping
        ("sweep_stop: {metric: eval_loss, keep: 0.5, every: 50}", "sweep_stop", None, "give sweep"),
        (f"{TWO}sweep_stop: {{metric: eval_loss, keep: 0.5, every: 50}}", "sweep_stop", None, "eval_dataset"),
        (f"{TWO}{EVALUATED}sweep_stop: {{metric: eval_loss, keep: 1, every: 50}}", "sweep_stop.keep", None, "less 1"),
        (f"{TWO}{EVALUATED}sweep_stop: {{metric: eval_loss, keep: 0.5}}", "sweep_stop.every", None, "every"),
        (f"{TWO}{EVALUATED}sweep_stop: {{metric: eval_loss, kep: 1}}", "sweep_stop.keep", None, "keep"),
        (f"{TWO}{EVALUATED}sweep_stop: {{metric: loss, keep: 0.5, every: 50}}", "sweep_stop.metric", None, "eval_loss"),
        (f"{TWO}{EVALUATED}sweep_stop: {{metric: eval_rewards/margins, keep: 0.5, every: 50}}", "sweep_stop.metric",
         None, "eval_loss"),
        (f"{TWO}{EVALUATED}sweep_stop: {{metric: eval_loss, keep: 0.5, every: 75}}", "sweep_stop.every", None, "50 75"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_place(
    tmp_path: Path, text: str, option: str, line: int | None, mentions: str
) -> None:
    """Catches a job that fails in the ranks, after the base was loaded, or whose mistake nobody can find."""
    with pytest.raises(ConfigError) as caught:
        read_jobs(resolve(tmp_path, text + "\n"))
    assert caught.value.option == option
    assert [word for word in mentions.split() if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)
    place = str(caught.value.where or "")
    assert line is None or f"{place}, ".startswith(f"{tmp_path}/run.yaml, line {line}, "), place


def test_a_mistake_in_a_sweeps_own_file_names_that_file(tmp_path: Path) -> None:
    """Catches the place in another file than the one that was written."""
    file = tmp_path / "many.yaml"
    for text, place in (("grid:\n  lora_r: [0]\n", ", line 2, grid"), ("", ""), ("jobs: [\n", ", line 2")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            read_jobs(resolve(tmp_path, "", "--sweep", str(file)))
        assert str(caught.value.where) == f"{file}{place}"
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, "", "--sweep", str(tmp_path / "absent.yaml"))
    assert caught.value.option == "sweep" and "absent.yaml" in str(caught.value)


def test_many_jobs_are_asked_about(tmp_path: Path) -> None:
    """Catches a grid that fills a disk with runs because of one value too many."""
    seeds = ", ".join(map(str, range(MOST_JOBS)))
    grid = f"sweep: {{grid: {{seed: [{seeds}]}}}}\n"
    assert len(read_jobs(resolve(tmp_path, grid))) == MOST_JOBS
    more = grid.replace("[0,", "[0, 99,")
    huge = "sweep: {grid: {" + ", ".join(f"{name}: [{seeds}]" for name in ("seed", "data_seed", "lora_alpha")) + "}}\n"
    for text in (more, huge.replace("[0,", "[64,")):
        with pytest.raises(ConfigError, match="--yes"):
            read_jobs(resolve(tmp_path, text))
    assert len(read_jobs(resolve(tmp_path, more, "--yes"))) == MOST_JOBS + 1


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"use_dora": [True, False]}, ["use_dora-true", "use_dora-false"]),
        ({"lora_target_modules": ["all-linear", ["q_proj", "v_proj"]]}, ["all-linear", "q_proj+v_proj"]),
        ({"dataset": ["data/a.jsonl", "org/set"]}, ["dataset-data_a.jsonl", "dataset-org_set"]),
        ({"learning_rate": [1e-5, 3]}, ["learning_rate-1e-05", "learning_rate-3"]),
        ({"lr_scheduler_kwargs": [{"num_cycles": 2}]}, ["lr_scheduler_kwargs-num_cycles_2"]),
    ],
)
def test_a_grids_names_are_folders(values: dict[str, Any], names: list[str]) -> None:
    """Catches a value that is spelled as a path or in Python, or that leaves the name empty."""
    jobs = read_jobs(RunConfig(model="m", dataset="d", output_dir="o", max_steps=3, sweep={"grid": values}))
    assert all(job.name.endswith(name) for job, name in zip(jobs, names, strict=True))


def test_halving_keeps_the_share_that_it_says(tmp_path: Path) -> None:
    """Catches a last job that is given up too, a product that is rounded up wrongly, and a metric taken upside down."""
    kept = [
        SweepStop(metric="eval_loss", keep=keep, every=1).count_kept(n) for n, keep in ((1, 0.5), (3, 0.5), (30, 0.1))
    ]
    assert kept == [1, 2, 3]
    text = "method: dpo\n" + TWO + EVALUATED + "sweep_stop: {metric: eval_rewards/margins, keep: 0.5, every: 100}\n"
    stop = read_stop(resolve(tmp_path, text))
    assert stop is not None and stop.is_greater_better and stop.every == 100
    assert not SweepStop(metric="eval_loss", keep=0.5, every=1).is_greater_better
    assert len(read_jobs(resolve(tmp_path, text))) == 2


def test_the_example_is_four_jobs_on_the_demos_base() -> None:
    """Catches an example that names an option or a file that is gone, or that trains another number of adapters."""
    root = Path(__file__).parents[3]
    config = RunConfig.resolve(root / "examples/sweep.yaml", ())
    jobs = read_jobs(config)
    assert [(job.config.lora_r, job.config.trainer["learning_rate"]) for job in jobs] == [
        (4, 1e-3), (4, 5e-3), (16, 1e-3), (16, 5e-3)
    ]  # fmt: skip
    assert all((root / name).exists() for name in (config.model_name_or_path, config.dataset, config.eval_dataset))
