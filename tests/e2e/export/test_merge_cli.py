"""`lorashard merge` as a person runs it, and `lorashard.merge` beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import warm
from helpers.hub_server import HubServer
from helpers.merging import merge_with_peft
from helpers.tiny import add_lora, build_base, find_differences
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lorashard

LORASHARD = str(Path(sys.executable).with_name("lorashard"))


@pytest.fixture
def adapter(tmp_path) -> Path:
    """An adapter of plain PEFT on a tiny base."""
    build_base().save_pretrained(tmp_path / "base")
    model = add_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def run(*words: object, **environment: str) -> subprocess.CompletedProcess:
    command = [LORASHARD, "merge", *map(str, words)]
    start = subprocess.run if "HF_ENDPOINT" in environment else warm.run
    return start(command, env=os.environ | environment, capture_output=True, text=True, timeout=110)


def test_two_ranks_write_what_pefts_merge_gives(adapter, tmp_path):
    """Catches a command line that loses an option on the way to the ranks, or says nothing of what it wrote."""
    result = run(adapter, tmp_path / "out", "--cpu", 2, "--dtype", "bf16", "--max_shard_size", "60KB")
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "out") in result.stdout and "bfloat16" in result.stdout
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    expected = merge_with_peft(tmp_path / "base", adapter, torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert find_differences(found, expected) == []

    again = run(adapter, tmp_path / "out", "--cpu", 2)
    assert again.returncode == 2 and len(again.stderr.splitlines()) == 1 and str(tmp_path / "out") in again.stderr


def test_another_base_is_refused_unless_it_is_allowed(tmp_path, caplog):
    """Catches an adapter merged into weights that it was not trained on."""
    build_base().save_pretrained(tmp_path / "base")
    lora = add_lora(build_base()).peft_config["default"]
    model = lorashard.load(str(tmp_path / "base"), lora, "replicate", dtype=torch.float32)
    model.save_pretrained(str(tmp_path / "adapter"))
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    words = (tmp_path / "adapter", tmp_path / "out", "--cpu", 1, "--base", tmp_path / "other")
    refused = run(*words)
    assert refused.returncode == 2 and "another base" in refused.stderr and not (tmp_path / "out").exists()
    assert run(*words, "--allow_base_mismatch").returncode == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_merged_model_goes_to_the_hub(adapter, tmp_path):
    """Catches an upload that leaves files out, or that finds after the merge that nobody is logged in."""
    with HubServer({}, {}) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        words = ("--cpu", 1, "--push_to_hub", "me/merged")
        nobody = run(adapter, tmp_path / "nothing", *words, **environment, HF_TOKEN="")
        assert nobody.returncode == 2 and "log in" in nobody.stderr and not (tmp_path / "nothing").exists()
        assert hub.uploaded == {}
        result = run(adapter, tmp_path / "out", *words, **environment, HF_TOKEN="hf_secret")
        assert result.returncode == 0, result.stderr
        written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert written and hub.uploaded["me/merged"] == written
        assert "uploaded: " in result.stdout
