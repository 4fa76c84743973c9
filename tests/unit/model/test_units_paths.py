"""How units are found in models of any structure, and how the user names them."""

from __future__ import annotations

import pytest
import torch
from helpers.families import FAMILIES, make_config
from helpers.odd import NUM_BLOCKS, OddConfig, OddForCausalLM, register_odd
from helpers.tiny import build_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    GPT2Config,
    GPT2LMHeadModel,
    MllamaConfig,
    MllamaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from lorashard.errors import CheckpointError, ConfigError
from lorashard.model.adapters import base_test
from lorashard.model.homes import choose_resident
from lorashard.model.skeleton import choose_auto_class
from lorashard.model.stacks import find_decoder_stack, find_layers, name_units
from lorashard.model.units import EMBEDDING, HEAD, LAYER, TOWER, WHOLE, Structure, find_structure


def adapt(base: nn.Module) -> PeftModel:
    return get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))


def build_odd(keeping: str) -> PeftModel:
    register_odd()
    return adapt(OddForCausalLM(OddConfig(keeping)))


def find(model: PeftModel) -> Structure:
    """Return the structure, which must hold every base weight once."""
    is_base = base_test(model)
    structure = find_structure(model, is_base)
    found = [id(weight.parameter) for unit in structure.units for weight in unit.weights]
    assert sorted(found) == sorted({id(parameter) for parameter in model.parameters() if is_base(parameter)})
    return structure


def names_of(structure: Structure, kind: str) -> list[str]:
    return [unit.name for unit in structure.units if unit.kind == kind]


def weights_of(structure: Structure, kind: str) -> list[str]:
    return [weight.name for unit in structure.units if unit.kind == kind for weight in unit.weights]


@pytest.mark.parametrize("keeping", ("pairs", "sequence", "dict"))
def test_layers_are_found_in_any_container(keeping):
    """A list of lists is never called: hooks on it would never run, and its weights never be unsharded."""
    structure = find(build_odd(keeping))
    assert names_of(structure, LAYER) == [f"layers.{i}" for i in range(NUM_BLOCKS)]
    assert [unit for unit in structure.units if unit.kind == LAYER][1].weights[0].name.endswith("norm.weight")
    norm = "parts.norm" if keeping == "dict" else "norm"
    assert weights_of(structure, HEAD) == [f"{norm}.weight", f"{norm}.bias", "head.weight"]
    assert weights_of(structure, EMBEDDING) == ["embed.weight"]


def test_a_weight_of_the_model_itself_is_resident():
    """No hook tells when such a weight is read, between other modules."""
    structure = find(build_odd("sequence"))
    assert weights_of(structure, WHOLE) == ["scale"]
    assert [unit.name for unit in choose_resident(structure, 0)] == ["whole"]


def test_weights_that_layers_share_are_entered_in_each():
    """A shared block that belonged to its last layer would be read sharded by the first."""
    structure = find(build_odd("shared"))
    shared = [name for name in weights_of(structure, EMBEDDING) if ".shared." in name]
    assert len(shared) == 6 and all(name.startswith("blocks.0.shared.") for name in shared)
    embedding = next(visit for visit in structure.visits if visit.kind == EMBEDDING)
    assert len(embedding.modules) == 4  # the embedding's, and the three with weights of the shared block


