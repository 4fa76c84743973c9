"""Tiny checkpoints on disk, and their weights compared with what `from_pretrained` loads."""

import random

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lorashard.errors import CheckpointError
from lorashard.weights.safetensors_files import Checkpoint
from lorashard.weights.weights import BaseWeights


def save_model(folder, class_name, options, *, dtype=torch.bfloat16, auto=AutoModelForCausalLM, **save_options):
    """Save a tiny model in which no tensor is constant, and return its folder."""
    generator = torch.Generator().manual_seed(0)
    model = auto.from_config(getattr(transformers, f"{class_name}Config")(**options), dtype=dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder, **save_options)
    return folder


def rewrite(folder, change):
    """Change the stored tensors of a single-file checkpoint: `change` maps the old dict to the new one."""
    file = folder / "model.safetensors"
    tensors = {key: tensor.contiguous() for key, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def drop(part):
    """Return a change that loses the tensors whose keys hold `part`."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if part not in key}


def build_skeleton(folder, dtype, auto=AutoModelForCausalLM):
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.tie_weights()
    return model


def plan(folder, dtype=torch.bfloat16, auto=AutoModelForCausalLM, checkpoint=None, **options):
    return BaseWeights.plan(
        build_skeleton(folder, dtype, auto), checkpoint or Checkpoint.open(folder), dtype, **options
    )


def plan_error(folder, dtype=torch.bfloat16, **options):
    with pytest.raises(CheckpointError) as caught:
        plan(folder, dtype, **options)
    return str(caught.value)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_as_from_pretrained(folder, dtype, auto=AutoModelForCausalLM, **options):
    """Compare every parameter and persistent buffer, put together from random cuts, and return the weights."""
    reference = auto.from_pretrained(folder, dtype=dtype).state_dict(keep_vars=True)
    weights = plan(folder, dtype, auto, **options)
    assert set(weights.names) | set(weights.missing) == set(reference)
    chance = random.Random(0)
    for name, expected in reference.items():
        if name in weights.missing:
            continue
        assert weights.target_dtype(name) == expected.dtype, name
        assert weights.shape(name) == expected.shape, name
        num_bytes = weights.num_bytes(name)
        # Cuts need not fall between elements: a rank's slice is cut by bytes.
        cuts = sorted({0, num_bytes, *(chance.randint(0, num_bytes) for _ in range(4))})
        found = torch.full((num_bytes,), 0xAA, dtype=torch.uint8)
        for begin, end in zip(cuts, cuts[1:], strict=False):
            weights.read_range(name, begin, end, found[begin:end])
        assert torch.equal(found, as_bytes(expected.detach())), name
        assert torch.equal(as_bytes(weights.read(name)), found), name
    return weights
