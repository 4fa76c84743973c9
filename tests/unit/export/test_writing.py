"""Safetensors files planned in advance and written in parts: the files that safetensors itself would write."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lorashard.errors import ConfigError
from lorashard.export.writing import TensorWriter, plan_files
from lorashard.weights.safetensors_files import Checkpoint


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "a": torch.randn(7, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(2, 2, 2, generator=generator),
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
    }


def on_meta(tensors):
    return {key: tensor.to("meta") for key, tensor in tensors.items()}


def test_one_file_equals_what_safetensors_writes(tmp_path):
    """A header that other readers refuse, a tensor that is not aligned to its items, an offset that is one off."""
    tensors = make_tensors()
    plan = plan_files(on_meta(tensors), "5GB")
    writer = TensorWriter(tmp_path, plan)
    writer.create()
    for key in reversed(tensors):
        writer.write(key, 0, tensors[key])
    writer.flush()
    save_file(tensors, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert plan.index is None and plan.total_bytes == (tmp_path / "expected").stat().st_size


def test_parts_are_cast_and_come_to_their_place(tmp_path):
    """A part written from element 0, in the wrong dtype, or as its memory lies rather than as its elements go."""
    tensors = make_tensors()
    writer = TensorWriter(tmp_path, plan_files(on_meta(tensors), "5GB"))
    writer.create()
    value = torch.arange(15.0).view(5, 3).T  # [3, 5], not contiguous
    writer.write("b", 0, value[:2])
    writer.write("b", 10, value[2:])
    with pytest.raises(ValueError, match="15"):
        writer.write("b", 11, value[2:])
    with Checkpoint.open(tmp_path) as checkpoint:
        raw = torch.empty(30, dtype=torch.uint8)
        checkpoint.read_bytes(checkpoint.tensors["b"], 0, 30, raw)
    assert torch.equal(raw.view(torch.bfloat16).view(3, 5), value.to(torch.bfloat16))


def test_several_files_are_split_named_and_indexed_as_transformers_does(tmp_path):
    """An index that transformers or a server reads differently; a shard over the limit."""
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(tmp_path, max_shard_size="9KB")
    plan = plan_files(on_meta(model.state_dict()), "9KB")
    assert plan.index == json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert plan.file_bytes == {file.name: file.stat().st_size for file in tmp_path.glob("*.safetensors")}
    assert len(plan.headers) > 2
    for name, header in plan.headers.items():
        assert (tmp_path / name).read_bytes().startswith(header)


def test_no_size_is_refused():
    """An error of the hub's client that names neither the option nor what it takes."""
    with pytest.raises(ConfigError) as error:
        plan_files(on_meta(make_tensors()), "much")
    assert (error.value.option, error.value.found) == ("max_shard_size", "'much'")
