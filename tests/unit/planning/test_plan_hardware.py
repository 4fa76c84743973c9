"""Machines that are named, recognized or measured, and the command that plans for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import run_cli
from helpers.planning import LORA, measure_peak
from helpers.tiny import build_base
from peft import LoraConfig, PeftModel
from transformers import LlamaConfig

from lorashard.cli import main
from lorashard.config.run_config import RunConfig
from lorashard.errors import CheckpointError, ConfigError
from lorashard.planning import auto
from lorashard.planning.hardware import HardwareOptions, find_gpu_type, guess_gpu_type, known_gpu_types, usable_bytes
from lorashard.planning.probe import probe, time_file
from lorashard.planning.run_plan import describe_training, forecast
from lorashard.planning.size import ModelSize, build_meta_model, compare_with_headers, measure_model
from lorashard.planning.trace import trace

GIB = 2**30


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A folder with a config.json alone; what was traced of it is recalled from one test to another."""
    folder = tmp_path_factory.mktemp("base")
    build_base("llama").config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "gib", "gpu_type"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA B200", 180, "b200"),
        ("NVIDIA L4", 24, "l4"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA A10G", 24, "a10g"),
        ("NVIDIA GeForce RTX 3090", 24, "rtx3090"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA GeForce RTX 5090", 32, "rtx5090"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "rtx6000-ada"),
        ("NVIDIA RTX A6000", 48, "rtx-a6000"),
        ("Some Other Card", 140, "h200"),
    ],
)
def test_a_gpu_is_recognized_by_its_drivers_name(name, gib, gpu_type):
    """Catches an L40S taken for an L4, whose name it contains, and an A100 with half of its memory."""
    assert guess_gpu_type(name, gib * GIB) == gpu_type


@pytest.mark.parametrize("gpu_type", known_gpu_types())
def test_a_known_gpu_is_plausible(gpu_type):
    """Catches a figure in another unit: a plan would be wrong by a thousand, or nothing would ever fit."""
    hardware = find_gpu_type(gpu_type)
    assert 20 * GIB < hardware.memory_bytes < 300 * GIB
    assert 4e13 < hardware.flops_per_s < 3e15
    assert 2e11 < hardware.memory_bytes_per_s < 1e13
    assert 1e10 < hardware.host_bytes_per_s < 1e11
    assert 5e9 < hardware.peer_bytes_per_s < 1e12
    assert 0.8 * hardware.memory_bytes < usable_bytes(hardware.memory_bytes) < hardware.memory_bytes


def test_what_is_given_replaces_what_is_known():
    """Catches links of a data sheet planned with where the machine has others."""
    options = HardwareOptions("l4", "40GB", 2, peer_gb_per_s=1, network_gb_per_s=2)
    hardware = options.apply(find_gpu_type("l4"))
    assert hardware.memory_bytes == 40 * 10**9
    assert (hardware.peer_bytes_per_s, hardware.network_bytes_per_s) == (1e9, 2e9)
    assert HardwareOptions(gpu_memory="24GiB").memory_bytes() == HardwareOptions(gpu_memory="24").memory_bytes()


MISTAKES = [
    (["--gpu_type", "h100"], "h100-sxm or h100-pcie?"),
    (["--gpu_type", "RTX_4090"], "rtx4090?"),
    (["--gpu_memory", "plenty"], "24GiB"),
    (["--nodes", "0"], "nodes"),
    (["--gpu_typ", "l4"], "gpu_typ:"),
    ([], "model_name_or_path"),
]


def test_help_and_mistakes_of_a_plan_need_no_heavy_imports():
    """Catches an import that costs seconds, an option that nobody can find, and a traceback for a misspelled name."""
    commands = [["plan", *(["--model", "m"] if words else []), *words] for words, _ in MISTAKES]
    (code, imported, stdout, _), *found = run_cli(["plan", "--help"], *commands)
    assert (code, imported) == (0, [])
    for name in ("gpu_type", "gpu_memory", "nodes", "peer_gb_per_s", "network_gb_per_s", "epoch_tokens", "json"):
        assert f"--{name}" in stdout
    for (words, message), (code, imported, stdout, stderr) in zip(MISTAKES, found, strict=True):
        assert (code, imported, stdout) == (2, [], ""), words
        assert message in stderr and len(stderr.splitlines()) == 1