def test_a_tied_head_takes_all_of_the_embedding():
    """Two vocabulary-sized units that take turns in one slot: one more gather per step."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=32)
    structure = find(adapt(GPT2LMHeadModel(config)))
    assert weights_of(structure, EMBEDDING) == []
    names = {"wpe.weight", "wte.weight", "ln_f.weight", "ln_f.bias"}
    assert {name.removeprefix("transformer.") for name in weights_of(structure, HEAD)} == names


def build_vision(**vision: object) -> PeftModel:
    config = make_config(next(family for family in FAMILIES if family.name == "Qwen2.5-VL"))
    for name, value in vision.items():
        setattr(config.vision_config, name, value)
    with torch.device("meta"):
        return adapt(AutoModelForImageTextToText.from_config(config))


def test_the_language_tower_is_found_beside_a_heavier_one():
    """The vision blocks, taken for the decoder layers: no language layer would be a unit."""
    model = build_vision(depth=40)
    path, stack = find_decoder_stack(model)
    assert path == "base_model.model.model.language_model.layers" and len(stack) == 3
    structure = find(model)
    assert names_of(structure, LAYER) == ["layers.0", "layers.1", "layers.2"]
    assert names_of(structure, TOWER) == [f"model.visual.blocks.{i}" for i in range(40)]
    head = weights_of(structure, HEAD)
    assert "model.language_model.norm.weight" in head and "model.visual.merger.mlp.0.weight" in head  # it is tied
    order = [visit.kind for visit in structure.visits]
    assert order == [EMBEDDING, *[TOWER] * 40, *[LAYER] * 3, HEAD]


def test_what_joins_the_towers_is_no_head():
    """Mllama lists its projector after the decoder: as the head it would be held while the embedding needs its slot."""
    sizes = dict(hidden_size=32, intermediate_size=48)
    text = sizes | dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=99)
    text |= dict(cross_attention_layers=[1], pad_token_id=0)
    vision = sizes | dict(num_hidden_layers=2, num_global_layers=1, attention_heads=4, image_size=16, patch_size=4)
    vision |= dict(intermediate_layers_indices=[0], vision_output_dim=64)
    with torch.device("meta"):
        base = MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision))
    structure = find(adapt(base))
    assert weights_of(structure, HEAD) == ["model.language_model.norm.weight", "lm_head.weight"]
    assert "model.multi_modal_projector.weight" in weights_of(structure, EMBEDDING)
    assert len(names_of(structure, LAYER)) == 3 and len(names_of(structure, TOWER)) == 3


def test_an_encoder_is_another_tower():
    """The encoder's layers, taken for the decoder's, or gathered as one with the embedding."""
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=5, num_decoder_layers=2, num_heads=4)
    structure = find(adapt(T5ForConditionalGeneration(config)))
    assert names_of(structure, TOWER) == [f"encoder.block.{i}" for i in range(5)]
    assert names_of(structure, LAYER) == ["layers.0", "layers.1"]


def test_layers_that_are_not_found_are_named():
    """A model that cannot be sharded although the user knows where its layers are."""
    model = build_odd("attributes")
    with pytest.raises(CheckpointError) as caught:
        find(model)
    assert "OddForCausalLM" in caught.value.problem and "unit_paths" in caught.value.fix
    name_units(model, ["block_*"])
    structure = find(model)
    assert names_of(structure, LAYER) == [f"block_{i}" for i in range(NUM_BLOCKS)]
    assert weights_of(structure, HEAD) == ["norm.weight", "norm.bias", "head.weight"]
    with pytest.raises(CheckpointError, match="OddForCausalLM"):
        find_decoder_stack(model)


@pytest.mark.parametrize(
    "unit_paths", (["model.layers"], ["model.layers.*"], ["model.layers.[0-2]", "model.layers.[3-9]"])
)
def test_a_list_stands_for_its_items(unit_paths):
    """A path to the list itself would be one unit as large as the model, that is never entered."""
    model = build_model()
    layers = find_layers(model)
    name_units(model, unit_paths)
    assert find_layers(model) == layers and list(find_decoder_stack(model)[1]) == layers


def test_units_may_be_parts_of_layers():
    """Norms between the named parts must be entered too, and nothing but the end may be the head."""
    model = build_model()
    name_units(model, ["model.layers.*.mlp", "model.layers.*.self_attn"])
    structure = find(model)
    assert names_of(structure, LAYER)[:3] == [f"model.layers.{i}" for i in ("0.self_attn", "0.mlp", "1.self_attn")]
    assert weights_of(structure, HEAD) == ["model.norm.weight", "lm_head.weight"]
    assert len(weights_of(structure, EMBEDDING)) == 13  # the embedding, and two norms of each of 6 layers
    assert model.get_base_model().model.layers[0] not in structure.roots


@pytest.mark.parametrize(
    ("unit_paths", "names"),
    (
        (["model.layer"], ["'model.layer'", "LlamaForCausalLM", "'model.layers'"]),
        (["model.*.mlp"], ["'model.*.mlp'"]),
        (["model.layers", "model.layers.2.mlp"], ["'model.layers.2.mlp'", "'model.layers.2'"]),
        (["model.rotary_emb"], ["'model.rotary_emb'"]),
        ([], ["none"]),
    ),
)
def test_wrong_unit_paths_are_explained(unit_paths, names):
    """A misspelled path that silently leaves its weights to the embedding."""
    with pytest.raises(ConfigError) as caught:
        name_units(build_model(), unit_paths)
    assert caught.value.option == "unit_paths" and all(name in str(caught.value) for name in names)


def test_a_model_of_another_kind_is_refused():
    """transformers' own message lists every config class that it knows."""
    with pytest.raises(ConfigError) as caught:
        choose_auto_class(T5Config(), "CAUSAL_LM")
    assert "AutoModelForImageTextToText" in caught.value.expected and "'t5'" in caught.value.found
