"""Quantizing while reading: which weights, which bytes each rank reads, and that shards equal one rank's."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from helpers.sizes import DEEPSEEK, GPT2, GPT_OSS, LLAMA, MIXTRAL, QWEN_MOE
from peft import LoraConfig, get_peft_model
from torch import nn

from lorashard.config.quantization_options import Quantization
from lorashard.model.adapters import base_test
from lorashard.model.quantizing import quantize_structure
from lorashard.model.sources import MemorySource, fill_shard, plan_unit
from lorashard.model.units import LAYER, FoundUnit, FoundWeight, find_structure
from lorashard.quantization.format import make_quantizer

FORMATS = [Quantization("nf4"), Quantization("nf4", double_quant=True), Quantization("int8"), Quantization("fp8")]
# Whole blocks, blocks and rows that end anywhere, less than a block, less than a byte of nf4, experts, long rows.
SHAPES = [(64, 64), (33, 70), (7, 9), (1, 1), (3, 3), (4, 24, 40), (3, 5, 7), (5, 3000), (257, 96)]


class CountedSource(MemorySource):
    """Remembers which bytes of which weight were read."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, int, int]] = []

    def fill(self, weight, begin_byte, end_byte, out, part=0):
        self.reads.append((weight.name, begin_byte, end_byte))
        super().fill(weight, begin_byte, end_byte, out, part)


def make_unit(quantization: Quantization, *more: tuple[int, ...]) -> FoundUnit:
    generator = torch.Generator().manual_seed(0)
    quantizer = make_quantizer(quantization)
    weights = []
    for number, shape in enumerate([*SHAPES, *more, (40,)]):
        values = torch.randn(shape, generator=generator).to(torch.bfloat16 if number % 2 else torch.float32)
        weight = FoundWeight(f"w{number}", nn.Parameter(values, requires_grad=False))
        weight.quantizer = quantizer if len(shape) > 1 else None
        weights.append(weight)
    return FoundUnit("layer", LAYER, weights)


def quantize_at_once(unit: FoundUnit) -> torch.Tensor:
    """Return the unit's buffer with each weight quantized at once."""
    layout = plan_unit(unit, 1)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fields = iter(layout.fields)
    for weight in unit.weights:
        parts = [weight.parameter.detach()]
        if weight.quantizer is not None:
            values, scales = weight.quantizer.quantize(weight.parameter.detach().view(-1), weight.parameter.shape)
            parts = [values, *weight.quantizer.keep_scales(scales)]
        for part in parts:
            field = next(fields)
            buffer[field.begin_byte : field.end_byte] = part.contiguous().reshape(-1).view(torch.uint8)
    return buffer


@pytest.mark.parametrize("piece_numel", (64, 4 * 2**20))
@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_shards_together_are_the_unit_quantized_at_once(quantization, piece_numel):
    """A block split in two, or a piece that is one byte off, gives wrong values at some world sizes alone."""
    unit = make_unit(quantization)
    expected = quantize_at_once(unit)
    for world_size in (1, 2, 3, 4, 5, 16):
        layout = plan_unit(unit, world_size)
        shards = [torch.zeros(layout.shard_bytes, dtype=torch.uint8) for _ in range(world_size)]
        for rank, shard in enumerate(shards):
            fill_shard(shard, layout, unit, MemorySource(), rank, piece_numel=piece_numel)
        found = torch.cat(shards)
        assert torch.equal(found[: len(expected)], expected[: len(found)]), world_size
        assert not found[len(expected) :].any() and not expected[len(found) :].any()


