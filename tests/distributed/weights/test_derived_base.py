"""PiSSA and OLoRA from `lorashard.load`: the derived base, training on it, and what is saved, beside plain PEFT."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.stored import FP8, rewrite, to_fp8
from helpers.tiny import build_base, find_differences, make_batch, take_gradients
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lorashard
from lorashard.api import base_of
from lorashard.errors import CheckpointError, ConfigError, UserError
from lorashard.weights import build_once
from lorashard.weights.fingerprint import find_cache_dir

Results = dict[str, torch.Tensor]
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
CASES: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa", "use_rslora": True},
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4", "rank_pattern": {"q_proj": 2}},
    "olora": {"init_lora_weights": "olora", "modules_to_save": ["lm_head"]},
    "DoRA": {"init_lora_weights": "pissa", "use_dora": True},
}


def lora(**options: Any) -> LoraConfig:
    values: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]}
    return LoraConfig(**values | {"task_type": "CAUSAL_LM"} | options)


@pytest.fixture
def base(tmp_path) -> Path:
    """A saved base."""
    build_base("llama-tied", torch.bfloat16, **SIZES).save_pretrained(tmp_path / "base", max_shard_size="100KB")
    return tmp_path / "base"


def put_on_plain(base: Path, options: dict[str, Any], dtype: torch.dtype) -> PeftModel:
    torch.manual_seed(7)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), lora(**options))


def name_as_in_base(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")


@torch.no_grad()
def quantize(model: PeftModel) -> None:
    """Replace the linear weights of decoder layers by what bitsandbytes' nf4 makes of them."""
    for name, weight in model.named_parameters():
        if ".layers." in name and weight.dim() == 2 and "lora_" not in name:
            packed, state = bnb.quantize_4bit(weight.contiguous().view(-1, 64), quant_type="nf4", blocksize=64)
            weight.copy_(bnb.dequantize_4bit(packed, state).view(weight.shape))