def plan_words(base: str, *words: str) -> list[str]:
    return ["plan", "--model", base, "--gpu_type", "l4", "--gpus", "2", "--max_length", "64", *words]


def test_a_plan_needs_a_config_alone(base, capsys):
    """Catches a plan that wants weights, a dataset or a GPU."""
    assert main(plan_words(base, "--json", "--epoch_tokens", "1000")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][found["chosen"]]["placement"]["placement"] == "replicate"
    assert {row["placement"]["placement"] for row in found["rows"]} == {"replicate", "shard", "host", "file"}
    assert all(row["dataset_s"] > 0 for row in found["rows"])
    assert any("planned from config.json alone" in note for note in found["notes"]) and found["estimate"] is None


def test_options_of_a_run_change_its_plan(base, capsys):
    """Catches options that the plan does not read."""

    def plan(*words: str) -> dict:
        """Return the row of shards of all layers."""
        assert main(plan_words(base, "--json", *words)) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        shards = (row for row in rows if row["placement"]["placement"] == "shard")
        return next(row for row in shards if not row["placement"]["resident_layers"])

    plain = plan()
    large = plan("--per_device_train_batch_size", "32", "--lora_r", "64", "--dtype", "float32")
    assert large["activation_bytes"] > 2 * plain["activation_bytes"]
    assert large["adapter_bytes"] > 3 * plain["adapter_bytes"]
    assert large["rest_bytes"] > 1.8 * plain["rest_bytes"]
    words = ("--gradient_accumulation_steps", "4", "--activation_checkpointing", "false", "--optim", "adamw_bnb_8bit")
    other = plan(*words)
    assert other["gathered_bytes"] == 4 * plain["gathered_bytes"] > 0
    assert other["activation_bytes"] > plain["activation_bytes"]
    assert other["adapter_bytes"] < plain["adapter_bytes"]
    assert plan("--prefetch", "3")["slot_bytes"] > plain["slot_bytes"]


def test_without_gpus_and_names_a_plan_says_what_to_give(base, capsys):
    """Catches a plan for hardware that nobody named."""
    assert main(["plan", "--model", base, "--gpus", "3", "--max_length", "64"]) == 2
    error = capsys.readouterr().err
    assert "3 GPUs" in error and "--gpu_type (a100-40gb" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose speeds count")
def test_memory_alone_is_planned_for_with_a_note(base, capsys):
    """Catches speeds of some card taken for granted."""
    assert main(["plan", "--model", base, "--gpus", "4", "--gpu_memory", "24GiB", "--max_length", "64"]) == 0
    assert "note: no such" in capsys.readouterr().out


