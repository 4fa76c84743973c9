"""What each placement promises: files are left alone and shared, nodes are found, wrong ones are named."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from helpers.bases import save_base
from helpers.forked_ranks import read_status_bytes, run_ranks
from helpers.scenarios import one_step
from helpers.tiny import (
    NUM_LAYERS,
    build_base,
    build_model,
    fill_lora_b,
    find_differences,
    make_batch,
    set_checkpointing,
)
from peft import LoraConfig
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import lorashard
from lorashard.engine import Placeholder
from lorashard.errors import CheckpointError, ConfigError
from lorashard.runtime import dist

_M_MMAP_THRESHOLD = -3  # malloc.h


def load(folder: str, dropout: float = 0.0, checkpointing: str = "off", dtype=torch.float32, **options):
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = lorashard.load(folder, config, dtype=dtype, **options)
    fill_lora_b(model)
    set_checkpointing(model, checkpointing)
    return model.train()


def check_file(rank: int, folder: str) -> dict:
    model = load(folder, dtype=torch.bfloat16, placement="file")
    base = [p for p in model.parameters() if not p.requires_grad]
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    mapped = [range(*(int(part, 16) for part in line[0].split("-"))) for line in lines]
    assert model.to(torch.device("cpu", 0)) is model  # as Trainer does
    one_step(model)
    stats = lorashard.stats(model)
    return {
        "rights": {line[1][:3] for line in lines},
        "placeholders": sum(isinstance(p, Placeholder) for p in base),
        "outside": sum(not any(p.data_ptr() in area for area in mapped) for p in base),
        "cost": (stats.num_gathers, stats.num_copies, stats.slot_bytes, stats.bytes_at_rest, stats.host_bytes_at_rest),
    }


def test_files_are_computed_with_where_they_lie(tmp_path):
    """A copy at rest, on any rank, is what this placement is chosen to avoid; a write would spoil the hub's cache."""
    folder = save_base(tmp_path / "base", "llama")
    before = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    for facts in run_ranks(check_file, 2, folder):
        assert facts == {"rights": {"r--"}, "placeholders": 0, "outside": 0, "cost": (0, 0, 0, 0, 0)}
    assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == before


def test_wide_weights_are_aligned_as_torch_aligns_them(tmp_path):
    """MKL adds in another order where a float32 matrix is not: gradients differ in their last bits, at times."""
    build_base("llama").save_pretrained(tmp_path)
    header_bytes = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (8 + header_bytes) % 64, "this file is aligned by chance"
    model = load(str(tmp_path), placement="file", dtype=torch.float32)
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters() if not p.requires_grad)


def check_own_memory(rank: int, folder: str, placement: str) -> int:
    small = load(str(Path(folder).parent / "small"), dtype=torch.bfloat16, placement=placement)
    small(**make_batch(rows=1, tokens=4)).loss.backward()  # imports, kernels
    # What other tests left free would be taken first, and not be seen to grow: trim it, and map what is large anew.
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    before = read_status_bytes("RssAnon")
    model = load(folder, dtype=torch.bfloat16, placement=placement)
    model(**make_batch(rows=1, tokens=4)).loss.backward()
    return read_status_bytes("RssAnon") - before


def test_ranks_on_files_share_one_copy(tmp_path):
    """A private page for each rank is a full copy of the base again, in memory that the kernel cannot take back."""
    build_base("llama", torch.bfloat16).save_pretrained(tmp_path / "small")
    sizes = dict(hidden_size=512, intermediate_size=2048, vocab_size=8192, num_hidden_layers=6)
    base = build_base("llama", torch.bfloat16, **sizes)
    base.save_pretrained(tmp_path / "large")
    base_bytes = sum(p.numel() * 2 for p in base.parameters())
    del base
    assert base_bytes > 50 * 2**20
    folder = str(tmp_path / "large")
    on_files = run_ranks(check_own_memory, 2, folder, "file")
    copied = run_ranks(check_own_memory, 2, folder, "replicate")
    # What a step takes beside the base (adapters, the CPU's kernels) differs by CPU, and is in both.
    saved = [one - other for one, other in zip(copied, on_files, strict=True)]
    assert all(grown < 0.4 * base_bytes for grown in on_files), (on_files, copied)
    assert all(bytes_saved > 0.8 * base_bytes for bytes_saved in saved), (on_files, copied)


def check_uneven(rank: int, folder: str) -> tuple[int, int]:
    model = load(folder, placement="file")
    parallel = DistributedDataParallel(model)
    num_steps = 0
    with Join([parallel]):
        for seed in range(3 if rank == 0 else 1):
            parallel(**make_batch(seed=seed)).loss.backward()
            num_steps += 1
    model.eval()
    tokens = model.generate(make_batch()["input_ids"], max_new_tokens=2 + 5 * rank, do_sample=False)
    return num_steps, tokens.shape[1] - make_batch()["input_ids"].shape[1]


def test_ranks_on_files_do_not_wait_for_one_another(tmp_path):
    """Ranks with different numbers of batches, or tokens to generate, hang wherever a gather is in their path."""
    assert run_ranks(check_uneven, 2, save_base(tmp_path / "base", "llama")) == [(3, 2), (1, 7)]


