"""An adapter of a quantized base, used and merged: the values of training, against bitsandbytes and plain PEFT."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from helpers.merging import read_tensors
from helpers.tiny import build_base, disturb, find_differences
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils import logging as transformers_logging

import lorashard
from lorashard.config.quantization_options import Quantization
from lorashard.errors import CheckpointError, ConfigError
from lorashard.model.states import sign_state
from lorashard.weights.fingerprint import ADAPTER_NAME, check_quantization, read_quantization_of

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the reference")

CPU, BF16 = torch.device("cpu"), torch.bfloat16
FORMATS = (Quantization("nf4"), Quantization("nf4", double_quant=True), Quantization("int8"))
# bitsandbytes' CPU kernel is wrong where a row is shorter than a block of 64.
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def _quiet():
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_base("llama", BF16, **SIZES).save_pretrained(folder)
    return folder


def save_trained(folder: Path, base: Path, quantization: Quantization | None, **options) -> Path:
    """Save an adapter that was made on a quantized base and moved by what could be training."""
    defaults = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**defaults | options)
    model = lorashard.load(str(base), config, "replicate", dtype=BF16, device=CPU, quantization=quantization)
    disturb(model)
    model.save_pretrained(folder)
    return folder


def make_reference(base: Path, quantization: Quantization) -> torch.nn.Module:
    """Return transformers' model with the weights of its layers through bitsandbytes' quantization and back."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=BF16)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = round_trip(module.weight.data, quantization)
    return model


def round_trip(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    if quantization.format == "int8":
        numbers, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return functional.int8_vectorwise_dequant(numbers, scales).to(weight.dtype)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4")
    if quantization.double_quant:
        # bitsandbytes sums the mean in float32, in an order of its own, and its CPU misses the nearest now and then.
        offset, code = state.absmax.double().mean().float(), functional.create_dynamic_map()
        assert len(state.absmax) <= 256  # one block of scales
        scale = (state.absmax - offset).abs().max()
        nearest = ((state.absmax - offset) / scale).unsqueeze(1).sub(code).abs().argmin(dim=1)
        state.absmax = code[nearest] * scale + offset
    return functional.dequantize_4bit(packed, state)


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("quantization", FORMATS, ids=("nf4", "nf4-double", "int8"))
def test_merging_gives_what_peft_makes_of_the_dequantized_base(tmp_path, base, quantization, caplog):
    """Merging into the files' weights, into those with an adapter alone, or into nothing that training saw."""
    adapter = save_trained(tmp_path / "adapter", base, quantization)
    assert read_quantization_of(adapter) == quantization
    with caplog.at_level(logging.WARNING):
        report = lorashard.merge(adapter, tmp_path / "out")
    assert "14 weights" in caplog.text and report.num_dequantized == 14 and report.num_changed == 4
    expected = PeftModel.from_pretrained(make_reference(base, quantization), adapter).merge_and_unload().state_dict()
    assert find_differences(read_model(tmp_path / "out"), expected) == []

    live = lorashard.load_adapter(adapter, placement="replicate", dtype=BF16, device=CPU)
    lorashard.merge(live, tmp_path / "live")
    assert find_differences(read_model(tmp_path / "live"), expected) == []
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        # The same weights in the layers without an adapter, so that only the delta's rounding is between the two.
        unmerged = PeftModel.from_pretrained(make_reference(base, quantization), adapter).eval()
        assert torch.equal(live(input_ids=ids).logits, unmerged(input_ids=ids).logits)

    original = AutoModelForCausalLM.from_pretrained(base, dtype=BF16)
    plain = PeftModel.from_pretrained(original, adapter).merge_and_unload().state_dict()
    lorashard.merge(adapter, tmp_path / "plain", quantization="none")
    assert find_differences(read_model(tmp_path / "plain"), plain) == []

    lorashard.merge(adapter, tmp_path / "again", requantize=quantization.format)
    check_requantized(tmp_path / "again", expected, quantization)


def check_requantized(folder: Path, merged: dict[str, torch.Tensor], quantization: Quantization) -> None:
    """Load a folder with transformers and bitsandbytes, and compare every weight with the merged one, quantized."""
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    names = [name for name, module in loaded.named_modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")]
    assert len(names) == 14
    for name in names:
        weight = loaded.get_submodule(name).weight
        if quantization.format == "int8":
            found = functional.int8_vectorwise_dequant(weight.data, weight.SCB).to(BF16)
        else:
            found = functional.dequantize_4bit(weight.data, weight.quant_state)
            assert weight.quant_state.nested == quantization.double_quant
        assert torch.equal(found, round_trip(merged[f"{name}.weight"], quantization)), name
    others = {name: tensor for name, tensor in loaded.state_dict().items() if not name.startswith(tuple(names))}
    assert find_differences(others, {name: merged[name] for name in others}) == []


def test_the_dtype_of_training_decides_the_values(tmp_path):
    """An fp32 checkpoint that is quantized as it lies there, where training had quantized what it became in bf16."""
    quantization = FORMATS[0]
    build_base("llama", torch.float32, **SIZES).save_pretrained(tmp_path / "base")
    adapter = save_trained(tmp_path / "adapter", tmp_path / "base", quantization)
    lorashard.merge(adapter, tmp_path / "out")
    found, expected = read_model(tmp_path / "out"), make_reference(tmp_path / "base", quantization).state_dict()
    assert found["lm_head.weight"].dtype == torch.float32
    name = "model.layers.1.self_attn.k_proj.weight"  # no adapter is on it
    assert torch.equal(found[name], expected[name].float())


def test_a_checkpoint_that_is_stored_quantized_merges_too(tmp_path, base):
    """Packed bytes or their scales taken for weights, or copied beside the merged ones."""
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    stored = AutoModelForCausalLM.from_pretrained(base, dtype=BF16, quantization_config=options)
    stored.save_pretrained(tmp_path / "stored")
    adapter = save_trained(tmp_path / "adapter", tmp_path / "stored", None)
    report = lorashard.merge(adapter, tmp_path / "out")
    assert report.num_dequantized == 14
    expected = PeftModel.from_pretrained(make_reference(base, FORMATS[0]), adapter).merge_and_unload().state_dict()
    assert find_differences(read_model(tmp_path / "out"), expected) == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert read_tensors(tmp_path / "out").keys() == read_tensors(base).keys()
    lorashard.merge(adapter, tmp_path / "again", requantize="nf4")
    check_requantized(tmp_path / "again", expected, FORMATS[0])


def test_what_transformers_cannot_load_quantized_is_refused(tmp_path, base):
    """A merged model in a folder that no library reads."""
    adapter = save_trained(tmp_path / "adapter", base, FORMATS[0])
    model = lorashard.load_adapter(adapter, placement="replicate", dtype=BF16, device=CPU)
    for asked in ("fp8", Quantization("nf4", has_vocabulary=True), "nf5"):
        with pytest.raises(ConfigError):
            lorashard.merge(adapter, tmp_path / "out", requantize=asked)
    with pytest.raises(ConfigError, match="merge_and_unload"):
        model.merge_and_unload()
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    experts = MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    )
    transposed = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=1, n_head=4))
    # Their own spelling of what is dequantized is found again, whatever module holds it.
    for name, made, target in (("experts", experts, "q_proj"), ("transposed", transposed, "c_attn")):
        made.to(BF16).save_pretrained(tmp_path / name)
        adapter = save_trained(tmp_path / f"adapter-{name}", tmp_path / name, FORMATS[0], target_modules=[target])
        with pytest.raises(ConfigError) as error:
            lorashard.merge(adapter, tmp_path / "out", requantize="nf4")
        assert error.value.option == "requantize" and not (tmp_path / "out").exists()
        lorashard.merge(adapter, tmp_path / f"merged-{name}")  # dequantized, all of it can be written
        assert read_tensors(tmp_path / f"merged-{name}").keys() == read_tensors(tmp_path / name).keys()


