"""The run folder's files, and what the trainer's callback writes there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import build_base
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

import lorashard
from lorashard import api
from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.model.saved import find_adapter
from lorashard.planning.auto import plan_given
from lorashard.planning.choose import PlanError, explained_planning
from lorashard.planning.run_plan import describe_base, describe_training
from lorashard.runs import checkpoints as manifest
from lorashard.runs.events import read_events
from lorashard.runs.folder import Run
from lorashard.runtime import join as joining
from lorashard.training import one_run
from lorashard.training.callbacks import RunCallback
from lorashard.training.meter import RankMeter


def test_a_number_that_is_none_leaves_valid_json(tmp_path):
    """Python's own writer puts a bare NaN, which browsers and other readers refuse: the whole file would be lost."""
    Run(tmp_path, 0, 1).add_metrics({"grad_norm": float("nan"), "loss": float("inf"), "step": 1})
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert line == {"grad_norm": "nan", "loss": "inf", "step": 1}
    assert float(line["loss"]) == float("inf")


def leave_a_killed_run(folder: Path, num_ranks: int) -> None:
    """What a run that saved step 4 leaves when it is killed as it writes the lines of step 6."""
    for rank in range(num_ranks):
        run = Run(folder, rank, num_ranks)
        for step in range(1, 6):
            run.add_metrics({"step": step, "loss": 1.0})
            run.add_rank_line({"step": step})
    for path in folder.rglob("*.jsonl"):
        path.write_bytes(path.read_bytes() + b'{"step": 6, "lo')


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_that_goes_on_has_each_step_once(tmp_path):
    """The steps between the last checkpoint and the kill twice in metrics.jsonl; half a line that no reader takes."""
    leave_a_killed_run(tmp_path, 3)
    for rank in range(2):  # one fewer
        run = Run(tmp_path, rank, 2)
        run.begin("", resumed_step=4)
        run.add_metrics({"step": 5})
        run.add_rank_line({"step": 5})
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    for rank, expected in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4])):
        assert steps_in(tmp_path / "ranks" / f"rank_{rank}.jsonl") == expected


def test_a_new_run_keeps_nothing_of_another(tmp_path):
    """Lines of a rank that the new run does not have, taken for its own; folders deleted that no run has written."""
    leave_a_killed_run(tmp_path, 3)
    (tmp_path / "checkpoint-best").mkdir()  # a person's own
    for rank in (1, 0):
        Run(tmp_path, rank, 2).begin("", resumed_step=None)
    assert [event["kind"] for event in read_events(tmp_path)] == ["start"]
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["events.jsonl"]
    assert (tmp_path / "checkpoint-best").exists()


def test_the_adapter_of_a_run_is_that_of_its_newest_complete_checkpoint(tmp_path):
    """A checkpoint of which a file was lost or cut, taken for the trained adapter by generate, eval and merge."""
    tensors = {"base_model.model.lora_A.weight": torch.ones(2, 2)}
    for step in (2, 4):
        partial = manifest.place_partial(tmp_path / f"checkpoint-{step}")
        partial.mkdir()
        save_file(tensors, partial / "adapter_model.safetensors")
        (partial / "adapter_config.json").write_text("{}")
        (partial / "optimizer.pt").write_bytes(b"1234")
        manifest.publish(tmp_path / f"checkpoint-{step}", {})
    assert find_adapter(tmp_path).name == "checkpoint-4"
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"12")
    assert find_adapter(tmp_path).name == "checkpoint-2"
    for step in (2, 4):  # as a bare Trainer leaves them
        (tmp_path / f"checkpoint-{step}" / "manifest.json").unlink()
    assert find_adapter(tmp_path).name == "checkpoint-4"


def test_tokens_per_second_leave_evaluations_and_saves_out(tmp_path, monkeypatch):
    """With the pause in, the speed seems to drop after each evaluation."""
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    model = lorashard.shard(get_peft_model(build_base(), LoraConfig(target_modules=["q_proj"])))
    callback = RunCallback(Run(tmp_path, 0, 1), RankMeter(api.engine_of(model), 1))
    state = SimpleNamespace(global_step=0, max_steps=2)

    def advance(seconds, event, **kwargs):
        now_s[0] += seconds
        getattr(callback, f"on_{event}")(None, state, None, **kwargs)

    advance(0, "train_begin")
    advance(10, "step_end")
    advance(0, "log", logs={"loss": 1.0, "num_tokens": 100})
    advance(50, "evaluate")
    advance(30, "save")
    advance(10, "step_end")
    advance(0, "log", logs={"loss": 1.0, "num_tokens": 200})
    speeds = [json.loads(line)["tokens_per_s"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert speeds == [10.0, 10.0]


def test_a_device_that_the_engine_does_not_know_is_refused(monkeypatch):
    """Accelerate chooses Apple's GPU by itself, and Trainer would move the model there."""
    mps = SimpleNamespace(num_processes=1, device=SimpleNamespace(type="mps"), distributed_type="NO")
    monkeypatch.setattr(joining, "PartialState", lambda cpu, backend: mps)
    with pytest.raises(ConfigError, match="ACCELERATE_USE_CPU"):
        joining.join_launch()


def test_only_a_backend_that_was_given_is_called_a_wrong_one(monkeypatch):
    """Catches a script without MASTER_ADDR that is told to look for a ddp_backend that it never named."""

    def refuse(cpu: bool, backend: str | None) -> None:
        raise ValueError("MASTER_ADDR expected, but not set")

    monkeypatch.setattr(joining, "PartialState", refuse)
    with pytest.raises(ValueError, match="^MASTER_ADDR"):
        joining.join_launch()
    with pytest.raises(ConfigError, match="ddp_backend"):
        joining.join_launch("nope")


def test_a_plan_that_cannot_be_made_ends_no_run(tmp_path, monkeypatch):
    """A run with a placement of its own that ends for the sake of a record, or is shown with another run's plan."""

    def has_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def refuse() -> None:
        raise KeyError("max_completion_length")

    options = {"model_name_or_path": str(tmp_path), "output_dir": str(tmp_path), "dtype": "float32"}
    config = RunConfig(dataset="d.jsonl", placement="shard", **options)
    run, told = Run(tmp_path, 0, 1), []
    for describe, find_home in ((refuse, Path.home), (lambda: None, has_no_home)):
        monkeypatch.setattr(Path, "home", find_home)
        (tmp_path / "plan.json").write_text("{}")
        one_run.record_plan(run, one_run._foresee(config, describe, torch.device("cpu"), told.append))
        assert not (tmp_path / "plan.json").exists()
    assert "KeyError: 'max_completion_length'" in told[0] and "RuntimeError" in told[1]


def test_a_plan_that_takes_too_long_is_given_up(tmp_path):
    """A model that is planned token by token for minutes, while the other ranks wait for the first."""
    build_base("llama-tied").config.save_pretrained(tmp_path)
    options = {"model_name_or_path": str(tmp_path), "dataset": "d.jsonl", "output_dir": str(tmp_path), "max_length": 8}
    config = RunConfig(**options, placement="file", dtype="float32")
    known = describe_base(config), describe_training(config, "cpu", 1), torch.device("cpu"), config, 1, None
    with pytest.raises(PlanError, match="TimeoutError"), explained_planning():
        plan_given(*known, longest_s=0)
    assert plan_given(*known).to_json()["rows"]
