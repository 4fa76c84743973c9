"""The plan of a quantized base, from a config alone: what fits, what is said, and files that are quantized already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paths import MODELS
from helpers.planning import FORMATS, build_experts, build_meta, build_sized
from helpers.tiny import build_base

from lorashard.cli import main
from lorashard.config.placement import PlacementOptions
from lorashard.config.quantization_options import Quantization
from lorashard.planning.choose import Plan
from lorashard.planning.inference import place_for_inference
from lorashard.planning.size import measure_model
from lorashard.planning.table import render_plan
from lorashard.planning.trace import Microbatch, trace
from lorashard.planning.unpacking import measure_unpacking
from lorashard.quantization.format import make_quantizer

LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
GIB = 2**30
TWO_LAYERS = {"num_hidden_layers": 2}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture
def run_plan(monkeypatch, capsys):
    """Run `lorashard plan` where the models' configs lie under their names; return its JSON, or its text."""
    monkeypatch.chdir(MODELS)

    def run(model: str, *words: str, expected_code: int = 0) -> Any:
        assert main(["plan", "--model", model, *words]) == expected_code
        found = capsys.readouterr()
        if expected_code:
            return found.err
        return json.loads(found.out) if "--json" in words else found.out

    return run


def test_a_70b_in_4_bits_is_planned_for_two_cards_of_24_gb(run_plan):
    """Catches a plan that ignores the format: rows of 131 GiB, or a layer's slot as large as it was."""
    words = ("--gpu_type", "rtx4090", "--gpus", "2", "--quantization", "nf4", "--per_device_train_batch_size", "1")
    words += ("--activation_checkpointing_layers", "all")  # which leaves the memory to resident layers
    found = run_plan(LLAMA_70B, *words, "--json")
    assert found.pop("estimate") is None  # without a dataset
    text = render_plan(Plan.from_json(found), 2)
    assert "70.55 B parameters, 39." in text and "quantized to nf4" in text.splitlines()[0]
    assert "workspace" in text.splitlines()[2]
    rows = {row["placement"]["placement"]: row for row in found["rows"] if not row["placement"]["resident_layers"]}
    assert found["quantization"] == "quantized to nf4"
    assert rows["shard"]["lacks"].endswith("of 21.8 GiB") and rows["host"]["lacks"] is None
    assert rows["host"]["peak_bytes"] < 12 * GIB and rows["host"]["host_bytes"] < 20 * GIB
    assert rows["host"]["workspace_bytes"] == 8192 * 28672 * 2
    assert found["rows"][found["chosen"]]["placement"]["resident_layers"] > 15


@pytest.mark.slow
def test_what_fits_in_4_bits_is_told_where_nothing_fits(run_plan, tmp_path):
    """Catches a refusal that sends a person to buy GPUs, where an option would do, and one that promises too much."""
    words = ("--gpu_type", "l4", "--gpus", "1", "--placement", "replicate", "--max_length", "64")
    reason = run_plan("meta-llama/Llama-3.1-8B", *words, "--gpu_memory", "14GiB", "--json")["reason"]
    assert "nothing fits: replicate" in reason
    assert "; with quantization: nf4, replicate fits (6." in reason and "of 12.3 GiB)" in reason
    build_base("llama", num_hidden_layers=1).config.save_pretrained(tmp_path)
    reason = run_plan(str(tmp_path), *words, "--gpu_memory", "1GiB", "--json")["reason"]  # less than a GPU keeps back
    assert reason.endswith("with quantization: nf4")


def base_bytes(quantization: Quantization | None) -> int:
    return measure_model(build_meta(build_base("llama", torch.bfloat16, **TWO_LAYERS)), quantization).base_bytes


def save_config(folder: Path, quantization: dict[str, Any]) -> str:
    build_base("llama", torch.bfloat16, **TWO_LAYERS).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return str(folder)


