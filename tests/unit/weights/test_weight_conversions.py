"""Weights that transformers fuses, splits, transposes or renames while it loads equal those of `from_pretrained`."""

from functools import partial

import pytest
import torch
from helpers.base_weights import assert_same_as_from_pretrained, build_skeleton, plan, plan_error, rewrite, save_model
from helpers.sizes import LLAMA
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    PermuteForRope,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from lorashard.weights.safetensors_files import Checkpoint
from lorashard.weights.weights import BaseWeights


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
