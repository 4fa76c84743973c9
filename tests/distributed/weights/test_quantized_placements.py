"""A quantised base on the disk: a cache that is asked for, made once, told apart, and never half."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers.bases import save_base
from helpers.forked_ranks import run_ranks
from helpers.tiny import (
    NUM_LAYERS,
    build_base,
    fill_lora_b,
    find_differences,
    make_batch,
    set_checkpointing,
    take_gradients,
)
from peft import LoraConfig, PeftModel

import lorashard
from lorashard.errors import CheckpointError
from lorashard.model import converted, sources

DOUBLE = lorashard.Quantization("nf4", double_quant=True)
FORMATS = {"nf4": "nf4", "nf4 double": DOUBLE, "int8": "int8", "fp8": "fp8"}
# As in large models: the MLP is 2.75 times as wide, so that norms and padding are nothing beside the linears.
SIZES = dict(hidden_size=128, intermediate_size=352, vocab_size=512)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> Path:
    """The cache is a folder of the test's own."""
    home = tmp_path_factory.mktemp("hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    return home / "lorashard" / "converted"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("base")
    build_base("llama", torch.bfloat16, **SIZES).save_pretrained(folder)
    return str(folder)


def load(folder: str, quantization: object = "nf4", checkpointing: str = "off", **options) -> PeftModel:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    options = {"dtype": torch.bfloat16, "device": torch.device("cpu")} | options
    model = lorashard.load(folder, lora, quantization=quantization, **options)
    fill_lora_b(model)
    set_checkpointing(model, checkpointing)
    return model.train()


def one_step(model: PeftModel) -> dict[str, torch.Tensor]:
    model(**make_batch()).loss.backward()
    return take_gradients(model)


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


def check_cache(rank: int, folder: str) -> dict[str, object]:
    """Load without a cache, making one, and from it; say what differs, and what each rank wrote and quantised."""
    write, quantize, num = converted._write, sources.quantize_parts, {"written": 0, "quantised": 0}

    def counted(name, function):
        def call(*args):
            num[name] += 1
            return function(*args)

        return call

    converted._write = counted("written", write)
    sources.quantize_parts = counted("quantised", quantize)
    wrong = []
    placements = ({"placement": "replicate"}, {"placement": "shard"}, {"placement": "host", "resident_layers": 2})
    for name, quantization in FORMATS.items():
        plain = [take_bytes(load(folder, quantization, **options)) for options in placements]
        gradients = one_step(load(folder, quantization, placement="replicate"))
        assert num["written"] == 0, "made unasked"
        mapped = load(folder, quantization, placement="file")
        wrong += [] if is_equal(take_bytes(mapped), plain[0]) else [(name, "file")]
        wrong += find_differences(one_step(mapped), gradients)
        at_first, num["quantised"] = num["quantised"], 0
        for options, expected in zip(placements, plain, strict=True):
            found = take_bytes(load(folder, quantization, **options))
            wrong += [] if is_equal(found, expected) else [(name, options)]
        wrong += [(name, "quantised again")] if num["quantised"] or not at_first else []
        torch.distributed.barrier()
        num_written = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(num_written, num["written"])
        wrong += [(name, "written", num_written)] if sum(num_written) != NUM_LAYERS else []
        num["written"] = 0
    return wrong


@pytest.mark.parametrize("world_size", (1, 2))
def test_the_cache_has_the_bytes_of_quantising_and_is_made_once(folder, own_cache, world_size):
    """A shard from the wrong place of a file, or two processes that write one file, give wrong weights in silence."""
    assert run_ranks(check_cache, world_size, folder) == [[]] * world_size
    assert len([path for path in own_cache.iterdir() if path.is_dir()]) == len(FORMATS)


def test_the_cache_is_asked_for_and_told_apart(folder, own_cache, caplog):
    """A cache of another dtype or format that is taken for this one's gives other numbers than the run asked for."""
    caplog.set_level("INFO", "lorashard")
    load(folder, placement="replicate")
    assert not own_cache.exists()
    expected = {}
    for quantization, dtype in itertools.product(("nf4", "int8"), (torch.bfloat16, torch.float32)):
        options = {"quantization": quantization, "dtype": dtype, "placement": "replicate"}
        expected[quantization, dtype] = take_bytes(load(folder, **options))
        load(folder, cache_quantized=True, **options)
        caplog.clear()
        assert is_equal(take_bytes(load(folder, **options)), expected[quantization, dtype])
        (line,) = [record.getMessage() for record in caplog.records if "quantised base is read" in record.getMessage()]
        assert str(own_cache) in line and "delete it" in line
    caches = [path for path in own_cache.iterdir() if path.is_dir()]
    assert len(caches) == len(expected)
    # A file that lost its end, as on a disk that was full when it was copied.
    for file in caches[0].iterdir():
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"damaged: delete the folder {caches[0]}"):
        for quantization, dtype in expected:
            load(folder, quantization, dtype=dtype, placement="replicate")


