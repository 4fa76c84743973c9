"""What the plan says beforehand, against what the engine counts and training takes."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from plan_support import build_meta, build_sized, build_trained, measure_peak
from support import run_ranks
from test_loading import save_base
from tiny import NUM_LAYERS, add_lora, build_base, build_model, make_batch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import lorashard
from lorashard.errors import ConfigError
from lorashard.placement import PlacementOptions, ResolvedPlacement
from lorashard.plan.activations import Activations
from lorashard.plan.auto import BaseModel, Training, plan_here
from lorashard.plan.choose import Plan, agree_on_plan
from lorashard.plan.costs import Row, Workload, compute_row
from lorashard.plan.hardware import Cluster, Hardware
from lorashard.plan.probe import probe
from lorashard.plan.size import ModelSize, measure_model
from lorashard.plan.trace import Microbatch, trace
from lorashard.plan.tracker import Work

NO_ACTIVATIONS = Activations(0, 0, 0, 0, (Work(1e9),) * NUM_LAYERS, (Work(1e9),) * NUM_LAYERS, Work())
CPU = Hardware(
    name="CPU rank",
    device_type="cpu",
    memory_bytes=2**34,
    flops_per_s=1e11,
    memory_bytes_per_s=1e10,
    host_bytes_per_s=1e10,
    file_bytes_per_s=1e10,
    peer_bytes_per_s=1e9,
    network_bytes_per_s=1e9,
    kernel_s=1e-6,
    is_overlapping=False,
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"placement": "replicate"},
    {"placement": "shard"},
    {"placement": "host"},
    {"placement": "shard", "prefetch": 0},
    {"placement": "host", "prefetch": 2},
    {"placement": "shard", "resident_layers": 2},
    {"placement": "host", "resident_layers": 3},
    {"placement": "shard", "resident_layers": "all"},
)
GROUPS = ({"placement": "shard", "shard_group_size": 2}, {"placement": "host", "shard_group_size": 2})


def make_cluster(num_ranks: int) -> Cluster:
    return Cluster(CPU, num_ranks, 1, 2**34)


@functools.cache
def size_of(family: str) -> ModelSize:
    return measure_model(build_meta(build_base(family)))


def predict(size: ModelSize, options: dict[str, Any], world_size: int, steps: int = 1) -> Row:
    """Return the plan's row for `options`."""
    placement = options["placement"]
    group_size = options.get("shard_group_size", 1 if placement in ("replicate", "file") else world_size)
    resolved = ResolvedPlacement(
        placement, group_size, options.get("resident_layers", 0), options.get("prefetch", 1), None, "all"
    )
    workload = Workload(NO_ACTIVATIONS, 24, accumulation_steps=steps)
    return compute_row(size, workload, make_cluster(world_size), resolved)


def check_rest(rank: int, cases: list) -> list[tuple[int, ...]]:
    found = []
    for family, options in cases:
        stats = lorashard.stats(lorashard.shard(build_model(family), **options))
        found.append((stats.bytes_at_rest, stats.slot_bytes, stats.host_bytes_at_rest))
    return found


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_bytes_at_rest_and_of_slots_are_exact(world_size):
    """Catches padding, a tied embedding counted twice, a slot too many: a model that just fits would not."""
    options = OPTIONS + (GROUPS if world_size == 4 else ())
    families = ("llama", "llama-tied", "qwen3") if world_size == 2 else ("llama-tied",)
    cases = list(itertools.product(families, options))
    rows = [predict(size_of(family), chosen, world_size) for family, chosen in cases]
    predicted = [(row.rest_bytes, row.slot_bytes, row.host_bytes) for row in rows]
    for counted in run_ranks(check_rest, world_size, cases):
        assert dict(zip(map(str, cases), counted, strict=True)) == dict(zip(map(str, cases), predicted, strict=True))


def build_large() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def check_large(rank: int) -> tuple[int, int]:
    stats = lorashard.stats(lorashard.shard(add_lora(build_large()), placement="shard"))
    return stats.bytes_at_rest, stats.slot_bytes


@pytest.mark.parametrize("world_size", (2, 4))
def test_bytes_of_a_larger_model_are_exact(world_size):
    """Catches what tiny shapes hide, such as sizes that shards divide unevenly in bf16."""
    row = predict(measure_model(build_meta(build_large())), {"placement": "shard"}, world_size)
    assert run_ranks(check_large, world_size) == [(row.rest_bytes, row.slot_bytes)] * world_size


def check_traffic(rank: int, cases: list) -> list[tuple[int, int]]:
    found = []
    for family, checkpointing, steps, options in cases:
        model = lorashard.shard(build_model(family, checkpointing=checkpointing), **options)
        for _ in range(2 * steps):
            model(**make_batch()).loss.backward()
        before = lorashard.stats(model)
        for _ in range(steps):
            model(**make_batch()).loss.backward()
        after = lorashard.stats(model)
        found.append((after.gathered_bytes - before.gathered_bytes, after.copied_bytes - before.copied_bytes))
    return found


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_traffic_of_a_step_is_exact(world_size):
    """Catches an order of events that the engine no longer has: time and scaling are predicted from these bytes."""
    options = OPTIONS + (GROUPS if world_size == 4 else ())
    variants = list(itertools.product(("off", "non-reentrant"), (1, 3)))
    pairs = itertools.product(("llama", "llama-tied") if world_size < 4 else ("llama-tied",), options)
    cases = [
        (family, checkpointing, steps, chosen)
        for (family, chosen), (checkpointing, steps) in zip(pairs, itertools.cycle(variants), strict=False)
    ]
    if world_size == 2:
        cases += [
            (family, *variant, {"placement": "shard"}) for family in ("llama", "llama-tied") for variant in variants
        ]
    rows = [predict(size_of(family), chosen, world_size, steps) for family, _, steps, chosen in cases]
    predicted = {str(case): (row.gathered_bytes, row.copied_bytes) for case, row in zip(cases, rows, strict=True)}
    for counted in run_ranks(check_traffic, world_size, cases):
        assert dict(zip(map(str, cases), counted, strict=True)) == predicted


