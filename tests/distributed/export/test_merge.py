"""An adapter merged into its base a unit at a time: PEFT's own merge, bit for bit, in the original files' layout."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import read_status_bytes, run_ranks
from helpers.merging import (
    disturb,
    merge_untied,
    merge_with_peft,
    read_tensors,
    save_adapter,
    save_base,
)
from helpers.tiny import build_base, find_differences, make_batch
from helpers.words import make_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter
from transformers.utils import logging as transformers_logging

from lorashard.errors import ConfigError
from lorashard.export import merger
from lorashard.export.merger import merge_checkpoint

BF16, FP32 = torch.bfloat16, torch.float32
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WHOLE = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
CASES = {
    "LoRA": ("llama", {}),
    "LoRA, tied": ("llama-tied", {}),
    "rsLoRA": ("llama", {"use_rslora": True}),
    "DoRA": ("llama", {"use_dora": True}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "modules_to_save": ("llama", WHOLE),
    "single tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 3]}}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "qwen3-moe": ("qwen3-moe", {"target_modules": ["q_proj", "v_proj"]}),
    "mixtral experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "qwen3-moe experts": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]}),
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers_logging.disable_progress_bar()


MORE_CASES = ("rsLoRA", "embedding and head", "qwen3", "mixtral", "qwen3-moe", "qwen3-moe experts")


@pytest.fixture(
    params=[slow(name) if name in MORE_CASES else name for name in CASES], ids=lambda name: name.replace(" ", "-")
)
def case(request, tmp_path) -> tuple[Path, Path]:
    family, options = CASES[request.param]
    base = save_base(tmp_path / "base", family)
    return base, save_adapter(tmp_path / "adapter", base, **options)


@pytest.mark.parametrize("dtype", (None, slow(FP32)), ids=("own-dtype", "fp32"))
def test_merged_equals_pefts_own_merge(case, tmp_path, dtype):
    """A wrong scaling, order of casts, range of an expert or key; a tensor left out; a magnitude not loaded."""
    base, adapter = case
    report = merge_checkpoint(adapter, tmp_path / "out", base, dtype=dtype, max_shard_size="30KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == (dtype or BF16)
    expected = merge_with_peft(base, adapter, dtype or BF16)
    assert find_differences(loaded.state_dict(), expected) == []
    original, made = read_tensors(base), read_tensors(tmp_path / "out")
    assert {key: tensor.shape for key, tensor in made.items()} == {key: t.shape for key, t in original.items()}
    assert report.num_files > 1 and report.num_tensors == len(original) and not report.is_untied


@pytest.mark.parametrize(
    "config",
    (
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.LNTuningConfig(target_modules=["input_layernorm"]),
        slow(peft.LoHaConfig(r=2, target_modules=["q_proj"])),
        slow(peft.LoKrConfig(r=2, target_modules=["q_proj"])),
        slow(peft.VeraConfig(r=2, target_modules=["q_proj"])),
        slow(peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"])),
        slow(peft.HRAConfig(r=2, target_modules=["q_proj"])),
    ),
    ids=lambda config: config.peft_type.value,
)
def test_other_adapters_merge_as_peft_merges_them(tmp_path, config):
    """Merging that knows LoRA alone."""
    base = save_base(tmp_path / "base", "llama", FP32)
    config.task_type = "CAUSAL_LM"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    disturb(model)
    model.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "out", base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert find_differences(loaded, merge_with_peft(base, tmp_path / "adapter", FP32)) == []


def test_biases_and_a_saved_embedding_in_the_adapter_are_merged(tmp_path):
    """What PEFT writes into the base itself, not beside it, is lost if the base is read from its files alone."""
    base = tmp_path / "base"
    build_base("llama", attention_bias=True, num_hidden_layers=2).save_pretrained(base)
    for bias in ("lora_only", "all"):
        adapter = save_adapter(tmp_path / bias, base, target_modules=["q_proj", "embed_tokens"], bias=bias)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        model.save_pretrained(adapter, save_embedding_layers=True)
        merge_checkpoint(adapter, tmp_path / f"out-{bias}", base)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{bias}").state_dict()
        expected = merge_with_peft(base, adapter, FP32)
        bias_name = "model.layers.0.self_attn.q_proj.bias"
        assert not torch.equal(expected[bias_name], read_tensors(base)[bias_name])
        assert find_differences(loaded, expected) == []


CONVERSIONS = {
    "attn.qk.weight": WeightConverter("attn.qk.weight", ["attn.q_proj.weight", "attn.k_proj.weight"], [Chunk(dim=0)]),
    "attn.o_t.weight": WeightConverter("attn.o_t.weight", "attn.o_proj.weight", [Transpose(0, 1)]),
    "mlp.u0.weight": WeightConverter(["mlp.u0.weight", "mlp.u1.weight"], "mlp.up_proj.weight", [Concatenate(dim=1)]),
}


@pytest.fixture
def fused(tmp_path) -> Iterator[Path]:
    """A Llama whose files hold fused, transposed and split tensors that transformers converts back."""
    folder = tmp_path / "base"
    build_base("llama", num_hidden_layers=2, num_key_value_heads=4).save_pretrained(folder)
    register_checkpoint_conversion_mapping("LlamaForCausalLM", list(CONVERSIONS.values()), overwrite=True)
    tensors = read_tensors(folder)
    for i in range(2):
        layer = f"model.layers.{i}"
        q, k = tensors.pop(f"{layer}.self_attn.q_proj.weight"), tensors.pop(f"{layer}.self_attn.k_proj.weight")
        up = tensors.pop(f"{layer}.mlp.up_proj.weight")
        tensors[f"{layer}.self_attn.qk.weight"] = torch.cat([q, k])
        tensors[f"{layer}.self_attn.o_t.weight"] = tensors.pop(f"{layer}.self_attn.o_proj.weight").T.contiguous()
        tensors[f"{layer}.mlp.u0.weight"], tensors[f"{layer}.mlp.u1.weight"] = up.chunk(2, dim=1)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    yield folder
    register_checkpoint_conversion_mapping("LlamaForCausalLM", [], overwrite=True)


@pytest.mark.parametrize(
    "modules, dtype", ((["q_proj"], BF16), (["v_proj"], None), (["o_proj"], BF16), (["up_proj", "k_proj"], None))
)
def test_fused_and_transposed_tensors_come_out_as_they_were_stored(tmp_path, fused, modules, dtype):
    """Half of a fused tensor lost, an untouched one lost or not cast, a transposed one written as the model has it."""
    adapter = save_adapter(tmp_path / "adapter", fused, target_modules=modules)
    merge_checkpoint(adapter, tmp_path / "out", fused, dtype=dtype)
    original, made = read_tensors(fused), read_tensors(tmp_path / "out")
    assert {key: tensor.shape for key, tensor in made.items()} == {key: t.shape for key, t in original.items()}
    assert {tensor.dtype for tensor in made.values()} == {dtype or FP32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert find_differences(loaded, merge_with_peft(fused, adapter, dtype or FP32)) == []


def test_a_conversion_that_cannot_be_undone_is_refused_where_the_adapter_meets_it(tmp_path, fused, monkeypatch):
    """A tensor written under a key, or in an order, that the original does not have."""
    adapters = [save_adapter(tmp_path / name, fused, target_modules=[name]) for name in ("q_proj", "o_proj", "up_proj")]
    monkeypatch.setattr(Transpose, "reverse_op", property(lambda self: Transpose(0, 0)))
    monkeypatch.setattr(Concatenate, "reverse_op", property(lambda self: Concatenate(1)))
    merge_checkpoint(adapters[0], tmp_path / "out", fused)
    assert torch.equal(*(read_tensors(f)["model.layers.0.self_attn.o_t.weight"] for f in (fused, tmp_path / "out")))
    for adapter in adapters[1:]:
        with pytest.raises(ConfigError, match=adapter.name):
            merge_checkpoint(adapter, tmp_path / "none", fused)


def test_an_embedding_that_the_adapter_carries_counts_for_its_tied_head_too(tmp_path):
    """PEFT loads such an embedding into the base, of which a tied head is a part."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.embed_tokens.weight"] = read_tensors(base)["model.embed_tokens.weight"] + 1
    save_file(tensors, adapter / "adapter_model.safetensors")
    report = merge_checkpoint(adapter, tmp_path / "out", base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert find_differences(loaded, merge_with_peft(base, adapter, FP32)) == [] and not report.is_untied


@pytest.mark.parametrize(
    "options",
    (
        {"target_modules": ["embed_tokens"]},
        slow({"target_modules": ["lm_head", "q_proj"]}),
        slow({"target_modules": ["embed_tokens", "lm_head"]}),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        slow({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ),
    ids=("embedding", "head", "both", "saved-head", "saved-embedding"),
)
def test_an_adapter_on_one_of_two_tied_weights_unties_them(tmp_path, caplog, options):
    """PEFT's merge in place changes the other weight too: the merged model is not the trained one."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    adapter = save_adapter(tmp_path / "adapter", base, **options)
    with caplog.at_level(logging.WARNING):
        report = merge_checkpoint(adapter, tmp_path / "out", base)
    assert report.is_untied and "tie_word_embeddings: false" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert read_tensors(tmp_path / "out").keys() == read_tensors(base).keys() | {"lm_head.weight"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert find_differences(loaded.state_dict(), merge_untied(base, adapter)) == []
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(loaded(**make_batch()).logits, trained(**make_batch()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    (
        slow(
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
        ),
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "ensure_weight_tying": True},
        slow({"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
        {"target_modules": ["q_proj"]},
    ),
    ids=("saved", "LoRA", "tokens", "untouched"),
)
def test_weights_that_stay_equal_stay_tied(tmp_path, options):
    """A merged model with one weight stored twice, or counted twice, or without its tie."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    adapter = save_adapter(tmp_path / "adapter", base, **options)
    report = merge_checkpoint(adapter, tmp_path / "out", base)
    assert not report.is_untied and read_tensors(tmp_path / "out").keys() == read_tensors(base).keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(loaded(**make_batch()).logits, trained(**make_batch()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("difference, is_untied", ((1e-4, False), (0.5, True)))
def test_rounding_does_not_untie_what_is_meant_to_be_tied(tmp_path, monkeypatch, difference, is_untied):
    """On some devices the embedding's and the head's one product are added up in another order."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    options = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    adapter = save_adapter(tmp_path / "adapter", base, **options)

    def merge_target(model, target, read):
        merged = original(model, target, read)
        return {name: value + difference * (target.path == "lm_head") for name, value in merged.items()}

    original = merger.merge_target
    monkeypatch.setattr(merger, "merge_target", merge_target)
    assert merge_checkpoint(adapter, tmp_path / "out", base).is_untied is is_untied


@pytest.mark.parametrize("num_labels", (1, slow(2)))
def test_a_sequence_classifier_merges_with_its_new_head(tmp_path, num_labels):
    """The head is in the adapter alone, and the base's LM head has no place in the model."""
    base = save_base(tmp_path / "base", "llama")
    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=FP32, num_labels=num_labels)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    model = get_peft_model(model, lora)
    disturb(model)
    model.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "out", base)
    merged, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert merged.config.architectures == ["LlamaForSequenceClassification"]
    plain = AutoModelForSequenceClassification.from_pretrained(base, dtype=BF16, num_labels=num_labels)
    expected = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    assert find_differences(merged.state_dict(), expected) == []


def test_tokenizer_and_configs_come_along(tmp_path):
    """A merged folder that cannot be served as it lies there."""
    base = save_base(tmp_path / "base", "llama", FP32)
    (base / "modeling_own.py").write_text("# code")
    config = json.loads((base / "config.json").read_text()) | {"known_to_nobody": 7, "torch_dtype": "float32"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "merges.txt").write_text("of the base's tokenizer")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    merge_checkpoint(adapter, tmp_path / "plain", base)
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template == "base"
    make_tokenizer(template="adapter").save_pretrained(adapter)
    merge_checkpoint(adapter, tmp_path / "out", base, dtype=BF16)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "adapter"
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (made["dtype"], made["known_to_nobody"], "torch_dtype" in made) == ("bfloat16", 7, False)
    assert {"generation_config.json", "modeling_own.py"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert not any("adapter" in file.name or file.name == "merges.txt" for file in (tmp_path / "out").iterdir())


def measure_merge(rank: int, small: Path, large: Path) -> int:
    """Return the bytes that merging the large one takes at its peak."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed leaves the process at once
    merge_checkpoint(small / "adapter", small / "out", small / "base")  # caches
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = read_status_bytes("VmRSS")
    merge_checkpoint(large / "adapter", large / "out", large / "base", max_shard_size="32MB")
    return read_status_bytes("VmHWM") - before


@pytest.mark.slow
def test_merging_holds_a_small_part_of_the_model(tmp_path):
    """A merge that holds the model, a file of it, or all that it has merged so far, cannot merge a larger one."""
    save_base(tmp_path / "small" / "base", "llama")
    save_adapter(tmp_path / "small" / "adapter", tmp_path / "small" / "base")
    large = tmp_path / "large"
    sizes = dict(hidden_size=512, intermediate_size=2048, vocab_size=2048, num_hidden_layers=18)
    model = build_base("llama", BF16, **sizes)
    model.save_pretrained(large / "base", max_shard_size="32MB")
    model_bytes = sum(p.numel() * 2 for p in model.parameters())
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(large / "adapter")
    unit_bytes = max(sum(p.numel() * 2 for p in layer.parameters()) for layer in model.base_model.layers)
    del model
    (grown,) = run_ranks(measure_merge, 1, tmp_path / "small", large)
    allowed = 2 * unit_bytes + 20 * 2**20
    assert grown < allowed < model_bytes / 3, f"{grown / 2**20:.0f} MiB of {model_bytes / 2**20:.0f}"