def check_merging(rank: int, folder: str) -> list[bool]:
    models = [load(folder, placement="host", resident_layers=1), load(folder, placement="file")]
    for model, name in itertools.product(models, ("merge_adapter", "merge_and_unload")):
        with pytest.raises(ConfigError) as caught:
            getattr(model, name)()
        assert name in str(caught.value)
    return [layer.merged for model in models for name, layer in model.named_modules() if name.endswith("q_proj")]


def test_a_refused_merge_merges_nothing(tmp_path):
    """Resident layers can be merged into and sharded ones cannot: half a merge switches half of the adapter off."""
    found = run_ranks(check_merging, 2, save_base(tmp_path / "base", "llama"))
    assert found == [[False] * 2 * NUM_LAYERS] * 2


def check_new_heads(rank: int, folder: str) -> list[bool]:
    logits = {}
    for placement, seed in itertools.product(("replicate", "file"), (1, 2)):
        torch.manual_seed(seed)
        lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=[])
        model = lorashard.load(folder, lora, dtype=torch.float32, placement=placement).eval()
        with torch.no_grad(), model.disable_adapter():
            logits[placement, seed] = model(input_ids=make_batch()["input_ids"]).logits
    return [torch.equal(logits["replicate", seed], logits["file", seed]) for seed in (1, 2)]


def test_a_new_head_is_no_part_of_the_cache(tmp_path):
    """Its random values are this run's own: a run that finds them in the cache computes with a stranger's head."""
    assert run_ranks(check_new_heads, 1, save_base(tmp_path / "base", "llama")) == [[True, True]]


def check_nodes(rank: int, sizes: list[int], locals_: list[int]) -> int | None:
    os.environ |= {"LOCAL_WORLD_SIZE": str(sizes[rank]), "LOCAL_RANK": str(locals_[rank])}
    return dist.find_node_size()


@pytest.mark.parametrize(
    "sizes, local_ranks, node_size",
    [([2] * 4, [0, 1, 0, 1], 2), ([3, 3, 3, 1], [0, 1, 2, 0], None), ([2] * 4, [0, 0, 1, 1], None)],
)
def test_a_node_is_the_same_for_all_ranks(sizes, local_ranks, node_size):
    """Ranks that take different groups for their node wait for each other for ever, or shard across the network."""
    assert run_ranks(check_nodes, 4, sizes, local_ranks) == [node_size] * 4


def check_refusals(rank: int, folder: str) -> list[str]:
    messages = []
    wrong = ({"shard_group_size": 2}, {"placement": "nowhere"}, {"prefetch": -1}, {"shard_group_size": "node"})
    for options in wrong:
        with pytest.raises(ConfigError) as caught:
            load(folder, **options)
        messages.append(str(caught.value))
    return messages


def test_wrong_placements_are_named(tmp_path):
    """Three ranks in groups of two would leave one alone, waiting for ever."""
    for messages in run_ranks(check_refusals, 3, save_base(tmp_path / "base", "llama")):
        assert "shard_group_size" in messages[0] and "placement" in messages[1]
        assert "prefetch" in messages[2] and "LOCAL_WORLD_SIZE" in messages[3]


def test_a_model_in_memory_has_no_files():
    """Silently sharding it instead would take memory that the person has not."""
    with pytest.raises(ConfigError, match="lorashard.load"):
        lorashard.shard(build_model(), placement="file")


def list_cache(home: Path) -> dict[str, int]:
    return {str(file.relative_to(home)): file.stat().st_mtime_ns for file in home.glob("lorashard/converted/*/*")}


def test_weights_are_converted_once_for_each_content(tmp_path, own_cache):
    """A cache that is taken for another checkpoint's gives wrong weights; one that is never found fills the disk."""
    folder = save_base(tmp_path / "base", "llama")
    load(folder, placement="file", dtype=torch.float32)
    first = list_cache(own_cache)
    assert first
    copied = shutil.copytree(folder, tmp_path / "copy")
    load(str(copied), placement="file", dtype=torch.float32)
    assert list_cache(own_cache) == first
    file = next(copied.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x80
    file.write_bytes(content)
    load(str(copied), placement="file", dtype=torch.float32)
    assert len(list_cache(own_cache)) == 2 * len(first)


def check_full_disk(rank: int, folder: str) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    with pytest.raises(CheckpointError) as caught:
        load(folder, placement="file", dtype=torch.float32)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    expected, found = (one_step(load(folder, placement=placement)) for placement in ("replicate", "file"))
    assert find_differences(found, expected) == []
    return str(caught.value)


def test_a_full_disk_costs_nothing_but_the_run(tmp_path, own_cache):
    """Half a cache that is taken for a whole one gives wrong weights for ever after."""
    (message,) = run_ranks(check_full_disk, 1, save_base(tmp_path / "base", "llama"))
    assert "HF_HOME" in message and "\n" not in message
    assert not list(own_cache.rglob("*.partial*"))
