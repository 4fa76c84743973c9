"""What fusing is predicted to remove, on chains of operations of which every byte is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.planning import LORA
from helpers.tiny import build_base
from peft import LoraConfig

from lorashard.config.placement import ResolvedPlacement
from lorashard.config.quantization_options import Quantization
from lorashard.planning.auto import BaseModel, Training, plan_training
from lorashard.planning.hardware import Cluster, find_gpu_type
from lorashard.planning.trace import Microbatch
from lorashard.planning.tracker import Tracker, Work

NUM_BYTES = 4 * 8 * 8


def run_chain(keep: bool) -> Work:
    """Return the work of three elementwise operations between two matmuls, the first one's result kept or not."""
    hidden, bias, weight = (torch.ones(8, 8) for _ in range(3))
    with Tracker([hidden, bias, weight]) as tracker:
        product = hidden @ weight
        kept = [product * 2]
        result = kept[0] + bias if keep else kept.pop() + bias
        result = result.relu()
        _ = result @ weight
    return tracker.work


@pytest.mark.parametrize(("keep", "written"), [(False, 1), (True, 2)])
def test_a_chain_reads_its_input_once_and_writes_its_output_once(keep, written):
    """Catches bytes that no kernel saves: of inputs, and of what is saved for backward."""
    work = run_chain(keep)
    # mul reads and writes one tensor, add reads two and writes one, relu as mul; the kernel reads `product` and `bias`.
    assert work.fusible_bytes == (2 + 3 + 2 - 2 - written) * NUM_BYTES
    assert work.fusible_kernels == 2


def test_operations_of_two_runs_are_not_fused():
    """Catches a chain that reaches over a matmul, or over the end of a layer."""
    hidden, weight = torch.ones(8, 8), torch.ones(8, 8)
    with Tracker([hidden, weight]) as tracker:
        result = (hidden * 2) @ weight
        result = result.view(64).relu()
        tracker.end_run()
        _ = result.neg()
    tracker.end_run()
    assert tracker.work.fusible_bytes == tracker.work.fusible_kernels == 0


def test_the_plan_says_what_fused_gains_and_computes_with_it(tmp_path):
    """Catches a gain that is promised beside rows of another speed, and compiled layers of a quantized base."""
    build_base(num_hidden_layers=2).config.save_pretrained(tmp_path)
    base = BaseModel(str(tmp_path), LoraConfig(**LORA), torch.float32)
    cluster = Cluster(replace(find_gpu_type("a100-40gb"), kernel_s=0.0), 1, 1, 2**30, 2**30)
    exact, placement = Training(Microbatch(2, 32, checkpointing=None)), ResolvedPlacement("replicate", 1, 0, 1, None)
    plain, fused, quantized = (
        plan_training(one, training, cluster, given=placement)
        for one, training in [
            (base, exact),
            (base, replace(exact, is_fused=True)),
            (replace(base, quantization=Quantization("int8")), replace(exact, is_fused=True)),
        ]
    )
    gain = plain.choice.step_s / fused.choice.step_s - 1
    assert 0.05 < gain < 1
    assert plain.notes[-1] == f"numerics: fused would gain about {gain:.0%} by torch.compile (predicted)"
    assert f"predicted to gain {gain:.0%}" in fused.notes[-1]
    assert "would gain less than" in quantized.notes[-1] and quantized.choice.step_s > plain.choice.step_s
