"""Checkpoints whose files are quantized: what is read of them, and what is refused."""

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
from lorashard.weights.safetensors_files import Checkpoint
from lorashard.weights.segments import Runs
from lorashard.weights.stored_formats import find_stored_format, find_stored_quantization, settle_quantization
from lorashard.weights.stored_parts import find_parts
from lorashard.weights.weights import BaseWeights


def plan(folder: Path, dtype: torch.dtype = torch.bfloat16) -> BaseWeights:
    skeleton = build_skeleton(str(folder), folder, None, dtype, False, None)
    assert not hasattr(skeleton.config, "quantization_config")
    return BaseWeights.plan(skeleton, Checkpoint.open(folder), dtype)


def check_ranges(weights: BaseWeights, name: str, expected: torch.Tensor) -> None:
    whole = expected.contiguous().view(-1).view(torch.uint8)
    middle = len(whole) // 2
    for begin, end in ((0, 1), (3, 777), (middle - 5, middle + 901), (len(whole) - 7, len(whole))):
        out = torch.empty(end - begin, dtype=torch.uint8)
        weights.read_range(name, begin, end, out)
        assert torch.equal(out, whole[begin:end]), (name, begin, end)


@pytest.mark.parametrize("name", MODELS)
def test_dequantized_numbers_are_transformers_own(name, tmp_path):
    """A nibble, a block or an exponent taken wrongly gives a model that trains, only worse; transposed experts and
    those that are fused of many tensors have their blocks elsewhere."""
    folder = save_stored(tmp_path, name)
    weights = plan(folder)
    assert "dequantized to bfloat16" in (weights.describe_stored() or "")
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


def test_experts_that_bitsandbytes_stored_one_by_one_stay_packed(tmp_path):
    """Each has a mean of its own for its scales: one format for all of them must keep the scales, not a mean."""
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
    found = find_parts(Runs.of(stored).split([16, 48])[1])
    assert [(run.begin, run.numel) for runs in found.runs for run in runs.runs] == [(512, 1536), (16, 48)]
    assert find_parts(Runs((64,), Runs.of(stored).cut(10, 74))) is None  # parts of blocks have no scale of their own


NF4 = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
FORMATS = [
    ({}, None),
    (NF4, Quantization("nf4")),
    (NF4 | dict(bnb_4bit_use_double_quant=True), Quantization("nf4", True)),
    (dict(load_in_8bit=True), Quantization("int8")),  # as old checkpoints have it
    (dict(quant_method="mxfp4"), None),
    (FP8, None),
    (FP8 | dict(weight_block_size=None), None),
    (NF4 | dict(bnb_4bit_quant_type="fp4"), "Expected nf4 .* found bnb_4bit_quant_type 'fp4'"),
    (dict(quant_method="bitsandbytes"), "is damaged .neither load_in_4bit nor load_in_8bit"),
    (FP8 | dict(weight_block_size=[128]), "is damaged .weight_block_size: expected two whole numbers, found .128"),
    (dict(quant_method="gptq", bits=4), r"has a quantization_config \(gptq\). Use the unquantized model"),
    (dict(quant_method="awq"), r"\(awq\)"),
]


@pytest.mark.parametrize("quantization, expected", FORMATS, ids=lambda value: str(value)[:40])
def test_a_config_tells_what_is_stored(quantization, expected):
    """A plan, or a refusal, must not need the weights; and no format must be taken for another."""
    for config in ({"quantization_config": quantization}, {"text_config": {"quantization_config": quantization}}):
        if isinstance(expected, str):
            with pytest.raises(CheckpointError, match=expected) as caught:
                find_stored_format(config)
            assert "\n" not in str(caught.value)
        else:
            assert find_stored_quantization(config) == expected


