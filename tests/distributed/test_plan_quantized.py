"""What the plan says of a quantised base beforehand, against what the engine counts and training takes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from plan_support import FORMATS, build_experts, build_meta, build_sized, build_trained, measure_peak
from support import run_ranks
from test_plan import NO_ACTIVATIONS, make_cluster
from tiny import add_lora, build_base, make_batch
from transformers import PreTrainedModel

import lorashard
from lorashard import Quantization
from lorashard.placement import ResolvedPlacement
from lorashard.plan.costs import Row, Workload, compute_row
from lorashard.plan.size import measure_model
from lorashard.plan.trace import Microbatch, trace

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def build(family: str) -> PreTrainedModel:
    return build_experts() if family == "experts" else build_base(family, torch.bfloat16)


def predict(family: str, quantization: Quantization, options: dict[str, Any], world_size: int) -> Row:
    size = measure_model(build_meta(build(family), target_modules=ATTENTION), quantization)
    placement = options["placement"]
    group_size = 1 if placement == "replicate" else world_size
    resolved = ResolvedPlacement(placement, group_size, options.get("resident_layers", 0), 1, None, "all")
    return compute_row(size, Workload(NO_ACTIVATIONS, 24), make_cluster(world_size), resolved)


def count_bytes(rank: int, cases: list) -> list[tuple[int, ...]]:
    found = []
    for family, quantization, options in cases:
        model = lorashard.shard(
            add_lora(build(family), target_modules=ATTENTION), quantization=quantization, **options
        ).train()
        for _ in range(2):
            model(**make_batch()).loss.backward()
        before = lorashard.stats(model)
        model(**make_batch()).loss.backward()
        after = lorashard.stats(model)
        traffic = (after.gathered_bytes - before.gathered_bytes, after.copied_bytes - before.copied_bytes)
        found.append((after.bytes_at_rest, after.slot_bytes, after.host_bytes_at_rest, *traffic))
    return found


@pytest.mark.parametrize("world_size", (1, 2))
def test_bytes_of_a_quantised_base_are_exact(world_size):
    """Catches scales left out or padded otherwise, an expert taken for a norm, a gather planned at the old size."""
    wanted = ({"placement": "replicate"}, {"placement": "shard"}, {"placement": "host", "resident_layers": 2})
    cases = list(itertools.product(("llama-tied",), FORMATS, wanted))
    cases += list(itertools.product(("experts",), (FORMATS[0], FORMATS[2]), wanted[1:]))
    rows = [predict(*case, world_size) for case in cases]
    predicted = [(row.rest_bytes, row.slot_bytes, row.host_bytes, row.gathered_bytes, row.copied_bytes) for row in rows]
    for counted in run_ranks(count_bytes, world_size, cases):
        assert dict(zip(map(str, cases), counted, strict=True)) == dict(zip(map(str, cases), predicted, strict=True))


def test_quantisation_loses_no_parameter_and_shrinks_what_is_moved():
    """Catches a model of 8 B told as one of 2, and parts that take as much room as the numbers did."""
    base = build_sized("llama", torch.bfloat16)
    plain, *packed = [measure_model(build_meta(base), quantization) for quantization in (None, *FORMATS)]
    layer = plain.layers[0].total_bytes(1)
    for size, ratio in zip(packed, (0.5625 / 2, 0.52 / 2, 1.02 / 2, 1.02 / 2), strict=True):
        assert size.num_parameters == plain.num_parameters
        assert size.layers[0].total_bytes(1) == pytest.approx(layer * ratio, rel=0.05)
        assert size.workspace_bytes >= 128 * 256 * 2
    assert plain.workspace_bytes == 0
    assert packed[0].units[0].layout == plain.units[0].layout  # the embedding stays as it is


def check_peak(rank: int, world_size: int, cases: list) -> list[tuple[str, int, int]]:
    found = []
    for quantization, placement, checkpointing in cases:
        microbatch = Microbatch(2, 96, "cpu", loss="model", checkpointing=checkpointing, is_autocast=False)
        base = build_sized("llama", torch.bfloat16, hidden_size=256, intermediate_size=768)
        size = measure_model(build_meta(base, r=32), quantization)
        row = compute_row(
            size,
            Workload(trace(build_meta(base, r=32), microbatch, quantization), microbatch.num_tokens, optimizer="sgd"),
            make_cluster(1),
            ResolvedPlacement(placement, 1 if placement == "replicate" else world_size, 0, 1, None, "all"),
        )
        model = lorashard.shard(build_trained(base, microbatch, r=32), placement=placement, quantization=quantization)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def step(model: torch.nn.Module = model) -> None:
            model(**make_batch(rows=2, tokens=96), use_cache=False).loss.backward()

        step()  # gradients rest
        peak_bytes = measure_peak(step)
        stats = lorashard.stats(model)
        resting_bytes = 2 * sum(parameter.numel() * parameter.element_size() for parameter in trainable)
        assert stats.workspace_bytes == row.workspace_bytes
        base_bytes = stats.bytes_at_rest + stats.slot_bytes + stats.workspace_bytes
        found.append((f"{quantization}, {placement}", row.peak_bytes, base_bytes + resting_bytes + peak_bytes))
    return found


@pytest.mark.parametrize("world_size", (1, 2))
def test_the_peak_of_a_quantised_base_is_within_a_tenth(world_size):
    """Catches a workspace for each layer, numbers that autograd keeps, or what unpacking needs beside them."""
    cases = [(FORMATS[0], "replicate", {}), (FORMATS[2], "replicate", None)]
    if world_size == 2:
        cases = [(FORMATS[0], "shard", None), (FORMATS[2], "host", {})]
    for found in run_ranks(check_peak, world_size, world_size, cases):
        for case, predicted, measured in found:
            assert predicted == pytest.approx(measured, rel=0.1), case