def test_ranks_on_the_cpu_are_planned_for(base, tmp_path, monkeypatch, capsys):
    """Catches a probe that needs a GPU, or that forgets."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["plan", "--model", base, "--cpu", "2", "--max_length", "64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["placement"]["placement"] for row in rows} == {"replicate", "shard", "file"}
    assert list(tmp_path.glob(".cache/lorashard/speeds.json"))


def test_a_trace_is_recalled_until_the_model_or_the_microbatch_changes(base, monkeypatch, tmp_path):
    """Each edit of a form traced again; and a plan of another adapter, length or config would be that of the last."""
    base = shutil.copytree(base, tmp_path / "base")  # whose config is changed
    traced, found = [], []

    def trace_once(*args):
        found[:] = found or [trace(*args)]
        traced.append(1)
        return found[0]

    monkeypatch.setattr(auto, "trace", trace_once)

    def count(**options) -> int:
        before = len(traced)
        given = {"model_name_or_path": str(base), "max_length": 8, "gpus": 2} | options
        forecast(RunConfig(**given), HardwareOptions("l4"))
        return len(traced) - before

    assert count() == 2  # with and without activation checkpointing
    assert count(placement="shard", resident_layers=1) == count(learning_rate=1.0, gpus=4) == 0
    assert count(lora_r=2) == count(max_length=9) == 2
    config = Path(base, "config.json")
    config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    assert count() == 2


def test_a_damaged_cache_of_speeds_is_measured_again(tmp_path, caplog):
    """Catches a run that cannot start because a file in a cache was cut short."""
    cache = tmp_path / "speeds.json"
    cache.write_text('{"half')
    hardware = probe(torch.device("cpu"), torch.float32, cache)
    assert "measured again" in caplog.text
    assert json.loads(cache.read_text())
    assert probe(torch.device("cpu"), torch.float32, cache) == hardware


def test_files_are_timed_as_they_are_read():
    """Catches a probe that needs a disk with room, or that times nothing: no GPU is here to say so."""
    target = torch.full((5000,), 7, dtype=torch.uint8)
    assert time_file(target, torch.device("cpu")) > 0
    assert not target.any()


def test_other_weights_than_the_config_describes_are_noted(tmp_path):
    """Catches a plan for a model that is not the one in the files."""
    folder = tmp_path / "base"
    build_base("llama").save_pretrained(folder)

    def compare() -> str | None:
        return compare_with_headers(measure_model(build_meta_model(str(folder), LoraConfig(**LORA), torch.float32)))

    assert compare() is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    assert "weight files hold" in compare()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json"):
        compare()


def test_the_largest_models_are_sized_without_memory(tmp_path):
    """Catches a plan that builds adapters, or anything else of a 405B, in memory."""
    sizes = dict(vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=2)
    LlamaConfig(**sizes, num_attention_heads=128, num_key_value_heads=8).save_pretrained(tmp_path)
    found: list[tuple[PeftModel, ModelSize]] = []

    def size() -> None:
        model = build_meta_model(str(tmp_path), LoraConfig(**LORA), torch.bfloat16)
        found.append((model, measure_model(model)))

    assert measure_peak(size) < 1.1 * 128256 * 16384 * 2  # a weight at a time, to which nothing is written
    model, sized = found[0]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sized.base_bytes > 19 * GIB and 2**20 < sized.adapter_bytes < GIB


def test_a_microbatch_is_what_the_options_say():
    """Catches masks where there is no padding, and packed rows planned as padded ones."""

    def describe(**options):
        return describe_training(RunConfig(model="m", **options), "cuda", 2).microbatch

    assert (describe().num_rows, describe().row_tokens, describe().has_mask) == (8, 1024, True)
    assert not describe(per_device_train_batch_size=1).has_mask
    packed = describe(packing=True, attn_implementation="flash_attention_2", per_device_train_batch_size=2)
    assert (packed.num_rows, packed.row_tokens, packed.has_mask) == (1, 2048, False)
    assert describe(packing=True, per_device_train_batch_size=1).has_mask
    assert describe(activation_checkpointing=False).checkpointing is None
    assert describe(label_smoothing_factor=0.1).loss == "model"
    with pytest.raises(ConfigError) as error:
        describe(max_length=None)
    assert error.value.option == "max_length"
    config = RunConfig(model="m", max_length=None)
    training = describe_training(config, "cuda", 2, longest_tokens=300, epoch_tokens=1000)
    assert (training.microbatch.row_tokens, training.dataset_tokens) == (300, 3000)


def test_positions_begin_anew_with_each_packed_example():
    """Catches a warning that sequences are longer than the model was made for, where only packed ones are; and none
    where examples run on from one sequence to the next."""

    def find_longest(longest_tokens: int | None, **options: Any) -> int | None:
        config = RunConfig(model="m", max_length=4096, packing=True, **options)
        return describe_training(config, "cuda", 1, longest_tokens).longest_tokens

    assert (find_longest(None), find_longest(300), find_longest(9000)) == (None, 300, 4096)
    assert find_longest(300, packing_strategy="wrapped") == 4096
