"""The cache of a quantized base: written on request, once, distinguished by format and dtype, never incomplete."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from helpers.bases import save_base
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.planning import WIDE
from helpers.scenarios import one_step
from helpers.tiny import (
    build_base,
    fill_lora_b,
    find_differences,
    set_checkpointing,
)
from peft import LoraConfig, PeftModel

import lorashard
from lorashard.errors import CheckpointError
from lorashard.model import sources

DOUBLE = lorashard.Quantization("nf4", double_quant=True)
QUICK = {"nf4 double": DOUBLE, "int8": "int8"}
OTHERS = {"nf4": "nf4", "fp8": "fp8"}
LAYERS = 3


@pytest.fixture
def cache(own_cache) -> Path:
    return own_cache / "lorashard" / "converted"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    build_base("llama", torch.bfloat16, num_hidden_layers=LAYERS, **WIDE).save_pretrained(folder)
    return str(folder)


def load(folder: str, quantization: object = "nf4", checkpointing: str = "off", **options) -> PeftModel:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu")} | options
    model = lorashard.load(folder, lora, quantization=quantization, **options)
    fill_lora_b(model)
    set_checkpointing(model, checkpointing)
    return model.train()


def take_bytes(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return what each unit's home holds on this rank, by the names of its tensors."""
    found = {}
    for unit in lorashard.api.engine_of(model).units:
        views = unit.home.views()
        if views is None:
            found[unit.name] = unit.home.shard.clone()
        else:
            fields = zip(unit.layout.fields, views, strict=True)
            found |= {field.name: view.reshape(-1).view(torch.uint8).clone() for field, view in fields}
    return found


def is_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def list_files(cache: Path) -> dict[Path, tuple[int, int]]:
    """Return which files there are, and when each was written last."""
    stats = {file: file.stat() for file in cache.glob("*/*")}
    return {file: (stat.st_ino, stat.st_mtime_ns) for file, stat in stats.items()}


def check_cache(rank: int, folder: str, cache: Path, formats: dict[str, object]) -> list:
    """Load without a cache, with a new one, and from it; return what differs, or was written or quantized again."""
    quantize, num_quantized = sources.quantize_parts, [0]

    def counted(*args):
        num_quantized[0] += 1
        return quantize(*args)

    sources.quantize_parts = counted
    wrong: list = []
    placements = ({"placement": "replicate"}, {"placement": "shard"}, {"placement": "host", "resident_layers": 2})
    for name, quantization in formats.items():
        before = list_files(cache)
        torch.distributed.barrier()
        plain = [take_bytes(load(folder, quantization, **options)) for options in placements]
        gradients = one_step(load(folder, quantization, placement="replicate"))
        wrong += [] if list_files(cache) == before else [(name, "written without a request")]
        torch.distributed.barrier()
        mapped = load(folder, quantization, placement="file")
        made = list_files(cache)
        wrong += [] if len(made) == len(before) + LAYERS else [(name, made)]
        wrong += [] if is_equal(take_bytes(mapped), plain[0]) else [(name, "file")]
        wrong += find_differences(one_step(mapped), gradients)
        at_first, num_quantized[0] = num_quantized[0], 0
        for options, expected in zip(placements, plain, strict=True):
            found = take_bytes(load(folder, quantization, **options))
            wrong += [] if is_equal(found, expected) else [(name, options)]
        wrong += [(name, "quantized again")] if num_quantized[0] or not at_first else []
        wrong += [] if list_files(cache) == made else [(name, "written again")]
        torch.distributed.barrier()
    return wrong


@pytest.mark.parametrize("world_size, formats", ((2, QUICK), slow(2, OTHERS), slow(1, QUICK | OTHERS)))
def test_the_cache_has_the_bytes_of_quantizing_and_is_written_once(folder, cache, world_size, formats):
    """A shard from the wrong place of a file, or two processes that write one file, silently give wrong weights."""
    assert run_ranks(check_cache, world_size, folder, cache, formats) == [[]] * world_size
    assert len([path for path in cache.iterdir() if path.is_dir()]) == len(formats)


def test_the_cache_is_written_on_request_for_each_format_and_dtype(folder, cache, caplog):
    """A cache of another dtype or format that is mistaken for the run's own gives other values than requested."""
    caplog.set_level("INFO", "lorashard")
    load(folder, placement="replicate")
    assert not cache.exists()
    expected = {}
    for quantization, dtype in itertools.product(("nf4", "int8"), (torch.bfloat16, torch.float32)):
        options = {"quantization": quantization, "dtype": dtype, "placement": "replicate"}
        expected[quantization, dtype] = take_bytes(load(folder, **options))
        load(folder, cache_quantized=True, **options)
        caplog.clear()
        assert is_equal(take_bytes(load(folder, **options)), expected[quantization, dtype])
        (line,) = [record.getMessage() for record in caplog.records if str(cache) in record.getMessage()]
        assert "delete" in line
    caches = [path for path in cache.iterdir() if path.is_dir()]
    assert len(caches) == len(expected)
    # A file that lost its end, as on a disk that was full when it was copied.
    for file in caches[0].iterdir():
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"delete .*{caches[0]}"):
        for quantization, dtype in expected:
            load(folder, quantization, dtype=dtype, placement="replicate")


@pytest.mark.parametrize(
    "options", ({"placement": "replicate", "cache_quantized": True}, {"placement": "file"}), ids=str
)
def test_converting_reports_its_progress(folder, cache, options):
    """Catches a run whose bar and status stop for the minutes of converting."""
    reported: list[tuple[int, int | None, str]] = []
    load(folder, progress=lambda *counts: reported.append(counts), **options)
    converted = [counts for counts in reported if counts[2] == "units converted"]
    assert converted[:LAYERS] == [(number, LAYERS, "units converted") for number in range(1, LAYERS + 1)]
    assert reported[-1][2] == "units"


def check_full_disk(rank: int, folder: str) -> list[str]:
    messages = []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for options in ({"placement": "shard", "cache_quantized": True}, {"placement": "file"}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        with pytest.raises(CheckpointError) as caught:
            load(folder, **options)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        messages.append(str(caught.value))
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1000)
    with pytest.raises(CheckpointError) as caught:
        load(folder, placement="shard", cache_quantized=True)
    shutil.disk_usage = usage
    return [*messages, str(caught.value)]


def test_a_full_disk_is_reported_in_one_line(folder, cache):
    """A traceback, or a cache without its last unit, where the disk is full."""
    (messages,) = run_ranks(check_full_disk, 1, folder)
    assert all("HF_HOME" in message and "\n" not in message for message in messages)
    assert all("cache_quantized" in message for message in (messages[0], messages[2]))
    assert "'host'" in messages[1]
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def check_experts(rank: int, folder: str, formats: dict[str, object]) -> list[str]:
    wrong = []
    for name, quantization in formats.items():
        expected = one_step(load(folder, quantization, placement="replicate"))
        for options in ({"placement": "shard"}, {"placement": "file"}):
            found = one_step(load(folder, quantization, **options))
            wrong += [f"{name}, {options}: {key}" for key in find_differences(found, expected)]
    return wrong


@pytest.mark.parametrize("formats", (QUICK, slow(OTHERS)), ids=("quick", "others"))
def test_quantized_experts_with_every_placement(tmp_path, formats):
    """Experts are stored one by one and kept together: blocks of one must not be scaled by another's."""
    assert run_ranks(check_experts, 2, save_base(tmp_path / "mixtral", "mixtral"), formats) == [[]] * 2
