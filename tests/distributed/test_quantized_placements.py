"""What a quantised base costs: bytes at rest, on the wire, in memory and on disk; and a cache that is never half."""

from __future__ import annotations

import gc
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
from peft import LoraConfig, PeftModel
from support import run_ranks
from test_loading import save_base
from test_memory import count_live_bytes
from tiny import NUM_LAYERS, build_base, fill_lora_b, find_differences, make_batch, set_checkpointing, take_gradients

import lorashard
from lorashard.engine import Packed, Placeholder
from lorashard.errors import CheckpointError
from lorashard.model import converted, sources

DOUBLE = lorashard.Quantization("nf4", double_quant=True)
FORMATS = {"nf4": "nf4", "nf4 double": DOUBLE, "int8": "int8", "fp8": "fp8"}
# As in large models: the MLP is 2.75 times as wide, so that norms and padding are nothing beside the linears.
SIZES = dict(hidden_size=128, intermediate_size=352, vocab_size=512)
LAYER_NUMEL = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 352
NORMS_NUMEL = 2 * 128


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
    options |= {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    model = lorashard.load(folder, lora, quantization=quantization, **options)
    fill_lora_b(model)
    set_checkpointing(model, checkpointing)
    return model.train()


def one_step(model: PeftModel) -> dict[str, torch.Tensor]:
    model(**make_batch()).loss.backward()
    return take_gradients(model)


# -- bytes -------------------------------------------------------------------------------------------------------------


def check_bytes(rank: int, folder: str, world_size: int) -> dict[str, dict[str, int]]:
    found = {}
    for (name, quantization), placement in itertools.product({"none": None, **FORMATS}.items(), ("shard", "host")):
        model = load(folder, quantization, placement=placement)
        one_step(model)
        stats, units = lorashard.stats(model), lorashard.api.engine_of(model).units
        total = {unit.name: unit.layout.total_bytes for unit in units}
        # Down after up, the layers that are still in the slots are free.
        passes = (2 * NUM_LAYERS - 3) * total["layers.0"] + total["embedding"] + total["head"]
        assert stats.gathered_bytes == passes, (name, placement)
        assert stats.copied_bytes == (passes // world_size if placement == "host" else 0), (name, placement)
        rest = [stats.bytes_at_rest, stats.host_bytes_at_rest]
        expected = sum(unit.layout.shard_bytes for unit in units)
        assert rest == ([0, expected] if placement == "host" else [expected, 0]), (name, placement)
        packed = [weight.placeholder.numel() for unit in units for weight in unit.weights if weight.packing]
        assert stats.workspace_bytes == max(packed, default=0) * 2, (name, placement)
        found[name] = {"layer": total["layers.0"], "used": sum(field.num_bytes for field in units[1].layout.fields)}
    return found


def test_packed_bytes_are_what_is_gathered_copied_and_kept(folder):
    """Numbers unpacked before they are sent, or kept beside their bytes, would cost as much as an unquantised base."""
    (found, _) = run_ranks(check_bytes, 2, folder, 2)
    per_number = {
        "none": 2,
        "nf4": 1 / 2 + 4 / 64,  # 1/3.56 of bf16's
        "nf4 double": 1 / 2 + 1 / 64 + 4 / (64 * 256),  # 1/3.88
    }
    for name, expected in per_number.items():
        used = LAYER_NUMEL * expected + NORMS_NUMEL * 2
        assert used <= found[name]["used"] <= used + 7 * 8, name  # of double quantisation an offset for each weight
    rows = 128 + 64 + 64 + 128 + 2 * 352 + 128
    for name in ("int8", "fp8"):
        assert found[name]["used"] == LAYER_NUMEL + 4 * rows + NORMS_NUMEL * 2
    ratios = {name: found["none"]["layer"] / one["layer"] for name, one in found.items()}  # with the padding
    assert ratios["nf4"] > 3.5 and ratios["nf4 double"] > 3.6 and min(ratios["int8"], ratios["fp8"]) > 1.9, ratios


def list_storages() -> dict[int, int]:
    """Return {address: bytes} of every storage that a reachable tensor holds."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, (Placeholder, Packed))]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def measure_kept(model: PeftModel) -> int:
    """Return the bytes that a forward keeps for its backward, with so few tokens that weights would outweigh them."""
    batch = make_batch(rows=1, tokens=4)
    model(**batch).loss.backward()  # what is made once is made here
    kept = []
    for _ in range(3):  # the heap is other threads' too, who take more now and then
        before = count_live_bytes()
        loss = model(**batch).loss
        kept.append(count_live_bytes() - before)
        loss.backward()
    return min(kept)


def check_memory(rank: int, folder: str) -> dict[str, object]:
    kept = {}
    for quantization, checkpointing in itertools.product((None, "nf4"), ("off", "non-reentrant")):
        model = load(folder, quantization, checkpointing, placement="shard")
        kept[quantization, checkpointing] = measure_kept(model)
    del model
    before = list_storages()
    model = load(folder, DOUBLE, placement="shard")
    model(**make_batch(rows=1, tokens=4)).loss.backward()
    model.zero_grad()
    engine = lorashard.api.engine_of(model)
    allowed = {slot.address for slot in engine.pool} | {unit.home.shard.data_ptr() for unit in engine.units}
    allowed |= {buffer.data_ptr() for unit in engine.units for buffer in unit.workspace._buffers}
    smallest = 64 * 128  # k_proj, in 8 bits
    others = {a: n for a, n in list_storages().items() if a not in before and a not in allowed and n >= smallest}
    return {"kept": kept, "others": others}


def test_nothing_of_the_base_is_unpacked_but_in_the_workspace(folder):
    """Numbers that autograd keeps, or a copy on the module, would be the whole base in bf16 after one forward."""
    for found in run_ranks(check_memory, 2, folder):
        assert found["others"] == {}
        for checkpointing in ("off", "non-reentrant"):
            kept, plain = (found["kept"][quantization, checkpointing] for quantization in ("nf4", None))
            assert abs(kept - plain) < LAYER_NUMEL // 4, (checkpointing, kept, plain)


# -- files -------------------------------------------------------------------------------------------------------------


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
