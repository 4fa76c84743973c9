"""Adapters that look at a quantised base when they begin, or are put on one that is in memory already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils.loftq_utils import _low_rank_decomposition
from support import run_ranks
from tiny import build_base, find_differences, make_batch, set_checkpointing
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import lorashard
from lorashard.errors import ConfigError
from lorashard.model.loftq import make_lora

Results = dict[str, torch.Tensor]
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4)
VOCABULARY = lorashard.Quantization("nf4", has_vocabulary=True)


@dataclass(frozen=True)
class Case:
    """An adapter on a base in nf4.

    Attributes:
        config: makes the adapter's.
        base: which of `save_bases`.
        placement: options of `load`.
        has_vocabulary: whether the embedding and the LM head are quantised too.
    """

    config: Callable[[], PeftConfig]
    base: str = "dense"
    checkpointing: str = "off"
    placement: dict[str, Any] = field(default_factory=lambda: {"placement": "shard"})
    has_vocabulary: bool = False


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options)


CASES = {
    "DoRA": Case(lambda: lora(use_dora=True)),
    "DoRA, host, checkpointing": Case(
        lambda: lora(use_dora=True, target_modules="all-linear"),
        checkpointing="non-reentrant",
        placement={"placement": "host"},
    ),
    "DoRA, replicate, checkpointing": Case(
        lambda: lora(use_dora=True), checkpointing="reentrant", placement={"placement": "replicate"}
    ),
    "DoRA on the vocabulary": Case(
        lambda: lora(use_dora=True, target_modules=["q_proj", "embed_tokens", "lm_head"]), has_vocabulary=True
    ),
    "modules_to_save": Case(lambda: lora(modules_to_save=["lm_head", "up_proj"]), has_vocabulary=True),
    "trainable_token_indices": Case(
        lambda: lora(trainable_token_indices={"embed_tokens": [1, 2], "lm_head": [1, 2]}), has_vocabulary=True
    ),
    "target_parameters": Case(
        lambda: lora(
            target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        ),
        base="experts",
        checkpointing="non-reentrant",
    ),
    "experts without an adapter": Case(lambda: lora(target_modules=["q_proj"]), base="experts"),
    "layer_replication": Case(lambda: lora(layer_replication=[[0, 3], [1, 4]])),
    "IA3": Case(lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "backward ends early": Case(lambda: lora(layers_to_transform=[2, 3]), checkpointing="non-reentrant"),
}


def dequantise(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight after bitsandbytes has quantised it to nf4 and back."""
    packed, state = bnb.quantize_4bit(weight.contiguous().view(-1, 64), quant_type="nf4", blocksize=64)
    return bnb.dequantize_4bit(packed, state).view(weight.shape)


@torch.no_grad()
def dequantise_base(model: nn.Module, has_vocabulary: bool = False) -> None:
    """Replace the linear weights of decoder layers, and experts, by what quantising makes of them."""
    done = set()
    for name, parameter in model.named_parameters():
        is_adapter = any(part in name for part in ("lora_", "modules_to_save", "token_adapter"))
        is_vocabulary = has_vocabulary and ("lm_head" in name or "embed_tokens" in name)
        is_in_layer = ".layers." in f".{name}" and ".gate." not in name
        if not is_adapter and parameter.dim() > 1 and (is_in_layer or is_vocabulary) and parameter not in done:
            parameter.copy_(dequantise(parameter.data))
            done.add(parameter)


def save_bases(folder: Path) -> None:
    build_base("llama", torch.bfloat16, **SIZES).save_pretrained(folder / "dense")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        vocab_size=97,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "experts")


