"""Where a base rests for inference, and how many prompts are answered in one batch: arithmetic alone."""

from __future__ import annotations

import pytest
import torch
from helpers.planning import make_size
from helpers.tiny import build_base
from peft import LoraConfig
from transformers import LlamaConfig

from lorashard.config.placement import PlacementOptions, ResolvedPlacement
from lorashard.errors import ConfigError
from lorashard.planning.auto import BaseModel
from lorashard.planning.batches import count_row_bytes, plan_batches
from lorashard.planning.inference import count_cache_bytes, place_for_inference, plan_inference

LAYER_BYTES = 8 * 2**20
VOCABULARY_BYTES = 4 * 2**20
NUM_LAYERS = 10
ADAPTER_BYTES = 2**20
BASE_BYTES = NUM_LAYERS * LAYER_BYTES + 2 * VOCABULARY_BYTES
RESERVE_BYTES = 3 * 2**20
HEADROOM_BYTES = 2**30
# What every placement takes.
FIXED_BYTES = RESERVE_BYTES + ADAPTER_BYTES + HEADROOM_BYTES
# A slot for the layer that computes, one for the next, one that may stay, and one for the embedding or the head.
SLOT_BYTES = 3 * LAYER_BYTES + VOCABULARY_BYTES


SIZE = make_size(NUM_LAYERS, LAYER_BYTES, VOCABULARY_BYTES, ADAPTER_BYTES)


def place(free_bytes: int, world_size: int = 1, device: str = "cuda", **options) -> ResolvedPlacement:
    return place_for_inference(PlacementOptions(**options), SIZE, device, free_bytes, RESERVE_BYTES, world_size, None)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_base_that_just_fits_is_whole(world_size):
    """Catches GPUs that gather for every token a base that would have fitted, or run out of memory by a byte."""
    assert place(FIXED_BYTES + BASE_BYTES, world_size).placement == "replicate"
    assert place(FIXED_BYTES + BASE_BYTES - 1, world_size).placement == ("shard" if world_size > 1 else "file")


def test_shard_groups_do_not_matter_to_a_base_that_fits():
    """Catches groups of a base that is replicated, and an error about the size of a node where nothing is sharded."""
    resolved = place(FIXED_BYTES + BASE_BYTES, 4, shard_group_size="node")
    assert (resolved.placement, resolved.group_size) == ("replicate", 1)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_as_many_layers_stay_whole_as_fit_to_the_byte(world_size, num_layers):
    """Catches a layer too many, which is out of memory, and one too few, which is a gather for every token."""
    rest_bytes = BASE_BYTES // world_size
    extra_bytes = LAYER_BYTES - LAYER_BYTES // world_size  # its shard rests there in any case
    enough = FIXED_BYTES + rest_bytes + SLOT_BYTES + num_layers * extra_bytes
    assert enough < FIXED_BYTES + BASE_BYTES
    resolved = place(enough, world_size)
    assert (resolved.placement, resolved.group_size, resolved.resident_layers) == ("shard", world_size, num_layers)
    if num_layers:
        assert place(enough - 1, world_size).resident_layers == num_layers - 1


@pytest.mark.parametrize("num_layers", [0, 3])
def test_one_card_reads_files_and_keeps_what_fits(num_layers):
    """Catches a single GPU that shards over itself, and shards counted that a file's units do not have."""
    resolved = place(FIXED_BYTES + SLOT_BYTES + num_layers * LAYER_BYTES)
    assert (resolved.placement, resolved.group_size, resolved.resident_layers) == ("file", 1, num_layers)


def test_ranks_that_cannot_hold_shards_read_files():
    """Catches `shard` chosen where its shards and slots do not fit, which is out of memory while loading, and slots
    that are not those of `prefetch`."""
    enough = FIXED_BYTES + BASE_BYTES // 2 + SLOT_BYTES
    for prefetch in (0, 1, 2):
        least = enough + (prefetch - 1) * LAYER_BYTES
        assert place(least, 2, prefetch=prefetch).placement == "shard"
        assert place(least - 1, 2, prefetch=prefetch).placement == "file"