def test_files_that_are_quantized_already_are_planned_as_they_will_be_kept(run_plan, tmp_path):
    """Catches packed numbers counted as parameters, bytes that are unpacked while they are read, and modules that are
    in 16 bits in the files, as in the dynamic ones of the hub, planned in 4."""
    words = ("--gpu_type", "l4", "--gpus", "1", "--max_length", "64", "--json")
    stored = {
        "nf4": NF4,
        "nf4 but an MLP": NF4 | {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]},
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    found = {name: run_plan(save_config(tmp_path / name, config), *words) for name, config in stored.items()}
    assert found["nf4"]["quantization"] == "quantized to nf4"
    sizes = {None: base_bytes(None), "nf4": base_bytes(Quantization("nf4"))}
    assert found["nf4"]["rows"][0]["rest_bytes"] == sizes["nf4"]
    assert any("bitsandbytes' nf4" in note for note in found["nf4"]["notes"])
    assert found["fp8"]["quantization"] is None
    assert found["fp8"]["rows"][0]["rest_bytes"] == sizes[None] > 1.5 * sizes["nf4"]
    assert any("fp8 in blocks of 128x128: dequantized to bfloat16" in note for note in found["fp8"]["notes"])
    assert not any("weight files hold" in note for each in found.values() for note in each["notes"])
    skipped = found["nf4 but an MLP"]["rows"][0]["rest_bytes"] - sizes["nf4"]
    # Three weights of 64 x 32: two bytes a number, rather than a half, and scales that with padding take 256.
    assert skipped == 3 * (64 * 32 * (2 - 0.5) - 256)
    assert any("modules that" in note for note in found["nf4 but an MLP"]["notes"])
    error = run_plan(str(tmp_path / "nf4"), *words, "--quantization", "int8", expected_code=2)
    assert "quantization: expected nf4" in error and len(error.splitlines()) == 1


def test_each_operation_that_reads_a_quantized_weight_unpacks_it():
    """Catches time for the forward alone: a recomputed layer unpacks its weights three times, a saved one twice."""
    base = build_sized("llama", torch.bfloat16, num_hidden_layers=3)
    layer = measure_model(build_meta(base), FORMATS[0]).layers[2]
    moved_bytes = sum(weight.unpacked_bytes for weight in layer.quantized) + layer.layout.used_bytes
    for checkpointing, times in ((None, 1), ({}, 2)):
        microbatch = Microbatch(2, 96, "cuda", checkpointing=checkpointing)
        plain, packed = (trace(build_meta(base), microbatch, format) for format in (None, FORMATS[0]))
        forward = packed.forward[2].moved_bytes - plain.forward[2].moved_bytes
        backward = packed.backward[2].moved_bytes - plain.backward[2].moved_bytes
        assert forward == pytest.approx(moved_bytes, rel=0.05)
        assert backward == pytest.approx(times * moved_bytes, rel=0.05)
        assert packed.forward[2].flops == plain.forward[2].flops
        assert (packed.saved_bytes, packed.workspace_bytes) == (plain.saved_bytes, 128 * 256 * 2)


def test_experts_are_unpacked_together_where_one_operation_reads_them_all():
    """Catches a workspace for one expert where a grouped kernel reads all of them."""
    base = build_experts(num_hidden_layers=1)
    lora = {"target_modules": ["q_proj"]}
    found = trace(build_meta(base, **lora), Microbatch(1, 32, "cpu"), FORMATS[0])
    assert found.workspace_bytes == 4 * 32 * 2 * 24 * 2
    one = measure_unpacking(make_quantizer(FORMATS[2]), (4, 48, 32), torch.bfloat16, "cpu").item
    assert one is not None and one.unpacked_bytes == 48 * 32 * 2


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_a_gpu_unpacks_a_weight_by_one_kernel(quantization):
    """Catches the time of torch's own operations in the plan of a GPU, where none but kernels of their own run."""
    found = measure_unpacking(make_quantizer(quantization), (4096, 4096), torch.bfloat16, "cuda")
    bits = 16 + (8 if quantization.format != "nf4" else 4.5)
    assert found.work.num_kernels == 1
    assert found.work.moved_bytes == pytest.approx(4096 * 4096 * bits / 8, rel=0.02)


def test_a_quantized_base_is_whole_where_it_could_not_be():
    """Catches chat that streams a base in 4 bits which would fit, and a workspace that nobody has left room for."""
    base = build_sized("llama", torch.bfloat16)
    plain, packed = (measure_model(build_meta(base), quantization) for quantization in (None, Quantization("nf4")))
    least_bytes = packed.base_bytes + packed.adapter_bytes + 128 * 256 * 2 + GIB
    assert least_bytes < plain.base_bytes + plain.adapter_bytes + GIB
    for size, free_bytes, placement in (
        (packed, least_bytes, "replicate"),
        (packed, least_bytes - 1, "file"),
        (plain, least_bytes, "file"),
    ):
        assert place_for_inference(PlacementOptions(), size, "cuda", free_bytes, 0, 1, 1).placement == placement