def test_an_adapter_remembers_how_its_base_was_quantized(tmp_path, base, caplog):
    """A base that is loaded, or trained on again, in another form than the adapter knows, without a warning."""
    double, plain = FORMATS[1], None
    adapter = save_trained(tmp_path / "adapter", base, double)
    for asked, expected in ((None, double), ("nf4", double), ("int8", Quantization("int8")), ("none", None)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model = lorashard.load_adapter(adapter, placement="replicate", dtype=BF16, device=CPU, quantization=asked)
        loaded = lorashard.api.base_of(model)
        assert loaded is not None and loaded.quantization == expected
        assert ("double quantization" in caplog.text) == (expected != double)
    model.save_pretrained(tmp_path / "plain")
    assert read_quantization_of(tmp_path / "plain") is None
    identity = loaded.identity
    states = []
    for quantization in (plain, double, FORMATS[0]):
        sign_state(model, identity, quantization)
        states.append(bytes(model.state_dict()["base_sha256"].tolist()))
    assert states[0] == identity.digest() and len(set(states)) == 3

    check_quantization(adapter, double, "the base")
    for other in (None, FORMATS[0], Quantization("int8")):
        with pytest.raises(ConfigError, match="double quantization"):
            check_quantization(adapter, other, "the base")
        check_quantization(adapter, other, "the base", allow_base_mismatch=True)

    for text in ('{"format": "nf3"}', '{"format": "nf4", "group": 32}', "[]", '{"format": "nf4", "double_quant": 1}'):
        file = adapter / ADAPTER_NAME
        save_file(load_file(file), file, metadata={"format": "pt", "lorashard.quantization": text})
        with pytest.raises(CheckpointError, match="another version"):
            read_quantization_of(adapter)


def test_a_model_that_was_quantized_in_memory_merges_dequantized(tmp_path, base):
    """A live merge that writes packed bytes, or silently other weights than those that are computed with."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=BF16), config)
    disturb(made)
    model = lorashard.shard(made, "replicate", device=CPU, quantization="nf4")
    model.save_pretrained(tmp_path / "adapter")
    assert read_quantization_of(tmp_path / "adapter") == FORMATS[0]
    lorashard.merge(model, tmp_path / "out")
    reference = make_reference(base, FORMATS[0])
    expected = PeftModel.from_pretrained(reference, tmp_path / "adapter").merge_and_unload().state_dict()
    assert find_differences(read_model(tmp_path / "out"), expected) == []
    lorashard.merge(model, tmp_path / "original", quantization="none")
    original = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=BF16), tmp_path / "adapter")
    assert find_differences(read_model(tmp_path / "original"), original.merge_and_unload().state_dict()) == []
