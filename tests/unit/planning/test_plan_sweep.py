"""What a sweep costs, many adapters on each visit of one base: from made-up sizes, and from a tiny model's config."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.planning import make_size
from helpers.tiny import build_base
from peft import LoraConfig

import lorashard
from lorashard import api
from lorashard.config.placement import PlacementOptions
from lorashard.config.run_config import RunConfig
from lorashard.planning.activations import Activations, join_activations
from lorashard.planning.auto import BaseModel, Training
from lorashard.planning.choose import Plan, PlanError, SweepCosts, make_plan
from lorashard.planning.costs import Workload, compute_seconds
from lorashard.planning.hardware import Cluster, HardwareOptions, find_gpu_type
from lorashard.planning.run_plan import forecast
from lorashard.planning.sweep import JobCosts, cost_sweep, count_kinds, join_jobs
from lorashard.planning.table import render_plan
from lorashard.planning.tracker import Work

GIB = 2**30
NUM_LAYERS = 8
GPU = replace(find_gpu_type("rtx4090"), flops_per_s=1e14, memory_bytes_per_s=1e12, host_bytes_per_s=25e9, kernel_s=0.0)
ONE_CARD = Cluster(GPU, 1, 1, 6 * GIB, 512 * GIB)
HOST = PlacementOptions(placement="host")


def make_job(
    layer_s: float = 0.01, adapter_bytes: int = 2**20, optimizer: str = "adamw_torch", gib: int = 1
) -> JobCosts:
    """Return a job on a base of 8 GiB: its microbatch saves half a GiB, and computes for `layer_s` in each forward."""
    saved = gib * GIB // 2
    activations = Activations(
        saved_bytes=saved,
        layer_bytes=saved,
        logits_bytes=saved // 4,
        layers_saved=(saved // NUM_LAYERS,) * NUM_LAYERS,
        forward=(Work(layer_s * GPU.flops_per_s),) * NUM_LAYERS,
        backward=(Work(2 * layer_s * GPU.flops_per_s),) * NUM_LAYERS,
        rest=Work(1e12),
        workspace_bytes=100,
        hidden_bytes=saved // 64,
    )
    size = make_size(NUM_LAYERS, GIB, GIB // 8, adapter_bytes)
    return size, Workload(activations, 1000, optimizer=optimizer, dataset_tokens=10**6)


def plan(*jobs: JobCosts, options: PlacementOptions = HOST, cluster: Cluster = ONE_CARD) -> tuple[Plan, SweepCosts]:
    kinds = count_kinds(jobs)
    made = make_plan(*join_jobs(kinds), cluster, options)
    return made, cost_sweep(kinds, made, cluster, options)


def test_one_job_costs_what_it_costs_alone() -> None:
    """Catches a sweep of one that is planned otherwise than the run that it is."""
    job = make_job()
    assert join_jobs(count_kinds([job])) == job
    assert join_activations([(job[1].activations, 1)]) == job[1].activations
    made, costs = plan(job)
    assert made == make_plan(*job, ONE_CARD, HOST)
    assert costs.num_jobs == 1 and costs.step_s == costs.in_turn_s == made.choice.step_s


def test_jobs_keep_what_they_save_and_share_what_a_layer_takes() -> None:
    """Catches activations or logits that are counted once, a layer's own memory that is counted for each job, and a
    waiting job's gradient that is forgotten."""
    small, large = make_job()[1].activations, make_job(gib=3)[1].activations
    both = join_activations([(small, 2), (large, 1)])
    assert both.saved_bytes == 2 * small.saved_bytes + large.saved_bytes == sum(both.layers_saved)
    assert both.logits_bytes == 2 * small.logits_bytes + large.logits_bytes
    assert both.layer_bytes == large.layer_bytes + 2 * small.hidden_bytes
    assert both.workspace_bytes == 100
    for name in ("forward", "backward"):
        assert getattr(both, name) == tuple(work * 3 for work in getattr(small, name))
    assert both.rest == small.rest * 3


def test_each_job_has_an_adapter_and_an_optimizer_of_its_own() -> None:
    """Catches an optimizer's state that is counted once, or as another job's optimizer keeps it."""
    adamw, sgd = make_job(), make_job(adapter_bytes=2**22, optimizer="sgd")
    made, _ = plan(adamw, sgd, adamw)
    assert made.choice.adapter_bytes == 2 * (2 + 2) * 2**20 + 2 * 2**22
    assert made.choice.tokens_per_s * made.choice.step_s == pytest.approx(3000)
    assert made.choice.dataset_s == pytest.approx(made.choice.step_s * 1000)