def train(model: PeftModel) -> Results:
    """Take two steps; return losses, gradients and what is trained, as it was at first."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {f"first {name}": parameter.detach().clone() for name, parameter in trained.items()}
    for step in range(2):
        loss = model.train()(**make_batch(step)).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        for name, parameter in trained.items():
            assert parameter.grad is not None
            found[f"{name} {step}"] = parameter.grad
            parameter.data -= 0.05 * parameter.grad
            parameter.grad = None
    return found


def compare(rank: int, base: Path, expected: dict[str, Results], residuals: dict[str, Results]) -> dict[str, list]:
    wrong: dict[str, list] = {}
    if rank == 0:  # it comes last, so that another rank derives the base
        original = build_once.FileLock
        build_once.FileLock = lambda path: (time.sleep(0.3), original(path))[1]  # type: ignore[misc, assignment]
    for name, options in CASES.items():
        for quantization in (None, "nf4"):
            if f"{name} {quantization}" not in expected:
                continue
            torch.manual_seed(7 + rank)  # ranks that draw other numbers must end with rank 0's
            model = lorashard.load(str(base), lora(**options), "shard", dtype=torch.bfloat16, quantization=quantization)
            found = base_of(model)
            assert found is not None
            kept = {}
            for file in found.folder.glob("*.safetensors"):
                kept |= load_file(file)
            wrong[f"{name} residual"] = [key for key in kept if not torch.equal(kept[key], residuals[name][key])]
            wrong[f"{name} {quantization}"] = find_differences(train(model), expected[f"{name} {quantization}"])
    return {key: value for key, value in wrong.items() if value}


QUICK = ("pissa nf4", "olora None")
MORE = tuple(f"{name} {kind}" for name in CASES for kind in (None, "nf4") if f"{name} {kind}" not in QUICK)


@pytest.mark.parametrize("chosen", [QUICK, slow(MORE)], ids=["quick", "more"])
def test_a_derived_base_and_training_on_it_equal_plain_peft(base, chosen):
    """A residual of another scale, or of weights that are quantized already, starts as another model; random numbers in
    another order, as after a second decomposition, give another adapter."""
    expected: dict[str, Results] = {}
    residuals: dict[str, Results] = {}
    for name, options in CASES.items():
        model = put_on_plain(base, options, torch.bfloat16)
        residuals[name] = {name_as_in_base(key): value.clone() for key, value in model.state_dict().items()}
        expected[f"{name} None"] = train(model)
        model = put_on_plain(base, options, torch.bfloat16)
        quantize(model)
        expected[f"{name} nf4"] = train(model)
    expected = {name: expected[name] for name in chosen}
    assert run_ranks(compare, 2, base, expected, residuals) == [{}] * 2
    assert len(list((find_cache_dir() / "derived").glob("*/config.json"))) == len({name.split()[0] for name in chosen})


def train_and_save(base: Path, out: Path) -> dict[str, Any]:
    """Train, save the adapter and one converted for the original base; return the trained logits."""
    found: dict[str, Any] = {}
    for quantization in ("none", "nf4"):
        model = lorashard.load(
            str(base), lora(init_lora_weights="pissa"), "shard", dtype=torch.float32, quantization=quantization
        )
        train(model)
        generator = torch.Generator().manual_seed(5)
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
        loaded = base_of(model)
        assert loaded is not None
        model.save_pretrained(str(out / quantization))
        found[quantization] = model.eval()(**make_batch()).logits.detach()
        first = str(loaded.folder / "initial_adapter")
        config = json.loads(Path(first, "adapter_config.json").read_text())
        assert config["init_lora_weights"] is True and config["base_model_name_or_path"] == str(loaded.folder)
        model.save_pretrained(str(out / f"{quantization} converted"), path_initial_model_for_weight_conversion=first)
        again = lorashard.load_adapter(out / quantization, placement="shard", dtype=torch.float32, is_trainable=True)
        found[f"{quantization} again"] = again.eval()(**make_batch()).logits.detach()
    return found


def test_what_is_saved_belongs_to_its_base(base, tmp_path):
    """An adapter that names the original base doubles the largest directions of each weight, in any tool; one that was
    converted for it loses them on the derived one."""
    found = train_and_save(base, tmp_path)
    original = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for quantization in ("none", "nf4"):
        assert torch.equal(found[quantization], found[f"{quantization} again"])
        config = json.loads((tmp_path / quantization / "adapter_config.json").read_text())
        assert config["init_lora_weights"] is True and "/derived/" in config["base_model_name_or_path"]
        plain = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
        plain = PeftModel.from_pretrained(plain, tmp_path / quantization)
        if quantization == "nf4":
            quantize(plain)
        with torch.no_grad():
            assert torch.equal(plain(**make_batch()).logits, found[quantization])
        lorashard.merge(tmp_path / quantization, tmp_path / f"{quantization} merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{quantization} merged", dtype=torch.float32)
        assert find_differences(merged.state_dict(), plain.merge_and_unload().state_dict()) == []
        with pytest.raises(ConfigError, match="another base"):
            lorashard.merge(tmp_path / quantization, tmp_path / "wrong", str(base))
    config = json.loads((tmp_path / "none converted" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["r"] == 8
    converted = lorashard.load_adapter(tmp_path / "none converted", placement="shard", dtype=torch.float32)
    with torch.no_grad():
        difference = (converted(**make_batch()).logits - found["none"]).abs().max()
        assert difference < 1e-4  # a weight less its part, and the part added again, is rounded twice
        assert (original(**make_batch()).logits - found["none"]).abs().max() > 0.02
    shutil.rmtree(find_cache_dir() / "derived")
    with pytest.raises(ConfigError, match="config"):
        lorashard.load_adapter(tmp_path / "none")


def test_a_derived_base_is_used_again(base):
    """One that is derived at each start costs a decomposition; another dropout is no reason for it."""
    options = {"init_lora_weights": "olora"}
    cache = find_cache_dir() / "derived"
    model = lorashard.load(str(base), lora(**options), "shard")
    (made,) = [folder for folder in cache.iterdir() if folder.is_dir()]
    first = train(model)
    written = {file: file.stat().st_mtime_ns for file in made.rglob("*")}
    model = lorashard.load(str(base), lora(lora_dropout=0.5, **options), "shard")
    assert model.peft_config["default"].lora_dropout == 0.5
    found = base_of(model)
    assert found is not None and found.folder == made
    model = lorashard.load(str(base), lora(**options), "shard")
    assert find_differences(train(model), first) == []
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*")} == written


def test_what_cannot_be_derived_is_refused(base, monkeypatch):
    """Each of these would change another weight than PEFT's documents say, or fail after hours."""

    def load(**options: Any) -> object:
        return lorashard.load(str(base), lora(**{"init_lora_weights": "pissa"} | options), "shard")

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: load(init_lora_weights="corda"), "init_lora_weights"),
        (lambda: load(target_modules=["q_proj", "embed_tokens"]), "model.embed_tokens"),
        (lambda: load(target_modules=["lm_head"]), "lm_head.weight"),
        (lambda: load(target_modules=[], target_parameters=["q_proj.weight"]), "target_parameters"),
        (lambda: load(layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
        (lambda: load(r=65), "at most 64"),
        (lambda: load(target_modules=["q_prj"]), "q_prj"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(build_once.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(CheckpointError) as full:
            load()
        assert full.value.option == "init_lora_weights" and full.value.found == "0.0 MiB"
    for action, words in refused:
        with pytest.raises(UserError) as caught:
            action()
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not list((find_cache_dir() / "derived").glob("*/"))
    build_base(**SIZES).save_pretrained(base)
    (base / "model.safetensors.index.json").unlink()
    rewrite(base, to_fp8, FP8)
    with pytest.raises(ConfigError) as stored:
        load()
    assert stored.value.option == "init_lora_weights" and "fp8" in stored.value.found


def train_disturbed(model: PeftModel) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape)
    loss = model.train()(**make_batch()).loss
    loss.backward()
    return take_gradients(model) | {"loss": loss.detach()}


def convert(rank: int, folder: str, initialization: str) -> list[str]:
    """Save a PiSSA adapter converted to one for the base's own files, with and without sharding."""
    saved = []
    for is_sharded in (False, True):
        torch.manual_seed(7)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=initialization, task_type="CAUSAL_LM")
        model = get_peft_model(build_base(num_hidden_layers=2), config)
        out = Path(folder) / f"{initialization} {is_sharded} {rank}"
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(str(out / "first"))
        model = lorashard.shard(model, "shard") if is_sharded else model
        train_disturbed(model)
        model.peft_config["default"].init_lora_weights = initialization
        model.save_pretrained(str(out), path_initial_model_for_weight_conversion=str(out / "first"))
        saved.append(load_file(out / "adapter_model.safetensors"))
        converted = PeftModel.from_pretrained(build_base(num_hidden_layers=2), str(out))
        ids = make_batch()["input_ids"]
        with torch.no_grad():
            difference = (converted.eval()(input_ids=ids).logits - model.eval()(input_ids=ids).logits).abs().max()
        if difference > 1e-4:
            return [f"on the base's own weights the converted adapter differs by {difference}"]
    return find_differences(saved[1], saved[0])


def check_conversion(rank: int, folder: str) -> dict[str, list[str]]:
    return {name: convert(rank, folder, name) for name in ("pissa", "olora")}


def test_a_rewritten_base_is_sharded_and_its_adapter_converted(tmp_path):
    """An adapter that was trained on a derived base, but saved as one of the original, is wrong in other tools."""
    assert run_ranks(check_conversion, 2, str(tmp_path)) == [{"pissa": [], "olora": []}] * 2
