"""Ranks plan together: one plan for all, from the speeds and the memory of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bases import save_base
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_base
from peft import LoraConfig

import lorashard
from lorashard.config.placement import PlacementOptions
from lorashard.errors import ConfigError
from lorashard.planning.auto import BaseModel, Training, plan_here
from lorashard.planning.choose import Plan, agree_on_plan
from lorashard.planning.probe import probe
from lorashard.planning.trace import Microbatch


def check_agreement(rank: int) -> tuple[int, str]:
    plan = agree_on_plan(100 + rank, lambda free_bytes: Plan("m", "c", free_bytes, (), None, f"rank {rank}"))
    return plan.free_bytes, plan.reason


def test_all_ranks_get_the_plan_of_the_smallest():
    """Catches ranks that plan apart, each for its own memory: they would wait for each other forever."""
    assert run_ranks(check_agreement, 2) == [(100, "rank 0")] * 2


def check_refusal(rank: int) -> str:
    def refuse(free_bytes: int) -> Plan:
        raise ConfigError(f"not with {free_bytes}")

    with pytest.raises(ConfigError) as error:
        agree_on_plan(100 - rank, refuse)
    return str(error.value)


def test_a_plan_that_cannot_be_made_fails_on_all_ranks():
    """Catches rank 0 failing alone, which leaves the others waiting."""
    assert run_ranks(check_refusal, 2) == ["not with 99"] * 2


def check_here(rank: int, folder: str, home: str) -> tuple[str, str]:
    Path.home = classmethod(lambda cls: Path(home))  # type: ignore[method-assign, assignment]
    base = BaseModel(folder, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), torch.float32)
    training = Training(Microbatch(1, 16, "cpu"))
    plan = plan_here(base, training, torch.device("cpu"), PlacementOptions())
    return plan.choice.placement.placement, plan.reason


def test_the_ranks_that_run_plan_together(tmp_path):
    """Catches a plan that differs from rank to rank, or that cannot be made where it is needed."""
    build_base("llama", num_hidden_layers=2).config.save_pretrained(tmp_path / "base")
    first, second = run_ranks(check_here, 2, str(tmp_path / "base"), str(tmp_path))
    assert first == second
    assert first[0] == "replicate"


def check_load(rank: int, base: str, options: dict[str, Any]) -> tuple[bool, int]:
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = lorashard.load(base, lora, dtype=torch.float32, **options)
    stats = lorashard.stats(model)
    return stats.num_gathers == 0 and stats.bytes_at_rest > 0, stats.num_resident


def test_load_plans_when_it_is_given_the_batch(tmp_path, caplog):
    """Catches an `auto` that shards a model that fits on each rank, although the script gives the batch."""
    base = save_base(tmp_path, "llama", num_hidden_layers=2)
    batch = {"per_device_train_batch_size": 2, "max_length": 16}
    assert run_ranks(check_load, 2, base, batch) == [(True, 2 + 2)] * 2  # whole on each rank
    assert run_ranks(check_load, 2, base, {}) == [(True, 0)] * 2
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    with caplog.at_level("WARNING", "lorashard"):
        lorashard.load(base, lora, dtype=torch.float32, activation_checkpointing_layers="auto", **batch)
    assert any("placement: " in record.getMessage() for record in caplog.records)
    with pytest.raises(ConfigError, match="max_length"):
        lorashard.load(base, lora, max_length=16)


def check_probe(rank: int, folder: str) -> list:
    cache = Path(folder) / f"rank_{rank}" / "speeds.json"
    hardware = probe(torch.device("cpu"), torch.float32, cache)
    again = probe(torch.device("cpu"), torch.float32, cache)
    return [hardware == again, hardware.peer_bytes_per_s, hardware.flops_per_s, cache.exists()]


def test_speeds_are_measured_once_and_are_the_same_on_all_ranks(tmp_path):
    """Catches ranks that measure apart, and a probe of seconds at every start."""
    first, second = run_ranks(check_probe, 2, str(tmp_path))
    assert first[:3] == second[:3]
    assert first[0] and first[1] > 1e6 and first[2] > 1e8
    assert (first[3], second[3]) == (True, False)
