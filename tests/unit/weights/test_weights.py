"""Base weights read by byte range equal those of transformers' `from_pretrained`, for every kind of checkpoint."""

import re

import pytest
import torch
import transformers
from helpers.base_weights import (
    assert_same_as_from_pretrained,
    build_skeleton,
    drop,
    plan,
    plan_error,
    rewrite,
    save_model,
)
from helpers.sizes import DEEPSEEK, GPT2, GPT_OSS, LLAMA, MIXTRAL, QWEN_MOE
from transformers import AutoModelForSequenceClassification

from lorashard.errors import CheckpointError
from lorashard.weights import weights as weights_module
from lorashard.weights.safetensors_files import Checkpoint
from lorashard.weights.weights import BaseWeights

TIED = {**LLAMA, "tie_word_embeddings": True}
UNTIED = {**LLAMA, "tie_word_embeddings": False}
# If transformers stopped keeping these in float32, no case would try a tensor in another dtype than the model's.
KEPT_IN_FLOAT32 = {
    ("DeepseekV3", torch.bfloat16): "model.layers.1.mlp.gate.e_score_correction_bias",
    ("GptOss", torch.float16): "model.norm.weight",
}


@pytest.mark.parametrize(
    ("class_name", "options", "dtype"),
    [
        ("Llama", TIED, torch.bfloat16),
        ("Llama", UNTIED, torch.float16),
        ("Qwen3", {**LLAMA, "head_dim": 8}, torch.bfloat16),
        ("GPT2", GPT2, torch.bfloat16),
        ("Gemma", {**LLAMA, "head_dim": 8}, torch.bfloat16),
        ("Mixtral", MIXTRAL, torch.bfloat16),
        ("Qwen3Moe", QWEN_MOE, torch.bfloat16),
        *(("DeepseekV3", DEEPSEEK, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *(("GptOss", GPT_OSS, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_models_equal_from_pretrained(tmp_path, class_name, options, dtype):
    """A wrong name, order of experts, cast, float32 module or cut, over model families and compute dtypes."""
    save_model(tmp_path, class_name, options)
    weights = assert_same_as_from_pretrained(tmp_path, dtype)
    if (class_name, dtype) in KEPT_IN_FLOAT32:
        assert weights.target_dtype(KEPT_IN_FLOAT32[class_name, dtype]) == torch.float32


class RecordingCheckpoint(Checkpoint):
    """Remembers how many bytes were read at a time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pieces = []

    def read_bytes(self, tensor, begin, end, out):
        self.pieces.append(end - begin)
        super().read_bytes(tensor, begin, end, out)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_casts_equal_from_pretrained(tmp_path, monkeypatch, stored, dtype):
    """A cast in pieces that are misaligned, too large or rounded otherwise; experts too, whose runs are cast singly."""
    monkeypatch.setattr(weights_module, "PIECE_BYTES", 100)
    save_model(tmp_path, "Mixtral", {**MIXTRAL, "num_hidden_layers": 1, "num_local_experts": 3}, dtype=stored)
    checkpoint = RecordingCheckpoint.open(tmp_path)
    assert_same_as_from_pretrained(tmp_path, dtype, checkpoint=checkpoint)
    assert 90 < max(checkpoint.pieces) <= 100


def test_sharded_checkpoints_equal_from_pretrained(tmp_path):
    """One expert's tensors in other files than the next one's, or a tensor read from the wrong file."""
    save_model(tmp_path, "Qwen3Moe", QWEN_MOE, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_as_from_pretrained(tmp_path, torch.bfloat16)


@pytest.mark.parametrize(
    ("class_name", "options", "change"),
    [
        # GPT-2 on the hub has `h.0...` where the model has `transformer.h.0...`.
        ("GPT2", GPT2, lambda t: {key.removeprefix("transformer."): tensor for key, tensor in t.items()}),
        # Old checkpoints hold masks, or rotary frequencies, in each layer.
        ("GPT2", GPT2, lambda t: t | {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}),
        ("Llama", LLAMA, lambda t: t | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        # The head alone, for a tied model, or both.
        ("Llama", TIED, lambda t: {key.replace("model.embed_tokens", "lm_head"): tensor for key, tensor in t.items()}),
        ("Llama", TIED, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    ],
)
def test_other_keys_and_surplus_tensors_are_understood(tmp_path, class_name, options, change):
    """Models of the hub would be refused, or loaded with an embedding or a head that is initialized at random."""
    save_model(tmp_path, class_name, options)
    rewrite(tmp_path, change)
    weights = assert_same_as_from_pretrained(tmp_path, torch.bfloat16)
    assert options is not TIED or {"model.embed_tokens.weight", "lm_head.weight"} <= set(weights.names)


def test_keys_with_a_base_prefix_that_the_model_lacks(tmp_path):
    """The bare model from a causal LM's checkpoint."""
    save_model(tmp_path, "Llama", LLAMA)
    assert_same_as_from_pretrained(
        tmp_path, torch.bfloat16, transformers.AutoModel, allow_unexpected=("lm_head.weight",)
    )


def test_tied_weights_stored_twice_must_be_equal(tmp_path, monkeypatch):
    """transformers unties them if they differ; the tied model would answer with another head."""
    monkeypatch.setattr(weights_module, "PIECE_BYTES", 1000)
    save_model(tmp_path, "Llama", TIED)
    rewrite(tmp_path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    plan(tmp_path)

    def change(tensors):
        tensors["lm_head.weight"][-1, -1] += 1
        return tensors

    rewrite(tmp_path, change)
    message = plan_error(tmp_path)
    assert "model.embed_tokens.weight and lm_head.weight" in message and "tie_word_embeddings" in message


def test_a_new_head_is_missing_unless_allowed(tmp_path):
    """A reward model from a causal LM: the new head must be reported, then left to whoever trains it."""
    save_model(tmp_path, "Llama", UNTIED)
    auto = AutoModelForSequenceClassification
    message = plan_error(tmp_path, auto=auto)
    assert "1 missing: score.weight" in message and "1 unexpected: lm_head.weight" in message
    assert "LlamaForSequenceClassification" in message
    message = plan_error(tmp_path, auto=auto, allow_missing=("score.",))
    assert "score.weight" not in message and "1 unexpected: lm_head.weight" in message
    allowed = {"allow_missing": ("score.",), "allow_unexpected": ("lm_head.",)}
    weights = assert_same_as_from_pretrained(tmp_path, torch.bfloat16, auto, **allowed)
    assert weights.missing == ("score.weight",)
    with pytest.raises(KeyError):
        weights.read("score.weight")


def test_what_does_not_fit_is_listed_before_anything_is_read(tmp_path):
    """One message with every fault, so that the user need not start again for each."""
    save_model(tmp_path, "Llama", UNTIED)

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(31)
        return tensors | {f"extra.{i}": torch.ones(1) for i in range(7)}

    rewrite(tmp_path, change)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        BaseWeights.plan(build_skeleton(tmp_path, torch.bfloat16), checkpoint, torch.bfloat16)
    message = str(caught.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "7 unexpected: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more" in message
    assert "model.norm.weight ([32] in the model, [31] in the checkpoint)" in message
    assert str(tmp_path) in message and "LlamaForCausalLM" in message
    assert checkpoint.bytes_read == 0


EXPERT = "model.layers.1.block_sparse_moe.experts.5"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("class_name", "options", "change", "message"),
    [
        ("Llama", TIED, drop("embed_tokens"), "2 missing: lm_head.weight, model.embed_tokens.weight"),
        # A lost half of an expert cannot be fused; a lost one would shift all others.
        ("Mixtral", MIXTRAL, drop(f"{EXPERT}.w1.weight"), rf"1 not convertible: {GATE_UP} \((?!.*missing)"),
        ("Mixtral", MIXTRAL, drop(EXPERT), rf"{GATE_UP} \(\[12, 96, 32\] in the model, \[11, 96, 32\]"),
        # Which of the two is used would depend on their names.
        ("Llama", LLAMA, lambda t: t | {"norm.weight": torch.ones(32)}, "model.norm.weight .*twice"),
    ],
)
def test_what_is_lost_or_stored_twice_is_named(tmp_path, class_name, options, change, message):
    """An embedding that nothing fills, experts in other places, and one of two tensors used by chance."""
    save_model(tmp_path, class_name, options)
    rewrite(tmp_path, change)
    assert re.search(message, plan_error(tmp_path))


def test_a_skeleton_in_another_dtype_is_refused(tmp_path):
    """The loader follows the skeleton's dtypes: a float32 skeleton would silently double the memory."""
    save_model(tmp_path, "Llama", LLAMA)
    with pytest.raises(ValueError, match="torch.bfloat16.*torch.float32"):
        BaseWeights.plan(build_skeleton(tmp_path, torch.float32), Checkpoint.open(tmp_path), torch.bfloat16)


@pytest.mark.parametrize(
    ("class_name", "options", "stored", "world_size"),
    [
        ("Llama", LLAMA, torch.float32, 2),
        ("Qwen3Moe", QWEN_MOE, torch.bfloat16, 3),
        ("Mixtral", MIXTRAL, torch.bfloat16, 2),
        ("Mixtral", MIXTRAL, torch.float32, 3),
    ],
)
def test_a_rank_reads_its_share(tmp_path, class_name, options, stored, world_size):
    """A rank that reads more than its slices: complete tensors, or complete layers of experts in order to fuse them."""
    save_model(tmp_path, class_name, options, dtype=stored, max_shard_size="30KB")
    counts = []
    for rank in range(world_size):
        checkpoint = Checkpoint.open(tmp_path)
        weights = plan(tmp_path, checkpoint=checkpoint)
        for name in set(weights.names) - {"lm_head.weight"}:
            share = -(-weights.num_bytes(name) // world_size)
            begin, end = (min((rank + i) * share, weights.num_bytes(name)) for i in (0, 1))
            weights.read_range(name, begin, end, torch.empty(end - begin, dtype=torch.uint8))
        counts.append(checkpoint.bytes_read)
    total_bytes = sum(s.num_bytes for s in Checkpoint.open(tmp_path).tensors.values() if s.key != "lm_head.weight")
    # Where a cut splits an element that is cast, both ranks read it.
    split_bytes = len(weights.names) * world_size * stored.itemsize if stored != torch.bfloat16 else 0
    assert total_bytes <= sum(counts) <= total_bytes + split_bytes
    assert max(counts) <= total_bytes / world_size + len(weights.names) * world_size * stored.itemsize


def test_the_skeletons_values_are_never_read(tmp_path):
    """Placeholders on the real device raise when they are read; planning happens with and without them."""
    save_model(tmp_path, "Mixtral", MIXTRAL)
    model = build_skeleton(tmp_path, torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    BaseWeights.plan(model, Checkpoint.open(tmp_path), torch.bfloat16)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == before


def test_ranges_outside_a_tensor_are_refused(tmp_path):
    """A wrong layout would fill a shard with the next tensor's bytes, or leave some of it unset."""
    save_model(tmp_path, "Llama", LLAMA)
    weights = plan(tmp_path)
    for begin, end, numel in [(0, 66, 66), (-2, 2, 4), (4, 2, 2), (0, 8, 9)]:
        with pytest.raises(ValueError, match="of model.norm.weight"):
            weights.read_range("model.norm.weight", begin, end, torch.empty(numel, dtype=torch.uint8))