def check_files(rank: int, folder: str) -> tuple[int, ...]:
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    stats = lorashard.stats(lorashard.load(folder, config, placement="file", dtype=torch.float32))
    return stats.bytes_at_rest, stats.slot_bytes, stats.host_bytes_at_rest


def test_mapped_files_take_nothing(tmp_path, monkeypatch):
    """Catches a plan that charges each rank of a CPU machine for pages that all share."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    folder = save_base(tmp_path / "base", "llama")
    row = predict(size_of("llama"), {"placement": "file"}, 2)
    assert (row.rest_bytes, row.slot_bytes, row.host_bytes) == (0, 0, 0)
    assert run_ranks(check_files, 2, folder) == [(0, 0, 0)] * 2


def check_peak(rank: int, world_size: int, options: dict, checkpointing: dict | None) -> tuple[int, int]:
    microbatch = Microbatch(2, 96, "cpu", loss="model", checkpointing=checkpointing, is_autocast=False)
    base = build_sized("llama")
    size = measure_model(build_meta(base, r=32))
    activations = trace(build_meta(base, r=32), microbatch)
    group_size = 1 if options["placement"] == "replicate" else world_size
    row = compute_row(
        size,
        Workload(activations, microbatch.num_tokens, optimizer="adamw_torch"),
        make_cluster(world_size),
        ResolvedPlacement(options["placement"], group_size, options.get("resident_layers", 0), 1, None, "all"),
    )
    model = lorashard.shard(build_trained(base, microbatch, r=32), **options)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable)
    parallel = DistributedDataParallel(model) if world_size > 1 else model

    def step() -> None:
        parallel(**make_batch(rows=2, tokens=96), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    peak_bytes = measure_peak(step)
    stats = lorashard.stats(model)
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    resting = trainable + states + (trainable if world_size > 1 else [])  # DDP's buckets are as large as the adapter
    resting_bytes = sum(tensor.numel() * tensor.element_size() for tensor in resting)
    return row.peak_bytes, stats.bytes_at_rest + stats.slot_bytes + resting_bytes + peak_bytes


@pytest.mark.parametrize("checkpointing", ({}, None), ids=("checkpointing", "saving"))
@pytest.mark.parametrize(
    ("world_size", "options"),
    ((1, {"placement": "replicate"}), (2, {"placement": "shard"}), (2, {"placement": "shard", "resident_layers": 2})),
)
def test_peak_is_within_a_tenth_of_what_a_step_takes(world_size, options, checkpointing):
    """Catches whatever else a step takes: gradients, DDP's buckets, optimizer states, a gather's own buffers."""
    for predicted, measured in run_ranks(check_peak, world_size, world_size, options, checkpointing):
        assert predicted == pytest.approx(measured, rel=0.1)


def check_agreement(rank: int) -> tuple[int, str]:
    plan = agree_on_plan(100 + rank, lambda free_bytes: Plan("m", "c", free_bytes, (), None, f"rank {rank}"))
    return plan.free_bytes, plan.reason


def test_all_ranks_get_the_plan_of_the_smallest():
    """Catches ranks that plan apart, each for its own memory: they would wait for each other for ever."""
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
    build_base("llama").config.save_pretrained(tmp_path / "base")
    first, second = run_ranks(check_here, 2, str(tmp_path / "base"), str(tmp_path))
    assert first == second
    assert first[0] == "replicate"


def check_load(rank: int, base: str, options: dict[str, Any]) -> tuple[bool, int]:
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = lorashard.load(base, lora, dtype=torch.float32, **options)
    stats = lorashard.stats(model)
    return stats.num_gathers == 0 and stats.bytes_at_rest > 0, stats.num_resident


def test_load_plans_when_it_is_told_the_batch(tmp_path, caplog):
    """Catches an `auto` that shards a model that fits whole, for want of a batch that the script has told."""
    base = save_base(tmp_path, "llama")
    batch = {"per_device_train_batch_size": 2, "max_length": 16, "activation_checkpointing_layers": "auto"}
    assert run_ranks(check_load, 2, base, batch) == [(True, NUM_LAYERS + 2)] * 2  # whole on each rank
    assert run_ranks(check_load, 2, base, {}) == [(True, 0)] * 2
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    with caplog.at_level("WARNING", "lorashard"):
        lorashard.load(base, lora, dtype=torch.float32, **batch)
    assert any("placement: " in record.getMessage() for record in caplog.records)
    with pytest.raises(ConfigError, match="expected both"):
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