def bound_reads(unit: FoundUnit, layout, rank: int) -> dict[str, int]:
    """Return the most bytes that a rank may read of each weight, given what it keeps of it."""
    kept: dict[str, dict[int, int]] = {}
    parts = [(weight, part) for weight in unit.weights for part in range(len(weight.parts()))]
    for piece in layout.pieces(rank):
        weight, part = parts[layout.fields.index(piece.field)]
        kept.setdefault(weight.name, {})[part] = piece.end_byte - piece.begin_byte
    bounds = {}
    for weight in unit.weights:
        item_bytes, shape = weight.parameter.itemsize, weight.parameter.shape
        own = kept.get(weight.name, {})
        if weight.quantizer is None:
            bounds[weight.name] = own.get(0, 0)
            continue
        block = weight.quantizer.block_numel(shape)
        values = own.get(0, 0) * (2 if weight.quantizer.name == "nf4" else 1)
        blocks = math.ceil(values / block) + (1 if block != 64 and values else 0)  # rows straddle, blocks of 64 never
        blocks += own.get(1, 0) // 4 if weight.quantizer.scales_are_separate else 0
        is_whole = not weight.quantizer.scales_are_separate and set(own) - {0}
        most = weight.parameter.nbytes
        bounds[weight.name] = most if is_whole else min(most, blocks * block * item_bytes)
    return bounds


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_a_rank_reads_what_it_keeps(quantization):
    """If every rank read all of each weight, loading would take as many times longer as there are ranks."""
    unit = make_unit(quantization, (600, 256))  # so many scales that several ranks share them
    for world_size in (1, 2, 16):
        layout = plan_unit(unit, world_size)
        total = 0
        for rank in range(world_size):
            source = CountedSource()
            shard = torch.zeros(layout.shard_bytes, dtype=torch.uint8)
            fill_shard(shard, layout, unit, source, rank, piece_numel=512)
            bounds = bound_reads(unit, layout, rank)
            for weight in unit.weights:
                reads = sorted((b, e) for name, b, e in source.reads if name == weight.name)
                assert sum(e - b for b, e in reads) <= bounds[weight.name], (weight.name, world_size, rank)
                assert all(e <= b for (_, e), (b, _) in zip(reads, reads[1:], strict=False)), "read twice"
                row_numel = weight.parameter.shape[-1]
                if weight.quantizer is not None:
                    assert all(e - b <= max(512, row_numel) * weight.parameter.itemsize for b, e in reads)
                total += sum(e - b for b, e in reads)
        unit_bytes = sum(weight.parameter.nbytes for weight in unit.weights)
        assert total == unit_bytes if world_size == 1 else unit_bytes <= total


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
MAMBA = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
FUSED = ATTENTION | {"gate_up_proj", "down_proj"}
CHOSEN = {
    "Llama": (LLAMA, ATTENTION | MLP),
    "Mixtral": (MIXTRAL, FUSED),
    "Qwen3Moe": (QWEN_MOE, FUSED),
    # And neither the router nor `shared_expert_gate`.
    "Qwen2Moe": ({**QWEN_MOE, "shared_expert_intermediate_size": 40}, FUSED | MLP),
    "GptOss": ({**GPT_OSS, "num_local_experts": 12}, FUSED),
    "DeepseekV3": (
        DEEPSEEK,
        MLP | {"gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    ),
    "GPT2": (GPT2, {"c_attn", "c_proj", "c_fc"}),
    "Mamba": ({**MAMBA, "time_step_rank": 16}, {"in_proj", "x_proj", "dt_proj", "out_proj"}),
    "Mamba with short rows": ({**MAMBA, "time_step_rank": 15}, {"in_proj", "x_proj", "out_proj"}),
}


def choose(family: str, options: dict, quantization: Quantization) -> set[str]:
    """Return the names of the modules, or of experts' weights, that would be quantized, and check their dimensions."""
    with init_empty_weights():
        config = getattr(transformers, f"{family.partition(' ')[0]}Config")(**options)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    structure = find_structure(model, lambda parameter: True)
    quantize_structure(structure, quantization)
    chosen = [w for unit in structure.units for w in unit.weights if w.quantizer is not None]
    assert all(weight.parameter.dim() in (2, 3) for weight in chosen)
    return {weight.name.removesuffix(".weight").rpartition(".")[2] for weight in chosen}


@pytest.mark.parametrize("family", CHOSEN)
def test_linear_weights_and_experts_are_quantized_and_nothing_else(family):
    """A router in 4 bits sends tokens to other experts; experts that are left out are most of a model's bytes; short
    rows, which Gemma 3n clamps in place, take more bytes in 8 bits and a scale than they save."""
    options, expected = CHOSEN[family]
    assert choose(family, options, Quantization("nf4")) == expected
    vocabulary = choose(family, options, Quantization("nf4", has_vocabulary=True)) - expected
    tied = {"GPT2": {"wte"}, "Mamba": {"embeddings"}}
    assert vocabulary == tied.get(family.partition(" ")[0], {"embed_tokens", "lm_head"})


def test_a_head_beside_a_copy_that_trains_is_quantized():
    """A head that is left as it was since `modules_to_save` has put a copy beside it."""
    with init_empty_weights():
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
        model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    structure = find_structure(model, base_test(model))
    quantize_structure(structure, Quantization("nf4", has_vocabulary=True))
    assert any("lm_head" in w.name and w.quantizer for unit in structure.units for w in unit.weights)


def test_a_layer_of_an_8b_llama_takes_the_bytes_that_its_formats_say():
    """Padding, or scales wider than they are said to be, would show here as a ratio that no document promises."""
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    ratios = []
    for quantization in (None, *FORMATS):
        weights = [FoundWeight(str(i), nn.Parameter(torch.empty(s, device="meta"))) for i, s in enumerate(shapes)]
        for weight in weights:
            weight.parameter.data = weight.parameter.data.bfloat16()
            weight.quantizer = make_quantizer(quantization) if quantization else None
        norms = [FoundWeight(f"norm{i}", nn.Parameter(torch.empty(4096, device="meta").bfloat16())) for i in range(2)]
        ratios.append(plan_unit(FoundUnit("layer", LAYER, [*weights, *norms]), 2).total_bytes)
    found = [round(ratios[0] / num_bytes, 2) for num_bytes in ratios[1:]]
    assert found == [3.56, 3.88, 2.0, 2.0]
