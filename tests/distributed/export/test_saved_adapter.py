"""Adapters that were saved: what their files say, and the same logits on any placement."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from pathlib import Path

import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import VOCAB_SIZE, add_lora, build_base, make_batch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import lorashard
from lorashard.errors import CheckpointError, ConfigError
from lorashard.weights.fingerprint import BaseIdentity, hash_file

LAYERS = 3  # of fewer, PEFT names each module of a layer by its path
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
}
# Each kind of adapter meets a placement, one all of them: what is restored does not know where the base rests.
PLACEMENTS = {
    "lora": ("auto", "shard", "host", "file", "replicate"),
    "dora": ("shard", "file"),
    "head": ("host",),
    "modules_to_save": ("shard",),
    "bias": ("replicate",),
}


def _save_base(folder: Path) -> Path:
    build_base(num_hidden_layers=LAYERS).save_pretrained(folder)
    return folder


def _train_a_little(base: Path, folder: Path, **options) -> torch.Tensor:
    """Save a plain PEFT adapter and return its logits."""
    model = add_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), **options)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(0.01)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model.eval()(input_ids=_tokens()).logits


def _tokens() -> torch.Tensor:
    return torch.arange(24).view(2, 12) % VOCAB_SIZE


def _logits(model: PeftModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=_tokens()).logits


@pytest.mark.parametrize("kind", ["lora", "modules_to_save", *map(slow, ("dora", "head", "bias"))])
def test_saved_adapter_gives_plain_pefts_logits(tmp_path, kind):
    """A part of an adapter that is not restored leaves its initial value, and the model still talks."""
    expected = _train_a_little(_save_base(tmp_path / "base"), tmp_path / "adapter", **KINDS[kind])

    def body(rank):
        same = []
        for placement in PLACEMENTS[kind]:
            model = lorashard.load_adapter(tmp_path / "adapter", placement=placement, dtype=torch.float32)
            assert not model.training and not any(p.requires_grad for p in model.parameters())
            same.append(torch.equal(_logits(model), expected))
        return same

    assert run_ranks(body, 2) == [[True] * len(PLACEMENTS[kind])] * 2


def test_a_loaded_adapter_trains_on_from_its_values(tmp_path):
    """`is_trainable` must give the saved values gradients, not new ones."""
    _train_a_little(_save_base(tmp_path / "base"), tmp_path / "adapter")

    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32),
        tmp_path / "adapter",
        is_trainable=True,
    ).train()
    plain(input_ids=_tokens(), labels=_tokens()).loss.backward()
    expected = {n: p for n, p in plain.named_parameters() if p.requires_grad}

    def body(rank):
        model = lorashard.load_adapter(
            tmp_path / "adapter", placement="shard", dtype=torch.float32, is_trainable=True
        ).train()
        model(input_ids=_tokens(), labels=_tokens()).loss.backward()
        found = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert found.keys() == expected.keys()
        return [
            name
            for name, parameter in expected.items()
            if not torch.equal(found[name], parameter) or not torch.equal(found[name].grad, parameter.grad)
        ]

    assert run_ranks(body, 2) == [[], []]


def _save_sharded(base: Path, folder: Path, world_size: int = 2) -> None:
    def body(rank):
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = lorashard.load(str(base), config, "shard", dtype=torch.float32)
        for _ in range(5):  # on every rank, which is wasteful and does no harm
            model.save_pretrained(str(folder))

    run_ranks(body, world_size)


def test_adapter_carries_what_servers_and_plain_peft_need(tmp_path):
    """No wrapper's prefix, target modules spelled out, the base's path whole, and the hash of each of its files."""
    base = tmp_path / "base"
    build_base(num_hidden_layers=LAYERS).save_pretrained(base, max_shard_size="40KB")
    _save_sharded(base, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(config["target_modules"]) == linears
    assert config["base_model_name_or_path"] == str(base) and config["peft_type"] == "LORA"
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert all(name.startswith("base_model.model.model.layers.") for name in list(opened.keys()))
    files = sorted(base.glob("*.safetensors"))
    identity = BaseIdentity.read(tmp_path / "adapter")
    assert len(files) > 1 and identity is not None and set(identity.files) == {file.name for file in files}
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")


def test_another_base_is_refused(tmp_path, caplog):
    """The same shapes with other values give fluent nonsense."""
    base = _save_base(tmp_path / "base")
    _save_sharded(base, tmp_path / "adapter", 1)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="model.safetensors.*allow_base_mismatch"):
        lorashard.load_adapter(tmp_path / "adapter")
    with caplog.at_level(logging.WARNING):
        lorashard.load_adapter(tmp_path / "adapter", allow_base_mismatch=True)
    assert "another base" in caplog.text


@pytest.fixture
def later(monkeypatch) -> None:
    """It is a minute later than files say: of one that is so new that it may change unseen no hash is remembered."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)


def test_files_are_hashed_once_and_shared_out(tmp_path, own_cache, later):
    """Every rank hashing 140 GB of weights, at every start, would cost minutes."""
    known = own_cache / "lorashard" / "hashes.json"
    files = [tmp_path / f"{number}.safetensors" for number in range(4)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 100)

    def body(rank):
        told: list[int] = []
        first = BaseIdentity.of(files, lambda done, *others: told.append(done))
        torch.distributed.barrier()
        if rank == 0:  # whoever hashes again finds what is true
            known.write_text(json.dumps(dict.fromkeys(json.loads(known.read_text()), "0" * 64)))
        torch.distributed.barrier()
        return max(told), dict(first.files), set(BaseIdentity.of(files).files.values())

    expected = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert run_ranks(body, 2) == [(200, expected, {"0" * 64})] * 2


