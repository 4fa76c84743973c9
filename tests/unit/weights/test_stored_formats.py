"""Checkpoints whose files are quantized: their values equal transformers', and damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.stored import FP8, MODELS, rewrite, save_stored
from helpers.tiny import build_base
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lorashard.config.quantization_options import Quantization
from lorashard.errors import CheckpointError, ConfigError
from lorashard.model.skeleton import build_skeleton
from lorashard.quantization.nf4 import Nf4
from lorashard.weights.quantized_parts import find_quantized_parts
from lorashard.weights.safetensors_files import Checkpoint
from lorashard.weights.segments import SegmentedTensor
from lorashard.weights.stored_formats import find_stored_format, settle_quantization
from lorashard.weights.weights import BaseWeights


def plan(folder: Path, dtype: torch.dtype = torch.bfloat16) -> BaseWeights:
    skeleton = build_skeleton(str(folder), folder, None, dtype, False, None)
    assert not hasattr(skeleton.config, "quantization_config")
    return BaseWeights.plan(skeleton, Checkpoint.open(folder), dtype)


def check_ranges(weights: BaseWeights, name: str, expected: torch.Tensor) -> None:
    values = expected.contiguous().view(-1).view(torch.uint8)
    middle = len(values) // 2
    for begin, end in ((0, 1), (3, 777), (middle - 5, middle + 901), (len(values) - 7, len(values))):
        out = torch.empty(end - begin, dtype=torch.uint8)
        weights.read_range(name, begin, end, out)
        assert torch.equal(out, values[begin:end]), (name, begin, end)


@pytest.mark.parametrize("name", MODELS)
def test_dequantized_values_are_those_of_transformers(name, tmp_path):
    """A wrong nibble, block or exponent gives a model that trains, only worse; the blocks of transposed experts, and of
    experts that are fused from many tensors, are elsewhere."""
    folder = save_stored(tmp_path, name)
    weights = plan(folder)
    assert "bfloat16" in (weights.describe_stored() or "")
    assert weights.stored_quantizers() == {}
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert weights.names == expected.keys()
    for key, value in expected.items():
        assert torch.equal(weights.read(key), value), key
    for key in (key for key in expected if "down_proj" in key and "bias" not in key):
        check_ranges(weights, key, expected[key])


def test_the_last_blocks_of_fp8_may_be_smaller(tmp_path):
    """transformers takes a block's size from the number of scales: for DeepSeek-V3's 576 rows in blocks of 128 that
    is another, or an error. The block's size stands in the config."""
    build_base("qwen3", torch.bfloat16, hidden_size=40, intermediate_size=24).save_pretrained(tmp_path)
    stored, whole = {}, {}

    def change(tensors):
        for key, value in list(tensors.items()):
            if "down_proj" in key:  # [40, 24] in blocks of 16
                tensors[key] = (value * 100).to(torch.float8_e4m3fn)
                tensors[f"{key}_scale_inv"] = torch.rand(3, 2)
                stored[key] = (tensors[key], tensors[f"{key}_scale_inv"])
            if "up_proj" in key:  # one scale for all
                tensors[key] = (value * 100).to(torch.float8_e4m3fn)
                tensors[f"{key}_scale_inv"] = torch.tensor(0.75)
                whole[key] = tensors[key].float() * 0.75
        return tensors

    rewrite(tmp_path, change, FP8)
    weights = plan(tmp_path, torch.float32)
    for key, (numbers, scales) in stored.items():
        expected = torch.tensor(
            [
                [numbers[row, column].float() * scales[row // 16, column // 16] for column in range(24)]
                for row in range(40)
            ]
        )
        assert torch.equal(weights.read(key), expected)
        check_ranges(weights, key, expected)
    assert whole and all(torch.equal(weights.read(key), expected) for key, expected in whole.items())


def test_experts_that_bitsandbytes_stored_one_by_one_stay_quantized(tmp_path):
    """The scales of each expert have their own mean: one format for all experts must keep the scales, not a mean."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, vocab_size=96, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plain = {}

    def change(tensors):
        for key, value in list(tensors.items()):
            if ".experts." in key:
                packed, state = functional.quantize_4bit(value, quant_type="nf4", compress_statistics=True)
                tensors[key] = packed
                tensors |= {f"{key}.{name}": part for name, part in state.as_dict(packed=True).items()}
                plain[key] = functional.dequantize_4bit(packed, state)
        return tensors

    quantization = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    rewrite(tmp_path, change, quantization | {"bnb_4bit_use_double_quant": True})
    weights = plan(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    prefix = "model.layers.0.mlp.experts"
    expected = torch.stack(
        [torch.cat([plain[f"{prefix}.{i}.{kind}.weight"] for kind in ("gate_proj", "up_proj")]) for i in range(4)]
    )
    assert weights.stored_quantizers().keys() == {name, "model.layers.0.mlp.experts.down_proj"}
    assert torch.equal(weights.read(name), expected)
    quantizer = weights.stored_quantizer(name)
    assert quantizer == Nf4(double_quant=False)
    parts = []
    for number, part in enumerate(quantizer.parts(expected.shape)):
        out = torch.empty(part.shape, dtype=part.dtype)
        flat = out.view(-1).view(torch.uint8)
        for begin in range(0, len(flat), 1000):  # ranges that end inside of a weight
            end = min(begin + 1000, len(flat))
            weights.read_part_range(name, number, begin, end, flat[begin:end])
        parts.append(out)
    unpacked = torch.empty_like(expected)
    quantizer.unpack(parts, unpacked)
    assert torch.equal(unpacked, expected)

    stored = weights.stored[f"{prefix}.0.gate_proj.weight"]  # a conversion may also take a tensor apart
    found = find_quantized_parts(SegmentedTensor.of(stored).split([16, 48])[1])
    segments = [segment for part in found.parts for segment in part.segments]
    assert [(segment.begin, segment.numel) for segment in segments] == [(512, 1536), (16, 48)]
    incomplete = SegmentedTensor((64,), SegmentedTensor.of(stored).slice(10, 74))
    assert find_quantized_parts(incomplete) is None  # parts of blocks have no scale of their own


NF4 = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
FORMATS = [
    ({}, None),
    (NF4, Quantization("nf4")),
    (NF4 | dict(bnb_4bit_use_double_quant=True), Quantization("nf4", True)),
    (dict(load_in_8bit=True), Quantization("int8")),  # as old checkpoints have it
    (dict(quant_method="mxfp4"), None),
    (FP8, None),
    (FP8 | dict(weight_block_size=None), None),
    (NF4 | dict(bnb_4bit_quant_type="fp4"), "found.*'fp4'"),
    (dict(quant_method="bitsandbytes"), "load_in_4bit"),
    (FP8 | dict(weight_block_size=[128]), "weight_block_size"),
    (dict(quant_method="gptq", bits=4), "found.*gptq.*use the unquantized model"),
]


@pytest.mark.parametrize("quantization, expected", FORMATS, ids=lambda value: str(value)[:40])
def test_a_config_says_what_is_stored(quantization, expected):
    """A plan, or a refusal, must not need the weights; and no format must be mistaken for another."""
    for config in ({"quantization_config": quantization}, {"text_config": {"quantization_config": quantization}}):
        if isinstance(expected, str):
            with pytest.raises(CheckpointError, match=expected) as caught:
                find_stored_format(config, "a-model")
            assert caught.value.where == "a-model" and caught.value.fix
        else:
            stored = find_stored_format(config)
            assert (stored.quantization if stored else None) == expected


def test_a_requested_format_must_match_the_stored_one():
    """Quantizing quantized weights is worse than either format; requesting the stored format must not be an error."""
    nf4 = find_stored_format({"quantization_config": NF4 | dict(bnb_4bit_use_double_quant=True)})
    assert settle_quantization(nf4, None, "x") == settle_quantization(nf4, Quantization("nf4"), "x")
    assert settle_quantization(nf4, None, "x") == Quantization("nf4", True)
    for asked in (Quantization("int8"), Quantization("nf4", has_vocabulary=True)):
        with pytest.raises(ConfigError) as caught:
            settle_quantization(nf4, asked, "x")
        assert caught.value.option == "quantization" and caught.value.where == "x"
    mxfp4 = find_stored_format({"quantization_config": {"quant_method": "mxfp4"}})
    assert settle_quantization(mxfp4, Quantization("nf4"), "x") == Quantization("nf4")


def damage(key, change):
    return lambda tensors: {k: v for k, v in (tensors | {key: change(tensors[key])}).items() if v is not None}


WEIGHT = "model.layers.0.mlp.down_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"


def write_state(**changes):
    def change(state):
        values = json.loads(bytes(state.tolist())) | changes
        return torch.tensor(list(json.dumps({k: v for k, v in values.items() if v is not None}).encode())).byte()

    return change


PART = "model.layers.0.mlp.experts.down_proj"
# For each format: the damaged tensor, its damage, and what the error names, over all its fields.
DAMAGES = {
    "nf4": [
        (STATE, lambda t: None, f"{WEIGHT}.*nf4.*missing"),
        (WEIGHT, lambda t: None, f"expected .*{WEIGHT} beside {STATE}"),
        (f"{WEIGHT}.nested_absmax", lambda t: None, f"expected .*{WEIGHT}.nested_absmax"),
        (f"{WEIGHT}.absmax", lambda t: t[1:], f"{WEIGHT}.absmax: expected .*128.*found .*127"),
        (f"{WEIGHT}.absmax", lambda t: t.float(), f"{WEIGHT}.absmax: expected uint8, found .*float32"),
        (f"{WEIGHT}.quant_map", lambda t: -t, f"{WEIGHT}.quant_map: expected"),
        (f"{WEIGHT}.nested_quant_map", lambda t: t.flip(0), "nested_quant_map: expected"),
        (WEIGHT, lambda t: t[:-2], f"{WEIGHT}: expected 4096.*found 4094"),
        (STATE, lambda t: t[:-3], f"{STATE} is damaged"),
        (STATE, write_state(shape=None), "no 'shape'"),
        (STATE, write_state(blocksize=48), "sizes are .48"),
        (STATE, write_state(nested_offset="nan"), "nested_offset is nan"),
        (STATE, write_state(shape=[128, 64]), "down_proj.weight .*64, 128.* in the model"),
    ],
    "Qwen3": [
        (f"{WEIGHT}_scale_inv", lambda t: None, f"expected .*{WEIGHT}_scale_inv beside {WEIGHT}"),
        (f"{WEIGHT}_scale_inv", lambda t: t[1:], f"{WEIGHT}_scale_inv: expected .*4, 4.*found .*3, 4"),
        (WEIGHT, lambda t: None, f"{WEIGHT}_scale_inv .*16x16.*missing"),
    ],
    "GPT-OSS": [
        (f"{PART}_scales", lambda t: None, "expected .*down_proj_scales beside"),
        (f"{PART}_blocks", lambda t: None, "down_proj_scales .*missing"),
        (f"{PART}_scales", lambda t: t[..., :1], "expected .*4, 64, 2.*found"),
        (f"{PART}_blocks", lambda t: t[..., :8], "expected .experts, columns, blocks, 16."),
    ],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_are_refused(name, tmp_path):
    """A scale that is missing, short or of another kind must not be found by a crash, or never."""
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
        save_nf4(tmp_path)
    else:
        save_stored(tmp_path, name)
    undamaged = (tmp_path / "model.safetensors").read_bytes()
    plan(tmp_path)
    for key, change, expected in DAMAGES[name]:
        rewrite(tmp_path, damage(key, change))
        with pytest.raises(CheckpointError, match=expected) as caught:
            plan(tmp_path)
        assert caught.value.where in (tmp_path, tmp_path / "model.safetensors") and "\n" not in str(caught.value)
        (tmp_path / "model.safetensors").write_bytes(undamaged)


def save_nf4(folder: Path) -> None:
    import bitsandbytes.functional as functional

    build_base(dtype=torch.bfloat16, hidden_size=64, intermediate_size=128, num_hidden_layers=1).save_pretrained(folder)

    def change(tensors):
        for key, value in list(tensors.items()):
            if "_proj" in key:
                packed, state = functional.quantize_4bit(value, quant_type="nf4", compress_statistics=True)
                tensors[key] = packed
                tensors |= {f"{key}.{name}": part for name, part in state.as_dict(packed=True).items()}
        return tensors

    rewrite(folder, change, NF4 | dict(bnb_4bit_use_double_quant=True))
