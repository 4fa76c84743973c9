"""Wherever the base rests, the bits are the same; what it costs is what the placement promises."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from parity_support import accumulation, evaluation_between, one_step, reference_pass, run_scenario, two_forwards
from peft import LoraConfig, PeftModel
from support import run_ranks
from test_loading import save_base
from tiny import (
    CHECKPOINTING,
    NUM_LAYERS,
    build_base,
    build_model,
    fill_lora_b,
    find_differences,
    make_batch,
    set_checkpointing,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import lorashard
from lorashard import dist
from lorashard.engine import Placeholder
from lorashard.errors import CheckpointError, ConfigError

_M_MMAP_THRESHOLD = -3  # malloc.h
SCENARIOS = (one_step, accumulation, reference_pass, evaluation_between, two_forwards)
PLACEMENTS = (
    {"placement": "replicate"},
    {"placement": "host"},
    {"placement": "file"},
    {"placement": "shard", "resident_layers": 2},
    {"placement": "shard", "resident_layers": "all"},
    {"placement": "host", "resident_layers": 1, "prefetch": 2},
    {"placement": "shard", "prefetch": 0, "resident_layers": 3},
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Converted weights go to a folder of the test's own."""
    home = tmp_path_factory.mktemp("hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    return home


def load(folder: str, dropout: float = 0.0, checkpointing: str = "off", dtype=torch.float32, **options):
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = lorashard.load(folder, config, dtype=dtype, **options)
    fill_lora_b(model)
    set_checkpointing(model, checkpointing)
    return model.train()


def run_scenarios(model: PeftModel) -> list[dict[str, torch.Tensor]]:
    return [run_scenario(scenario, model) for scenario in SCENARIOS]


def compare(rank: int, cases: list[tuple[str, dict, dict]], expected: list[list[dict]]) -> dict[str, list[str]]:
    found = {}
    for (folder, options, case), reference in zip(cases, expected, strict=True):
        results = run_scenarios(load(folder, **options, **case))
        pairs = zip(SCENARIOS, results, reference, strict=True)
        wrong = [f"{s.__name__}: {name}" for s, result, right in pairs for name in find_differences(result, right)]
        if wrong:
            found[str((folder, options, case))] = wrong
    return found


def find_wrong_cases(world_size: int, cases: list[tuple[str, dict, dict]]) -> dict[int, dict[str, list[str]]]:
    """Compare with `replicate` on one rank, which test_loading compares with plain PEFT."""
    expected = [run_scenarios(load(folder, placement="replicate", **case)) for folder, _, case in cases]
    return {rank: wrong for rank, wrong in enumerate(run_ranks(compare, world_size, cases, expected)) if wrong}


@pytest.mark.parametrize("world_size", (1, 2, pytest.param(4, marks=pytest.mark.slow)))
def test_every_placement_gives_the_bits_of_replicate(tmp_path, world_size):
    """A copy that comes late, a stretch of the wrong file, a resident unit that is gathered all the same."""
    folders = [save_base(tmp_path / family, family) for family in ("llama", "llama-tied")]
    hybrids = [{"placement": p, "shard_group_size": 2} for p in ("shard", "host")] if world_size == 4 else []
    combinations = itertools.product(CHECKPOINTING, [*PLACEMENTS, *hybrids])
    variants = itertools.cycle(itertools.product(folders, (torch.bfloat16, torch.float32), (0.0, 0.1)))
    cases = [
        (folder, options, {"checkpointing": checkpointing, "dtype": dtype, "dropout": dropout})
        for (checkpointing, options), (folder, dtype, dropout) in zip(combinations, variants, strict=False)
    ]
    assert find_wrong_cases(world_size, cases) == {}


def test_converted_checkpoints_rest_anywhere(tmp_path):
    """Experts are stored one by one and computed with together: no file holds them as the model needs them."""
    folders = [save_base(tmp_path / family, family) for family in ("mixtral", "qwen3-moe")]
    cases = [
        (folder, {"placement": placement}, {"dtype": dtype})
        for folder, placement, dtype in itertools.product(folders, ("host", "file"), (torch.bfloat16, torch.float32))
    ]
    assert find_wrong_cases(2, cases) == {}


def check_file(rank: int, folder: str) -> dict:
    model = load(folder, dtype=torch.bfloat16, placement="file")
    base = [p for p in model.parameters() if not p.requires_grad]
    mapped = [
        range(*(int(part, 16) for part in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if folder in line
    ]
    assert model.to(torch.device("cpu", 0)) is model  # as Trainer does
    one_step(model)
    stats = lorashard.stats(model)
    with torch.no_grad():
        base[0].zero_()  # private: the page is copied for this process
    with pytest.raises(ConfigError, match="in place"):
        model.merge_and_unload()
    with pytest.raises(ConfigError, match="in place"):
        model.merge_adapter()
    return {
        "placeholders": sum(isinstance(p, Placeholder) for p in base),
        "outside": sum(not any(p.data_ptr() in area for area in mapped) for p in base),
        "cost": (stats.num_gathers, stats.num_copies, stats.slot_bytes, stats.bytes_at_rest, stats.host_bytes_at_rest),
    }


def test_files_are_computed_with_where_they_lie(tmp_path):
    """A copy at rest, on any rank, is what this placement is chosen to avoid; a write would spoil the hub's cache."""
    folder = save_base(tmp_path / "base", "llama")
    before = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    for facts in run_ranks(check_file, 2, folder):
        assert facts == {"placeholders": 0, "outside": 0, "cost": (0, 0, 0, 0, 0)}
    assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == before


def test_wide_weights_are_aligned_as_torch_aligns_them(tmp_path):
    """MKL adds in another order where a float32 matrix is not: gradients differ in their last bits, at times."""
    build_base("llama").save_pretrained(tmp_path)
    header_bytes = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    assert (8 + header_bytes) % 64, "this file is aligned by chance"
    model = load(str(tmp_path), placement="file", dtype=torch.float32)
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters() if not p.requires_grad)


def check_own_memory(rank: int, folder: str, placement: str) -> int:
    def read() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    load(str(Path(folder).parent / "small"), dtype=torch.bfloat16, placement=placement)  # imports, caches
    # What other tests left free would be taken first, and not be seen to grow: trim it, and map what is large anew.
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
    before = read()
    model = load(folder, dtype=torch.bfloat16, placement=placement, checkpointing="non-reentrant")
    one_step(model)
    return read() - before


def test_ranks_on_files_share_one_copy(tmp_path):
    """A private page for each rank is a full copy of the base again, in memory that the kernel cannot take back."""
    build_base("llama", torch.bfloat16).save_pretrained(tmp_path / "small")
    sizes = dict(hidden_size=512, intermediate_size=2048, vocab_size=8192, num_hidden_layers=12)
    base = build_base("llama", torch.bfloat16, **sizes)
    base.save_pretrained(tmp_path / "large")
    base_bytes = sum(p.numel() * 2 for p in base.parameters())
    del base
    assert base_bytes > 100 * 2**20
    folder = str(tmp_path / "large")
    assert all(grown < 0.2 * base_bytes for grown in run_ranks(check_own_memory, 2, folder, "file"))
    assert all(grown > 0.5 * base_bytes for grown in run_ranks(check_own_memory, 2, folder, "replicate"))


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


def check_costs(rank: int, folder: str) -> dict:
    found = {}
    for name, options in {
        "shard": {"placement": "shard"},
        "host": {"cpu_offload": True},
        "resident": {"placement": "shard", "resident_layers": 2},
        "all": {"sharding_strategy": "SHARD_GRAD_OP"},
        "none": {"sharding_strategy": "NO_SHARD"},
        "file": {"placement": "file"},
    }.items():
        model = load(folder, dtype=torch.bfloat16, **options)
        one_step(model)
        stats = lorashard.stats(model)
        units = lorashard.api.engine_of(model).units
        whole = [unit.name for unit in units if unit.is_resident]
        found[name] = (stats, whole, {unit.name: unit.layout.total_bytes for unit in units})
    return found


@pytest.mark.parametrize("world_size", (1, 2))
def test_placements_cost_what_they_say(tmp_path, world_size):
    """A placement that keeps more than it promises does not fit where it was chosen."""
    for found in run_ranks(check_costs, world_size, save_base(tmp_path / "base", "llama")):
        shard, host, resident, every, none, file = (found[name][0] for name in found)
        base_bytes = sum(found["shard"][2].values())
        layer_bytes = found["shard"][2]["layers.0"]
        is_sharded = world_size > 1
        assert (shard.bytes_at_rest, shard.host_bytes_at_rest) == (base_bytes // world_size, 0)
        assert (host.bytes_at_rest, host.host_bytes_at_rest) == (0, base_bytes // world_size)
        assert host.num_gathers == shard.num_gathers and (host.num_gathers > 0) == is_sharded
        assert host.num_copies > NUM_LAYERS and host.slot_bytes > 0 and shard.num_copies == 0
        assert host.copied_bytes == (host.gathered_bytes // world_size if is_sharded else host.copied_bytes)
        assert found["resident"][1] == (["layers.1", "layers.4"] if is_sharded else list(found["resident"][2]))
        if is_sharded:
            assert resident.bytes_at_rest == shard.bytes_at_rest + 2 * (layer_bytes - layer_bytes // world_size)
            assert 0 < resident.num_gathers < shard.num_gathers
        for stats in (every, none):
            assert stats.num_resident == len(found["all"][2]) and stats.bytes_at_rest >= base_bytes - 512 * 9
            assert (stats.num_gathers, stats.num_copies, stats.slot_bytes) == (0, 0, 0)
        assert (file.num_gathers, file.num_copies, file.bytes_at_rest, file.host_bytes_at_rest) == (0, 0, 0, 0)


def check_some_checkpointed(rank: int, folder: str) -> list[str]:
    wrong = []
    reference = load(folder, placement="replicate", checkpointing="off")
    for checkpointing, (placement, count) in itertools.product(
        ("non-reentrant", "reentrant"), (("shard", 2), ("host", 0), ("file", NUM_LAYERS), ("shard", 1))
    ):
        model = load(folder, placement=placement, activation_checkpointing_layers=count, checkpointing=checkpointing)
        flags = [layer.gradient_checkpointing for layer in model.get_base_model().model.layers]
        if sum(flags) != count:
            wrong.append(f"{count} layers: {flags}")
        wrong += find_differences(one_step(model), one_step(reference))
    return wrong


def test_some_layers_are_recomputed(tmp_path):
    """Trainer switches activation checkpointing on for all layers when training begins, over whatever was chosen."""
    assert run_ranks(check_some_checkpointed, 2, save_base(tmp_path / "base", "llama")) == [[], []]


def check_groups(rank: int, folder: str) -> list[tuple[int, ...]]:
    model = load(folder, placement="shard", shard_group_size=2)
    seen = set()
    broadcast = torch.distributed.broadcast

    def counted(tensor, *args, group=None, **kwargs):
        seen.add(tuple(torch.distributed.get_process_group_ranks(group)))
        return broadcast(tensor, *args, group=group, **kwargs)

    torch.distributed.broadcast = counted
    one_step(model)
    stats = lorashard.stats(model)
    assert stats.gathered_bytes > 0
    return sorted(seen)


def test_a_hybrid_base_never_leaves_its_group(tmp_path):
    """Bytes of the base that cross nodes are what hybrid sharding is there to avoid."""
    found = run_ranks(check_groups, 4, save_base(tmp_path / "base", "llama"))
    assert found == [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]


def check_merging(rank: int, folder: str) -> list[bool]:
    model = load(folder, placement="host", resident_layers=1)
    for name in ("merge_adapter", "merge_and_unload"):
        with pytest.raises(ConfigError, match="in place"):
            getattr(model, name)()
    return [layer.merged for name, layer in model.named_modules() if name.endswith("q_proj")]


def test_a_refused_merge_merges_nothing(tmp_path):
    """Resident layers can be merged into and sharded ones cannot: half a merge switches half of the adapter off."""
    found = run_ranks(check_merging, 2, save_base(tmp_path / "base", "llama"))
    assert found == [[False] * NUM_LAYERS] * 2


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
        assert "divisor of the 3 ranks, found 2" in messages[0]
        assert "placement" in messages[1] and "prefetch" in messages[2] and "LOCAL_WORLD_SIZE" in messages[3]


def test_a_model_in_memory_has_no_files():
    """Silently sharding it instead would take memory that the person has not."""
    with pytest.raises(ConfigError, match="use lorashard.load"):
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
    case = {"dtype": torch.float32}
    expected = run_scenarios(load(folder, placement="replicate", **case))
    assert compare(rank, [(folder, {"placement": "file"}, case)], [expected]) == {}
    return str(caught.value)


def test_a_full_disk_costs_nothing_but_the_run(tmp_path, own_cache):
    """Half a cache that is taken for a whole one gives wrong weights for ever after."""
    (message,) = run_ranks(check_full_disk, 1, save_base(tmp_path / "base", "llama"))
    assert "could not be written" in message and "HF_HOME" in message
    assert not list(own_cache.rglob("*.partial*"))