@pytest.mark.parametrize(
    "options", ({"placement": "replicate", "cache_quantized": True}, {"placement": "file"}), ids=str
)
def test_who_hears_of_loading_hears_of_converting(folder, own_cache, options):
    """Catches a run whose bar and status stand still for the minutes of converting."""
    told: list[tuple[int, int | None, str]] = []
    load(folder, progress=lambda *counts: told.append(counts), **options)
    converted = [counts for counts in told if counts[2] == "units converted"]
    assert converted[:NUM_LAYERS] == [(number, NUM_LAYERS, "units converted") for number in range(1, NUM_LAYERS + 1)]
    assert told[-1][2] == "units"


def convert_slowly(folder: str) -> None:
    write = converted._write

    def slow(*args):
        write(*args)
        time.sleep(60)

    converted._write = slow
    load(folder, placement="replicate", cache_quantized=True)


def test_a_kill_while_converting_leaves_nothing_half(folder, own_cache):
    """Half a cache that is taken for a whole one gives zeros for weights; one that nobody removes fills the disk."""
    expected = take_bytes(load(folder, placement="replicate"))
    process = multiprocessing.get_context("fork").Process(target=convert_slowly, args=(folder,))
    process.start()
    deadline_s = time.monotonic() + 60
    while not list(own_cache.glob("*.partial-*/layers.0")) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (left,) = own_cache.glob("*.partial-*")
    assert is_equal(take_bytes(load(folder, placement="replicate")), expected)
    assert left.exists()  # who does not write removes nothing
    assert is_equal(take_bytes(load(folder, placement="replicate", cache_quantized=True)), expected)
    assert not list(own_cache.glob("*.partial-*"))
    (made,) = [path for path in own_cache.iterdir() if path.is_dir()]
    assert len(list(made.iterdir())) == NUM_LAYERS
    assert is_equal(take_bytes(load(folder, placement="file")), expected)


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


def test_a_full_disk_is_told_in_a_line(folder, own_cache):
    """A traceback from deep inside, or a cache without its last unit, where there is no room."""
    (messages,) = run_ranks(check_full_disk, 1, folder)
    assert all("HF_HOME" in message and "\n" not in message for message in messages)
    assert "could not be written" in messages[0] and "leave cache_quantized out" in messages[0]
    assert "choose placement 'host'" in messages[1]
    assert "cache_quantized has to keep" in messages[2]
    assert [path for path in own_cache.iterdir() if path.suffix != ".lock"] == []


def check_experts(rank: int, folder: str) -> list[str]:
    wrong = []
    for name, quantization in FORMATS.items():
        expected = one_step(load(folder, quantization, placement="replicate"))
        for options in ({"placement": "shard"}, {"placement": "file"}):
            found = one_step(load(folder, quantization, **options))
            wrong += [f"{name}, {options}: {key}" for key in find_differences(found, expected)]
    return wrong


def test_quantised_experts_rest_anywhere(tmp_path):
    """Experts are stored one by one and kept together: blocks of one must not be scaled by another's."""
    assert run_ranks(check_experts, 2, save_base(tmp_path / "mixtral", "mixtral")) == [[]] * 2