def test_what_is_asked_for_must_fit_what_is_stored():
    """Quantizing what is quantized is worse than either; asking for what is there must not be an error."""
    nf4 = find_stored_format({"quantization_config": NF4 | dict(bnb_4bit_use_double_quant=True)})
    assert settle_quantization(nf4, None, "x") == settle_quantization(nf4, Quantization("nf4"), "x")
    assert settle_quantization(nf4, None, "x") == Quantization("nf4", True)
    for asked in (Quantization("int8"), Quantization("nf4", has_vocabulary=True)):
        with pytest.raises(ConfigError, match="quantization: expected nf4, .*x is stored"):
            settle_quantization(nf4, asked, "x")
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


DAMAGES = {
    "nf4": [
        (STATE, lambda t: None, f"{WEIGHT}.[a-z_]* in .* belongs to a weight in bitsandbytes' nf4"),
        (WEIGHT, lambda t: None, f"Expected a tensor {WEIGHT} beside {STATE}"),
        (f"{WEIGHT}.nested_absmax", lambda t: None, f"Expected a tensor {WEIGHT}.nested_absmax beside"),
        (f"{WEIGHT}.absmax", lambda t: t[1:], f"{WEIGHT}.absmax in .*: expected shape .128., found .127."),
        (f"{WEIGHT}.absmax", lambda t: t.float(), f"{WEIGHT}.absmax in .*: expected uint8, found torch.float32"),
        (f"{WEIGHT}.quant_map", lambda t: -t, f"{WEIGHT}.quant_map in .*: expected the values of bitsandbytes"),
        (f"{WEIGHT}.nested_quant_map", lambda t: t.flip(0), "nested_quant_map in .*: expected the values of"),
        (WEIGHT, lambda t: t[:-2], f"{WEIGHT} in .*: expected 4096 bytes for shape .64, 128., found 4094"),
        (STATE, lambda t: t[:-3], f"{STATE} in .* is damaged: it does not describe an nf4 weight"),
        (STATE, write_state(shape=None), "is damaged: .* .no 'shape'."),
        (STATE, write_state(blocksize=48), "is damaged: .*sizes are .48"),
        (STATE, write_state(nested_offset="nan"), "is damaged: .*nested_offset is nan"),
        (STATE, write_state(shape=[128, 64]), "1 of another shape: .*down_proj.weight .*64, 128.* in the model"),
    ],
    "Qwen3": [
        (f"{WEIGHT}_scale_inv", lambda t: None, f"Expected a tensor {WEIGHT}_scale_inv beside {WEIGHT}"),
        (f"{WEIGHT}_scale_inv", lambda t: t[1:], f"{WEIGHT}_scale_inv in .*: expected shape .4, 4., found .3, 4."),
        (WEIGHT, lambda t: None, f"{WEIGHT}_scale_inv in .* belongs to a weight in fp8 in blocks of 16x16"),
    ],
    "GPT-OSS": [
        ("model.layers.0.mlp.experts.down_proj_scales", lambda t: None, "Expected a tensor .*down_proj_scales beside"),
        ("model.layers.0.mlp.experts.down_proj_blocks", lambda t: None, "down_proj_scales in .* belongs to a weight"),
        ("model.layers.0.mlp.experts.down_proj_scales", lambda t: t[..., :1], "expected shape .4, 64, 2., found"),
        (
            "model.layers.0.mlp.experts.down_proj_blocks",
            lambda t: t[..., :8],
            "expected .experts, columns, blocks, 16.",
        ),
    ],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_are_refused_in_a_line(name, tmp_path):
    """A scale that is missing, short or of another kind must not be found by a crash, or never."""
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
        save_nf4(tmp_path)
    else:
        save_stored(tmp_path, name)
    whole = (tmp_path / "model.safetensors").read_bytes()
    plan(tmp_path)
    for key, change, expected in DAMAGES[name]:
        rewrite(tmp_path, damage(key, change))
        with pytest.raises(CheckpointError, match=expected) as caught:
            plan(tmp_path)
        assert "\n" not in str(caught.value)
        (tmp_path / "model.safetensors").write_bytes(whole)


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
