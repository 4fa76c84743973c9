"""What the tests of the plan share: sizes and traces of tiny models, from their configs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from helpers.bases import build_any
from helpers.tiny import NUM_LAYERS, add_lora, build_base, set_checkpointing
from lorashard.config.placement import ResolvedPlacement, read_placement, resolve_placement
from lorashard.config.quantization_options import Quantization
from lorashard.engine import plan_layout
from lorashard.model.lora_linear import spare_lora_steps
from lorashard.model.units import EMBEDDING, HEAD, LAYER
from lorashard.planning.hardware import Cluster, find_gpu_type
from lorashard.planning.size import ModelSize, UnitSize, build_meta_model
from lorashard.planning.trace import Microbatch

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# As in large models: the MLP is 2.75 times as wide, so that norms and padding are nothing beside the linears.
WIDE = dict(hidden_size=128, intermediate_size=352, vocab_size=512)
Options = dict[str, Any]  # of a placement
FORMATS = (
    Quantization("nf4"),
    Quantization("nf4", double_quant=True),
    Quantization("int8"),
    Quantization("fp8", has_vocabulary=True),
)


def make_size(num_layers: int, layer_bytes: int, vocabulary_bytes: int, adapter_bytes: int) -> ModelSize:
    """Return a made-up model of equal layers, with an embedding and a head of `vocabulary_bytes` each."""

    def make(name: str, kind: str, num_bytes: int) -> UnitSize:
        return UnitSize(name, kind, plan_layout([(name, torch.uint8, (num_bytes,))], 1))

    layers = [make(f"layers.{i}", LAYER, layer_bytes) for i in range(num_layers)]
    units = (make("embed", EMBEDDING, vocabulary_bytes), *layers, make("head", HEAD, vocabulary_bytes))
    return ModelSize("model", units, tuple((unit, unit.kind) for unit in units), adapter_bytes // 4, adapter_bytes)


def build_meta(base: PreTrainedModel, dropout: float = 0.0, **lora: Any):
    """Return what the plan makes of `base`'s config alone."""
    with tempfile.TemporaryDirectory() as folder:
        base.config.save_pretrained(folder)
        config = LoraConfig(**LORA | lora, lora_dropout=dropout)
        return build_meta_model(folder, config, base.dtype)


def build_trained(base: PreTrainedModel, microbatch: Microbatch, dropout: float = 0.0, **lora: Any):
    """Return `base` with an adapter, ready to train as `microbatch` says, as `lorashard.load` leaves it."""
    model = add_lora(base, dropout, **lora)
    spare_lora_steps(model)
    if microbatch.checkpointing is not None:
        set_checkpointing(model, "non-reentrant")
        model.enable_input_require_grads()
    return model.train()


def build_sized(family: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """Return a seeded base in which activations outweigh what an allocator rounds up."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 5}
    return build_base(family, dtype, **wide | sizes)


def measure_peak(step: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator had given out at once in `step`, over those that it began with."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live_bytes = peak_bytes = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes


def build_experts(**sizes: Any) -> PreTrainedModel:
    """Return a seeded base of which the experts' weights are stacked."""
    return build_any("qwen3-moe", **{"num_hidden_layers": NUM_LAYERS} | sizes).to(torch.bfloat16)


def make_cpu_cluster(num_ranks: int) -> Cluster:
    """Return a node of `num_ranks` CPU ranks of 16 GiB."""
    cpu = replace(find_gpu_type("l4"), device_type="cpu", is_overlapping=False)
    return Cluster(cpu, num_ranks, 1, 2**34)


def resolve_options(options: Options, world_size: int) -> ResolvedPlacement:
    """Return what the options of a placement mean for so many ranks."""
    return resolve_placement(read_placement(**options), world_size, None)
