"""Base weights read by byte range equal those of transformers' `from_pretrained`, for every kind of checkpoint."""

import random
import re
from functools import partial

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from helpers.sizes import DEEPSEEK, GPT2, GPT_OSS, LLAMA, MIXTRAL, QWEN_MOE
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    PermuteForRope,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

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


def save_model(folder, class_name, options, *, dtype=torch.bfloat16, auto=AutoModelForCausalLM, **save_options):
    """Save a tiny model in which no tensor is constant, and return its folder."""
    generator = torch.Generator().manual_seed(0)
    model = auto.from_config(getattr(transformers, f"{class_name}Config")(**options), dtype=dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder, **save_options)
    return folder


def rewrite(folder, change):
    """Change the stored tensors of a single-file checkpoint: `change` maps the old dict to the new one."""
    file = folder / "model.safetensors"
    tensors = {key: tensor.contiguous() for key, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def drop(part):
    """Return a change that loses the tensors whose keys hold `part`."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if part not in key}


def build_skeleton(folder, dtype, auto=AutoModelForCausalLM):
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.tie_weights()
    return model


def plan(folder, dtype=torch.bfloat16, auto=AutoModelForCausalLM, checkpoint=None, **options):
    return BaseWeights.plan(
        build_skeleton(folder, dtype, auto), checkpoint or Checkpoint.open(folder), dtype, **options
    )


def plan_error(folder, dtype=torch.bfloat16, **options):
    with pytest.raises(CheckpointError) as caught:
        plan(folder, dtype, **options)
    return str(caught.value)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_as_from_pretrained(folder, dtype, auto=AutoModelForCausalLM, **options):
    """Compare every parameter and persistent buffer, put together from random cuts, and return the weights."""
    reference = auto.from_pretrained(folder, dtype=dtype).state_dict(keep_vars=True)
    weights = plan(folder, dtype, auto, **options)
    assert set(weights.names) | set(weights.missing) == set(reference)
    chance = random.Random(0)
    for name, expected in reference.items():
        if name in weights.missing:
            continue
        assert weights.target_dtype(name) == expected.dtype, name
        assert weights.shape(name) == expected.shape, name
        num_bytes = weights.num_bytes(name)
        # Cuts need not fall between elements: a rank's slice is cut by bytes.
        cuts = sorted({0, num_bytes, *(chance.randint(0, num_bytes) for _ in range(4))})
        found = torch.full((num_bytes,), 0xAA, dtype=torch.uint8)
        for begin, end in zip(cuts, cuts[1:], strict=False):
            weights.read_range(name, begin, end, found[begin:end])
        assert torch.equal(found, as_bytes(expected.detach())), name
        assert torch.equal(as_bytes(weights.read(name)), found), name
    return weights


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


@pytest.fixture
def register_conversions():
    """Give Llama conversions of its own for one test, in from_pretrained as well."""
    register = partial(register_checkpoint_conversion_mapping, "LlamaForCausalLM", overwrite=True)
    yield register
    register([])


@pytest.fixture
def fused_llama(tmp_path, register_conversions):
    """A Llama whose checkpoint holds fused and transposed tensors, with the conversions that undo it."""
    conversions = [
        WeightConverter("attn.qk.weight", ["attn.q_proj.weight", "attn.k_proj.weight"], [Chunk(dim=0)]),
        WeightConverter("attn.o_t.weight", "attn.o_proj.weight", [Transpose(0, 1)]),
        WeightConverter(["mlp.g0.weight", "mlp.g1.weight"], "mlp.gate_proj.weight", [Concatenate(dim=0)]),
        WeightConverter(["mlp.u0.weight", "mlp.u1.weight"], "mlp.up_proj.weight", [Concatenate(dim=1)]),
        WeightConverter(
            "mlp.dx_t.weight", ["mlp.down_proj.weight"], [Transpose(0, 1), Transpose(0, 1), Transpose(0, 1)]
        ),
    ]
    # Leaves the tensor in a list, since it is not to be permuted.
    conversions += [
        WeightConverter("attn.v_proj.weight", "attn.v_proj.weight", [PermuteForRope(permute_layer_names=["q_proj"])])
    ]
    save_model(
        tmp_path,
        "Llama",
        {**LLAMA, "num_key_value_heads": 4, "head_dim": 6, "tie_word_embeddings": True},
        dtype=torch.float32,
    )

    def change(tensors):
        for i in range(2):
            take = lambda key, i=i: tensors.pop(f"model.layers.{i}.{key}.weight")  # noqa: E731
            q, k = take("self_attn.q_proj"), take("self_attn.k_proj")
            gate, up = take("mlp.gate_proj"), take("mlp.up_proj")
            made = {"self_attn.qk": torch.cat([q, k]), "self_attn.o_t": take("self_attn.o_proj").T}
            made |= {"mlp.g0": gate[:10], "mlp.g1": gate[10:], "mlp.u0": up[:, :5], "mlp.u1": up[:, 5:]}
            made |= {"mlp.dx_t": take("mlp.down_proj").T}
            tensors.update({f"model.layers.{i}.{key}.weight": tensor for key, tensor in made.items()})
        return tensors

    rewrite(tmp_path, change)
    register_conversions(conversions)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_conversions_equal_from_pretrained(fused_llama, dtype):
    """Conversions that are concatenations, read by range, and others, computed by transformers' own operations."""
    assert_same_as_from_pretrained(fused_llama, dtype)


def test_a_renaming_to_an_unknown_name_is_not_applied(tmp_path, register_conversions):
    """transformers keeps a key that the model has, although a renaming for older files matches it."""
    save_model(tmp_path, "Llama", LLAMA)
    register_conversions([WeightRenaming("mlp.gate_proj", "mlp.w1")])
    assert_same_as_from_pretrained(tmp_path, torch.bfloat16)


def test_a_converted_tensor_must_not_be_stored_as_well(fused_llama):
    """Which of the fused and the plain tensor is used would depend on their names."""
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(fused_llama, lambda t: t | {name: torch.ones(24, 32)})
    assert f"{name} is stored twice" in plan_error(fused_llama, torch.float32)


def test_a_converted_tensor_must_be_in_the_model(tmp_path, register_conversions):
    """A fused tensor with a part that the model has no place for is unexpected, not a KeyError."""
    save_model(tmp_path, "Llama", LLAMA)
    targets = ["mlp.gate_proj.weight", "mlp.side_proj.weight"]
    register_conversions([WeightConverter("mlp.wide.weight", targets, [Chunk(dim=0)])])

    def change(tensors):
        tensors["model.layers.0.mlp.wide.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight").repeat(2, 1)
        return tensors

    rewrite(tmp_path, change)
    message = plan_error(tmp_path)
    assert "1 unexpected: model.layers.0.mlp.wide.weight" in message and "1 missing" not in message


def test_only_true_concatenations_are_read_by_range(fused_llama):
    """A transposed tensor read as a concatenation is garbage; one that is computed completely costs reads."""
    checkpoint = Checkpoint.open(fused_llama)
    weights = plan(fused_llama, torch.float32, checkpoint=checkpoint)
    for key, is_computed in {
        "self_attn.q_proj": False,
        "self_attn.k_proj": False,
        "mlp.gate_proj": False,
        "self_attn.o_proj": True,
        "mlp.up_proj": True,
        "mlp.down_proj": True,
    }.items():
        name = f"model.layers.0.{key}.weight"
        before = checkpoint.bytes_read
        weights.read_range(name, 40, 80, torch.empty(40, dtype=torch.uint8))
        assert checkpoint.bytes_read - before == (weights.num_bytes(name) if is_computed else 40), key


def test_a_unit_computes_its_tensors_once_and_forgets_them(fused_llama):
    """Computing a layer again for each range, or keeping more than one unit's computed tensors in memory."""
    checkpoint = Checkpoint.open(fused_llama)
    weights = plan(fused_llama, torch.float32, checkpoint=checkpoint)
    own, other = (f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1))
    num_bytes = weights.num_bytes(own)

    def count_reads(*names):
        before = checkpoint.bytes_read
        for name in names:
            weights.read_range(name, 8, 16, torch.empty(8, dtype=torch.uint8))
        return (checkpoint.bytes_read - before) / num_bytes

    for _ in range(2):
        with weights.unit([own]):
            assert count_reads(own, own, own) == 1
            assert count_reads(other, other) == 2
            with pytest.raises(RuntimeError, match="already"), weights.unit([other]):
                pass
            assert count_reads(own) == 0
        with pytest.raises(KeyboardInterrupt), weights.unit([own, other]):
            weights.read(own)
            raise KeyboardInterrupt
        assert count_reads(own) == 1


def test_values_do_not_depend_on_the_model_after_planning(fused_llama):
    """Adapters rename the model's modules before its weights are read."""
    model = build_skeleton(fused_llama, torch.float32)
    weights = BaseWeights.plan(model, Checkpoint.open(fused_llama), torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(fused_llama, dtype=torch.float32).state_dict()
    del model.model
    for name, tensor in reference.items():
        assert torch.equal(weights.read(name), tensor), name


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