def test_the_base_is_visited_once_for_all_jobs() -> None:
    """Catches traffic or waiting that grows with the jobs, and compute that does not."""
    job = make_job(layer_s=0.005)
    alone, _ = plan(job)
    made, costs = plan(*[job] * 4)
    row = made.choice
    assert alone.choice.wait_s > alone.choice.step_s / 2
    assert row.copied_bytes == alone.choice.copied_bytes
    activations = job[1].activations
    work = (*activations.forward, *activations.backward, activations.rest)
    compute_s = 4 * sum(compute_seconds(Work(part.flops), GPU) for part in work)
    assert row.step_s - row.wait_s == pytest.approx(compute_s, rel=0.01)
    assert costs.step_s == row.step_s and costs.in_turn_s == pytest.approx(4 * alone.choice.step_s)
    assert costs.in_turn_s > 2 * costs.step_s


def test_as_many_jobs_fit_as_memory_has_room_for() -> None:
    """Catches a number of jobs that does not fit, or after which one more does; and another job's bytes."""
    job = make_job()
    _, costs = plan(make_job(gib=0), job, job)
    fits, _ = plan(*[job] * costs.most_jobs)
    fits_not, too_many = plan(*[job] * (costs.most_jobs + 1))
    assert 1 < costs.most_jobs == too_many.most_jobs
    assert fits.chosen is not None and fits_not.chosen is None and too_many.step_s is None
    assert costs.job_bytes == 4 * 2**20 + (64 + 1) * GIB // 128
    _, none = plan(job, job, cluster=replace(ONE_CARD, free_bytes=GIB))
    assert (none.most_jobs, none.in_turn_s) == (0, None)


def test_a_plan_says_what_a_sweep_takes() -> None:
    """Catches figures that get lost in plan.json or are not shown."""
    made, costs = plan(*[make_job()] * 4)
    made = replace(made, sweep=costs)
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    shown = render_plan(made, 1)
    assert f"sweep: 4 jobs take {costs.step_s:.2f} s a step together" in shown
    assert f"and {costs.most_jobs} like the largest fit" in shown


@pytest.fixture
def forecast_tiny(tmp_path):
    """Plan a run on a tiny Llama's config for two GPUs that are not here."""
    build_base("llama", num_hidden_layers=3).config.save_pretrained(tmp_path)

    def run(**options: Any) -> Plan:
        given = {"max_length": 32, "per_device_train_batch_size": 2, "gpus": 2, "max_steps": 3, "dtype": "bfloat16"}
        config = RunConfig(model_name_or_path=str(tmp_path), output_dir="out", **given | options)
        return forecast(config, HardwareOptions(gpu_type="l4"))[0]

    return run


def test_a_sweeps_options_are_what_is_planned(forecast_tiny) -> None:
    """Catches a job whose adapter or optimizer does not reach the plan, and a sweep of one that is planned as many."""
    alone = {rank: forecast_tiny(lora_r=rank).choice for rank in (2, 4)}
    made = forecast_tiny(sweep={"grid": {"lora_r": [2, 4], "lora_alpha": [1, 2]}})
    assert made.choice.adapter_bytes == 2 * (alone[2].adapter_bytes + alone[4].adapter_bytes)
    assert made.sweep is not None and made.sweep.num_jobs == 4
    assert made.sweep.in_turn_s == pytest.approx(2 * (alone[2].step_s + alone[4].step_s))
    one = forecast_tiny(sweep={"jobs": [{"name": "a", "lora_r": 2}]})
    assert one.rows == forecast_tiny(lora_r=2).rows and one.sweep is None
    lean = forecast_tiny(lora_r=2, sweep={"grid": {"optim": ["sgd", "adamw_torch"]}}).choice
    assert lean.adapter_bytes < 2 * alone[2].adapter_bytes


def test_a_script_plans_for_all_its_adapters(tmp_path, monkeypatch):
    """Catches a placement that fits one adapter's activations and optimizer, and not those of all."""
    build_base().save_pretrained(tmp_path)
    asked = []

    def plan(base: BaseModel, training: Training, *_: object) -> Plan:
        asked.append((base, training))
        raise PlanError("not planned here")

    monkeypatch.setattr(api, "plan_here", plan)
    adapters = {name: LoraConfig(r=rank, task_type="CAUSAL_LM") for name, rank in {"a": 2, "b": 4, "c": 8}.items()}
    lorashard.load(str(tmp_path), adapters=adapters, dtype="float32", per_device_train_batch_size=2, max_length=8)
    [(base, training)] = asked
    assert base.lora is adapters["a"] and [lora.r for lora, _ in training.others] == [4, 8]
    assert all(other.microbatch == training.microbatch for _, other in training.others)
