"""LoftQ on a quantized base, PiSSA's residual in its files, and what is refused.

That adapters begin from the quantized values, and train as on them, the exactness ladder shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from helpers.forked_ranks import run_ranks
from helpers.scenarios import one_step, run_scenario
from helpers.tiny import build_base, find_differences
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.loftq_utils import _low_rank_decomposition
from torch import nn
from transformers import AutoModelForCausalLM

import lorashard
from lorashard.errors import ConfigError, ShardError
from lorashard.model.loftq import make_lora

SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options)


def dequantize(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight after bitsandbytes has quantized it to nf4 and back."""
    packed, state = bnb.quantize_4bit(weight.contiguous().view(-1, 64), quant_type="nf4", blocksize=64)
    return bnb.dequantize_4bit(packed, state).view(weight.shape)


def save_bases(folder: Path) -> None:
    build_base("llama", torch.bfloat16, **SIZES).save_pretrained(folder / "dense")


def check_loftq(rank: int, folder: Path) -> list[str]:
    torch.manual_seed(rank)  # ranks that begin otherwise must end with rank 0's
    options = dict(r=8, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="loftq")
    model = lorashard.load(str(folder / "dense"), make_lora(options), "shard", dtype=torch.bfloat16, quantization="nf4")
    layers = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.bfloat16).model.layers
    adapter = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    wrong = [] if model.peft_config["default"].init_lora_weights is True else ["the config would begin LoftQ anew"]
    for path, module in layers.named_modules():
        if isinstance(module, nn.Linear):
            lost = module.weight.data.float() - dequantize(module.weight.data)
            made = _low_rank_decomposition(lost, reduced_rank=8)
            for part, expected in (("lora_A", made["R"]), ("lora_B", made["L"])):
                name = f"base_model.model.model.layers.{path}.{part}.default.weight"
                if not torch.equal(adapter[name], expected):
                    wrong.append(name)
    return wrong


def test_loftq_begins_as_peft_computes_it(tmp_path):
    """Of the original weights alone, or of the quantized ones alone, there is nothing to make up for."""
    save_bases(tmp_path)
    assert run_ranks(check_loftq, 2, tmp_path) == [[], []]


def put_in_memory(options: dict[str, Any]) -> PeftModel:
    torch.manual_seed(7)
    return get_peft_model(build_base(**SIZES), lora(**options))


def save_residual(folder: Path) -> None:
    """Save what PiSSA makes of a base, and its adapter, as PEFT's own examples do for QPiSSA."""
    model = put_in_memory({"init_lora_weights": "pissa"})
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "pissa_init")
    model.unload().save_pretrained(folder / "residual")


def test_a_residual_of_pissa_is_quantized_as_in_memory(tmp_path):
    """Quantizing the original weights instead would count the adapter's part twice."""
    save_residual(tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "is_trainable": True, "quantization": "nf4"}
    loaded = lorashard.load_adapter(tmp_path / "pissa_init", str(tmp_path / "residual"), "host", **options)
    made = lorashard.shard(put_in_memory({"init_lora_weights": "pissa"}), "replicate", quantization="nf4")
    found, expected = (run_scenario(one_step, model.train()) for model in (loaded, made))
    assert find_differences(found, expected) == []


def test_a_sharded_weight_of_a_quantized_base_cannot_be_read():
    """Catches bytes of four-bit values, or zeros, that are taken for the weight."""
    model = lorashard.shard(put_in_memory({}), "host", quantization="nf4")
    weight = model.get_base_model().model.layers[-1].self_attn.q_proj.base_layer.weight
    with pytest.raises(ShardError, match="q_proj"):
        weight + 1


def quantized_elsewhere() -> PeftModel:
    base = build_base(num_hidden_layers=1)
    layer = base.model.layers[0].self_attn
    layer.o_proj = Linear4bit(32, 32, bias=False)
    return get_peft_model(base, lora())


def test_what_cannot_be_quantized_or_initialized_is_refused(tmp_path):
    """Each of these would train something else than was asked for, or fail in the middle of loading."""
    save_bases(tmp_path)
    path = str(tmp_path / "dense")

    def loftq(**options: Any) -> LoraConfig:
        return make_lora({"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": "loftq"} | options)

    rounds = loftq()
    rounds.loftq_config = {"loftq_bits": 4, "loftq_iter": 5}
    bits = loftq()
    bits.loftq_config = {"loftq_bits": 8}
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: lorashard.load(path, loftq()), "quantization: none"),
        (lambda: lorashard.load(path, loftq(), quantization="int8"), "quantization: int8"),
        (lambda: lorashard.load(path, bits, quantization="nf4"), "loftq_bits=4"),
        (lambda: lorashard.load(path, rounds, quantization="nf4"), "loftq_iter=1"),
        (lambda: lorashard.load(path, loftq(use_dora=True), quantization="nf4"), "use_dora: LoftQ"),
        (lambda: lorashard.load(path, loftq(r=200), quantization="nf4"), "at most 64"),
        (
            lambda: lorashard.load(path, loftq(target_modules=["lm_head"]), quantization="nf4"),
            "no quantized weight",
        ),
        (lambda: lorashard.load(path, lora(init_lora_weights="corda"), quantization="nf4"), "to lorashard.shard"),
        (lambda: lorashard.shard(quantized_elsewhere(), quantization="nf4"), "Params4bit"),
        (lambda: lorashard.shard(quantized_elsewhere()), "lorashard.load"),
        (lambda: lorashard.load(path, lora(), quantization="nf4", torch_compile=True), "torch_compile: the weights"),
        (lambda: lorashard.shard(put_in_memory({}), quantization="int8", torch_compile=True), "int8"),
        (
            lambda: lorashard.shard(put_in_memory({"layer_replication": [[0, 3], [1, 4]]}), quantization="nf4"),
            "lorashard.load",
        ),
        (lambda: lorashard.shard(put_in_memory({}), quantization="nf5"), "nf4, int8, fp8"),
    ]
    for action, words in refused:
        with pytest.raises(ConfigError) as caught:
            action()
        assert words in str(caught.value) and "\n" not in str(caught.value)