def test_what_the_base_itself_would_have_to_be_is_refused(tmp_path):
    """Catches biases that are trained into a frozen placeholder, and a PiSSA adapter on weights that it rewrote."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(tmp_path)
    base = str(tmp_path)
    with pytest.raises(ConfigError, match="q_proj.base_layer.bias"):
        lorashard.load(base, LoraConfig(target_modules=["q_proj"], bias="lora_only", task_type="CAUSAL_LM"))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa")).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(ConfigError, match="pissa"):
        lorashard.load_adapter(tmp_path / "adapter", base=base)


def test_embedding_of_another_base_in_the_adapter_is_refused(tmp_path):
    """PEFT saves the embedding with an adapter that targets it: a resized or other one must not be dropped."""
    base = _save_base(tmp_path / "base")
    _train_a_little(base, tmp_path / "adapter", **KINDS["head"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    save_file(load_file(file) | {name: torch.zeros(VOCAB_SIZE, 32)}, file)
    with pytest.raises(CheckpointError, match="embed_tokens.base_layer.weight"):
        lorashard.load_adapter(tmp_path / "adapter", dtype=torch.float32)


@pytest.mark.parametrize("config_class", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_saved_prompt_gives_plain_pefts_logits(tmp_path, config_class):
    """PEFT restores a prompt by itself, after it has missed it; a prompt encoder is not in the file at all."""
    base = _save_base(tmp_path / "base")
    model = lorashard.load(base, config_class(num_virtual_tokens=3, task_type="CAUSAL_LM"), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    batch = make_batch(0)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    found = lorashard.load_adapter(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(found(**batch).logits, plain(**batch).logits)
    with pytest.raises(ConfigError, match="is_trainable"):
        lorashard.load_adapter(tmp_path / "adapter", is_trainable=True)


@pytest.mark.parametrize("fault", ["missing", "incomplete", "shape", "config", "pointer", "target", "kind"])
def test_broken_adapter_is_an_error_of_one_line(tmp_path, fault):
    """An adapter with missing tensors loads in plain PEFT, and answers as the base does."""
    base = _save_base(tmp_path / "base")
    _train_a_little(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    if fault == "missing":
        file.unlink()
    elif fault == "incomplete":
        del tensors[name]
        save_file(tensors, file)
    elif fault == "shape":
        save_file(tensors | {name: torch.zeros(2, 2)}, file)
    elif fault == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1")
    config_file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(config_file.read_text())
    changes = {"target": {"target_modules": ["query_key_value"]}, "kind": {"peft_type": "PROMPT_TUNING"}}
    if fault == "kind":
        config = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2, "base_model_name_or_path": str(base)}
    config_file.write_text("{" if fault == "config" else json.dumps(config | changes.get(fault, {})))
    with pytest.raises((CheckpointError, ConfigError)) as raised:
        lorashard.load_adapter(tmp_path / "adapter")
    assert "\n" not in str(raised.value)
    expected = "query_key_value" if fault == "target" else str(tmp_path / "adapter")
    assert expected in str(raised.value)


@pytest.mark.parametrize("name", ["/gone/base", "./models/gone", None])
def test_base_that_is_not_there_leads_to_the_option(tmp_path, name):
    """Catches an error about a path that the adapter's config holds and the person never gave."""
    _train_a_little(_save_base(tmp_path / "base"), tmp_path / "adapter")
    config_file = tmp_path / "adapter" / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"base_model_name_or_path": name}))
    with pytest.raises(ConfigError, match="--base"):
        lorashard.load_adapter(tmp_path / "adapter")
    lorashard.load_adapter(tmp_path / "adapter", base=str(tmp_path / "base"))


def test_a_memory_of_hashes_that_fails_costs_time_alone(tmp_path, own_cache, later, monkeypatch, caplog):
    """Catches an empty or unwritable cache that stops every command."""
    file = tmp_path / "file"
    file.write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    (own_cache / "lorashard").mkdir()
    (own_cache / "lorashard" / "hashes.json").write_text("")
    assert hash_file(file) == hash_file(file) == expected
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(file / "no folder"))
    with caplog.at_level(logging.WARNING):
        assert hash_file(file) == expected
    assert str(file / "no folder") in caplog.text


def test_run_that_was_killed_gives_its_last_checkpoint(tmp_path):
    """The adapter at the root appears at a run's end alone."""
    base = _save_base(tmp_path / "base")
    for step in (10, 5):
        expected = _train_a_little(base, tmp_path / "run" / f"checkpoint-{step}", r=step)
    assert not torch.equal(_logits(lorashard.load_adapter(tmp_path / "run", dtype=torch.float32)), expected)
    last = lorashard.load_adapter(tmp_path / "run", dtype=torch.float32)
    assert last.peft_config["default"].r == 10
    (tmp_path / "run" / "checkpoint-10" / "adapter_config.json").unlink()  # killed while it was written
    assert lorashard.load_adapter(tmp_path / "run").peft_config["default"].r == 5
