"""Adapters in special places: a tied head and embedding, fused experts, and a base that PiSSA has rewritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support import run_ranks
from tiny import build_base, find_differences, make_batch, take_gradients
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import lorashard

PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied head": ("llama-tied", {"target_modules": ["q_proj", "lm_head"]}),
    "tied embedding": ("llama-tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "both, tied": ("llama-tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied head, whole": ("llama-tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "both, whole and tied": (
        "llama-tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "experts": (
        "mixtral",
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "experts of a layer": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["layers.1.mlp.experts.down_proj"]},
    ),
}


def save_base(folder: Path, family: str) -> str:
    torch.manual_seed(0)
    if family == "mixtral":
        sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3)
        heads = dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
        MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(folder)
    else:
        build_base(family).save_pretrained(folder)
    return str(folder)


def train(model: PeftModel) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape)
    loss = model.train()(**make_batch()).loss
    loss.backward()
    return take_gradients(model) | {"loss": loss.detach()}


def compare(rank: int, folder: str) -> dict[str, list[str]]:
    wrong = {}
    for place, (family, options) in PLACES.items():
        base = str(Path(folder) / family)
        results = []
        for is_sharded in (False, True):
            config = LoraConfig(r=4, task_type="CAUSAL_LM", **options)
            torch.manual_seed(7)
            if is_sharded:
                model = lorashard.load(base, config, "shard", dtype=torch.float32)
            else:
                model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
            results.append(train(model))
        wrong[place] = find_differences(results[1], results[0])
    return {place: names for place, names in wrong.items() if names}


def test_gradients_equal_plain_peft_in_special_places(tmp_path):
    """A tied weight gathered twice or released too soon, or an expert's adapter that reads another expert's bytes."""
    for family in ("llama-tied", "mixtral"):
        save_base(tmp_path / family, family)
    assert run_ranks(compare, 2, str(tmp_path)) == [{}, {}]


def convert(rank: int, folder: str, initialisation: str) -> list[str]:
    """Save a PiSSA adapter converted to one for the base's own files, with and without sharding."""
    saved = []
    for is_sharded in (False, True):
        torch.manual_seed(7)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=initialisation, task_type="CAUSAL_LM")
        model = get_peft_model(build_base(), config)
        out = Path(folder) / f"{initialisation} {is_sharded} {rank}"
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(str(out / "first"))
        model = lorashard.shard(model, "shard") if is_sharded else model
        train(model)
        model.peft_config["default"].init_lora_weights = initialisation
        model.save_pretrained(str(out), path_initial_model_for_weight_conversion=str(out / "first"))
        saved.append(load_file(out / "adapter_model.safetensors"))
        converted = PeftModel.from_pretrained(build_base(), str(out))
        ids = make_batch()["input_ids"]
        with torch.no_grad():
            difference = (converted.eval()(input_ids=ids).logits - model.eval()(input_ids=ids).logits).abs().max()
        if difference > 1e-4:
            return [f"on the base's own weights the converted adapter differs by {difference}"]
    return find_differences(saved[1], saved[0])


def check_conversion(rank: int, folder: str) -> dict[str, list[str]]:
    return {name: convert(rank, folder, name) for name in ("pissa", "olora")}


def test_a_rewritten_base_is_sharded_and_its_adapter_converted(tmp_path):
    """An adapter that was trained on a derived base, saved as if it fitted the files, is wrong for everyone else."""
    assert run_ranks(check_conversion, 2, str(tmp_path)) == [{"pissa": [], "olora": []}] * 2