def test_shards_stay_inside_a_node_that_holds_them():
    """Catches a base that crosses the network for each token, and one that is read from files though nodes could."""
    for free_bytes, group_size in ((BASE_BYTES // 2 + SLOT_BYTES, 2), (BASE_BYTES // 4 + SLOT_BYTES, 4)):
        placed = place_for_inference(PlacementOptions(), SIZE, "cuda", FIXED_BYTES + free_bytes, RESERVE_BYTES, 4, 2)
        assert (placed.placement, placed.group_size) == ("shard", group_size)


def test_cpus_share_the_files_own_pages():
    """Catches a CPU that copies a base which is mapped already."""
    for free_bytes in (FIXED_BYTES, FIXED_BYTES + BASE_BYTES):
        resolved = place(free_bytes, 2, "cpu")
        assert (resolved.placement, resolved.resident_layers) == ("file", 0)


def test_a_cpu_keeps_a_base_in_memory_that_no_file_holds_so(tmp_path):
    """Catches a float32 copy of a bfloat16 base on the disk of a machine whose memory has room for it."""
    for free_bytes, placement in ((FIXED_BYTES + BASE_BYTES, "replicate"), (FIXED_BYTES + BASE_BYTES - 1, "file")):
        placed = place_for_inference(PlacementOptions(), SIZE, "cpu", free_bytes, RESERVE_BYTES, 1, None, is_cast=True)
        assert placed.placement == placement
    build_base("llama", torch.bfloat16, num_hidden_layers=1).save_pretrained(tmp_path)
    for dtype, placement in ((torch.bfloat16, "file"), (torch.float32, "replicate")):
        base = BaseModel(str(tmp_path), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), dtype)
        assert plan_inference(base, PlacementOptions(), torch.device("cpu"), 1).placement == placement


def test_an_explicit_placement_keeps_what_fits():
    """Catches `--placement shard` that gathers layers for every token although there is room for them."""
    rest_bytes = BASE_BYTES // 2
    free_bytes = FIXED_BYTES + rest_bytes + SLOT_BYTES + 2 * LAYER_BYTES // 2
    assert place(free_bytes, 2, placement="shard").resident_layers == 2
    assert place(free_bytes, 2, placement="shard", resident_layers=0).resident_layers == 0
    assert place(FIXED_BYTES + 10 * BASE_BYTES, 2, placement="shard").resident_layers == NUM_LAYERS
    # Shards on the host take nothing of the device.
    host = place(FIXED_BYTES + SLOT_BYTES + 2 * LAYER_BYTES, 2, placement="host")
    assert (host.placement, host.resident_layers) == ("host", 2)
    with pytest.raises(ConfigError, match="divisor"):
        place(FIXED_BYTES, 2, placement="shard", shard_group_size=3)


def make_config(**options) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=3, vocab_size=100, **options
    )


def test_a_cached_token_is_a_key_and_a_value_of_each_layer():
    """Catches a cache planned for all heads where keys and values have a few, or a `head_dim` that is not read."""
    assert count_cache_bytes(make_config(), torch.bfloat16) == 2 * 3 * 2 * 8 * 2
    assert count_cache_bytes(make_config(head_dim=32), torch.float32) == 2 * 3 * 2 * 32 * 4


def test_a_row_takes_at_least_its_cache_and_its_logits():
    """Catches a batch planned without the tokens that are still to come, or without the vocabulary."""
    config = make_config()
    token_bytes = count_cache_bytes(config, torch.bfloat16)
    few, many = (count_row_bytes(config, torch.bfloat16, 10, new) for new in (1, 101))
    assert many - few >= 100 * token_bytes and few > 11 * token_bytes + 100 * 4
    eager = make_config(attn_implementation="eager")
    assert count_row_bytes(eager, torch.bfloat16, 1000, 1) > count_row_bytes(config, torch.bfloat16, 1000, 1) + 10**6


def test_batches_are_of_like_lengths_and_shared_evenly():
    """Catches short prompts padded to the longest, a rank with all the work, and a prompt answered never or twice."""
    lengths = [3, 50, 4, 1, 49, 2, 5]
    batches = plan_batches(lengths, 2, lambda longest: 100 // longest)
    assert [sorted(index for share in batch for index in share) for batch in batches] == [[1, 2, 4, 6], [0, 3, 5]]
    assert batches[0] == [[1, 6], [4, 2]] and batches[1] == [[0, 3], [5]]
    assert plan_batches([7], 3, lambda longest: 1) == [[[0], [], []]]
    for batch in plan_batches(list(range(23)), 4, lambda longest: 2):
        sizes = [len(share) for share in batch]
        assert max(sizes) <= 2 and max(sizes) - min(sizes) <= 1