def disturb(model: PeftModel) -> PeftModel:
    """Make every tensor that trains count: many begin as zero."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += (0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return model.train()


def train(model: PeftModel) -> Results:
    """Return the gradients and losses of two microbatches."""
    found: Results = {}
    for number in range(2):
        loss = model(**make_batch(number)).loss
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) > 2
    return found


def train_plain(base: PreTrainedModel, case: Case) -> Results:
    """Train plain PEFT on the dequantised base."""
    dequantise_base(base, case.has_vocabulary)
    torch.manual_seed(7)
    model = get_peft_model(base, case.config())
    set_checkpointing(model, case.checkpointing)
    return train(disturb(model))


def compare_loaded(rank: int, folder: Path, expected: dict[str, Results]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, case in CASES.items():
        torch.manual_seed(7)
        quantization = VOCABULARY if case.has_vocabulary else "nf4"
        path = str(folder / case.base)
        model = lorashard.load(path, case.config(), dtype=torch.bfloat16, quantization=quantization, **case.placement)
        set_checkpointing(model, case.checkpointing)
        wrong = find_differences(train(disturb(model)), expected[name])
        if wrong:
            found[name] = wrong
    return found


def test_adapters_begin_from_the_quantised_base(tmp_path):
    """DoRA's magnitudes, whole modules and rows of the embedding must come from the numbers that are computed with:
    from those in the files they would train another model, which no loss curve shows."""
    save_bases(tmp_path)
    expected = {
        name: train_plain(AutoModelForCausalLM.from_pretrained(tmp_path / case.base, dtype=torch.bfloat16), case)
        for name, case in CASES.items()
    }
    assert run_ranks(compare_loaded, 2, tmp_path, expected) == [{}, {}]


def check_loftq(rank: int, folder: Path) -> list[str]:
    torch.manual_seed(rank)  # ranks that begin otherwise must end with rank 0's
    options = dict(r=8, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="loftq")
    model = lorashard.load(str(folder / "dense"), make_lora(options), "shard", dtype=torch.bfloat16, quantization="nf4")
    layers = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.bfloat16).model.layers
    adapter = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    wrong = [] if model.peft_config["default"].init_lora_weights is True else ["the config would begin LoftQ anew"]
    for path, module in layers.named_modules():
        if isinstance(module, nn.Linear):
            lost = module.weight.data.float() - dequantise(module.weight.data)
            made = _low_rank_decomposition(lost, reduced_rank=8)
            for part, expected in (("lora_A", made["R"]), ("lora_B", made["L"])):
                name = f"base_model.model.model.layers.{path}.{part}.default.weight"
                if not torch.equal(adapter[name], expected):
                    wrong.append(name)
    return wrong


def test_loftq_begins_as_peft_computes_it(tmp_path):
    """Of the original weights alone, or of the quantised ones alone, there is nothing to make up for."""
    save_bases(tmp_path)
    assert run_ranks(check_loftq, 2, tmp_path) == [[], []]


MEMORY_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "PiSSA": (dict(init_lora_weights="pissa"), {"placement": "shard"}),
    "OLoRA": (dict(init_lora_weights="olora"), {"placement": "host"}),
    "DoRA": (dict(use_dora=True), {"placement": "replicate"}),
    "layer_microbatch_size": ({}, {"placement": "shard", "layer_microbatch_size": 2}),
}


def put_in_memory(options: dict[str, Any]) -> PeftModel:
    torch.manual_seed(7)
    return get_peft_model(build_base(**SIZES), lora(**options))


def add_more(model: PeftModel, folder: Path) -> Results:
    """Put adapters that read the base on a model, and train them."""
    torch.manual_seed(9)
    model.add_adapter("dora", lora(use_dora=True))
    model.add_adapter("whole", lora(modules_to_save=["up_proj"]))
    model.add_weighted_adapter(["default", "dora"], [0.7, 0.3], "mixed", combination_type="svd")
    model.load_adapter(str(folder / "dora"), "loaded", is_trainable=True)
    found: Results = {}
    for name in ("dora", "whole", "mixed", "loaded"):
        model.set_adapter(name)
        model.zero_grad()
        found |= {f"{name}: {key}": value for key, value in train(disturb(model)).items()}
    return found


def save_residual(folder: Path) -> None:
    """Save what PiSSA makes of a base, and its adapter, as PEFT's own examples do for QPiSSA."""
    model = put_in_memory({"init_lora_weights": "pissa"})
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder / "pissa_init")
    model.unload().save_pretrained(folder / "residual")


def compare_in_memory(rank: int, folder: Path, expected: dict[str, Results]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (options, placement) in MEMORY_CASES.items():
        model = lorashard.shard(put_in_memory(options), quantization="nf4", **placement)
        wrong = find_differences(train(disturb(model)), expected[name])
        if name == "DoRA":
            wrong += find_differences(add_more(model, folder), expected["added"])
        if wrong:
            found[name] = wrong
    model = lorashard.load_adapter(
        folder / "pissa_init",
        str(folder / "residual"),
        "shard",
        dtype=torch.float32,
        is_trainable=True,
        quantization="nf4",
    )
    wrong = find_differences(train(disturb(model)), expected["PiSSA"])
    if wrong:
        found["PiSSA from files"] = wrong
    model = lorashard.shard(put_in_memory({}), quantization="nf4", placement="shard")
    train(disturb(model))
    wrong = find_differences(add_more(model, folder), expected["added on shards"])
    return found | ({"added on shards": wrong} if wrong else {})


def test_a_model_in_memory_is_quantised_as_it_is(tmp_path):
    """PiSSA's base is what PEFT left of it: quantising the weights of the files instead would count the adapter's part
    twice. What is added later must read the quantised numbers, wherever they rest."""
    save_residual(tmp_path)
    put_in_memory({"use_dora": True}).save_pretrained(tmp_path / "dora")
    expected: dict[str, Results] = {}
    for name, (options, _) in MEMORY_CASES.items():
        model = put_in_memory(options)
        dequantise_base(model)
        expected[name] = train(disturb(model))
        if name == "DoRA":
            expected["added"] = add_more(model, tmp_path)
    model = put_in_memory({})
    dequantise_base(model)
    train(disturb(model))
    expected["added on shards"] = add_more(model, tmp_path)
    assert run_ranks(compare_in_memory, 2, tmp_path, expected) == [{}, {}]


def quantised_elsewhere() -> PeftModel:
    base = build_base(num_hidden_layers=1)
    layer = base.model.layers[0].self_attn
    layer.o_proj = Linear4bit(32, 32, bias=False)
    return get_peft_model(base, lora())


def test_what_cannot_be_quantised_or_initialised_is_refused(tmp_path):
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
        (lambda: lorashard.load(path, loftq()), "quantization: nf4 with it, found quantization: none"),
        (lambda: lorashard.load(path, loftq(), quantization="int8"), "found quantization: int8"),
        (lambda: lorashard.load(path, bits, quantization="nf4"), "expected loftq_bits=4, found 8"),
        (lambda: lorashard.load(path, rounds, quantization="nf4"), "expected loftq_iter=1, found 5"),
        (lambda: lorashard.load(path, loftq(use_dora=True), quantization="nf4"), "use_dora: LoftQ"),
        (lambda: lorashard.load(path, loftq(r=200), quantization="nf4"), "a rank of at most 64"),
        (
            lambda: lorashard.load(path, loftq(target_modules=["lm_head"]), quantization="nf4"),
            "no quantised weight with a LoRA",
        ),
        (lambda: lorashard.load(path, lora(init_lora_weights="corda"), quantization="nf4"), "to lorashard.shard"),
        (lambda: lorashard.shard(quantised_elsewhere(), quantization="nf4"), "found a Params4bit in"),
        (lambda: lorashard.shard(quantised_elsewhere()), "give the checkpoint to lorashard.load"),
        (lambda: lorashard.load(path, lora(), quantization="nf4", torch_compile=True), "torch_compile: the weights"),
        (lambda: lorashard.shard(put_in_memory({}), quantization="int8", torch_compile=True), "of a base in int8"),
        (
            lambda: lorashard.shard(put_in_memory({"layer_replication": [[0, 3], [1, 4]]}), quantization="nf4"),
            "give the checkpoint to lorashard.load",
        ),
        (lambda: lorashard.shard(put_in_memory({}), quantization="nf5"), "expected nf4, int8, fp8 or none"),
    ]
    for action, words in refused:
        with pytest.raises(ConfigError) as caught:
            action()
        assert words in str(caught.value) and "\n" not in str(caught.value)
