"""The line on a model in the form, `validate` and `doctor`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from lorashard.diagnostics.model_facts import describe_model

_WEIGHTS = {"w": torch.zeros(3, 1000, 1000, dtype=torch.bfloat16), "norm": torch.zeros(1000)}


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        ({"architectures": ["A"], "num_hidden_layers": 9}, _WEIGHTS, "A, 9 layers, 3.00 M parameters, bfloat16, "),
        ({"architectures": ["A"], "n_layer": 9, "text_config": {"num_hidden_layers": 7}}, _WEIGHTS, "A, 7 layers, "),
        ({"architectures": None, "text_config": "x"}, _WEIGHTS, "3.00 M parameters, bfloat16, 5.7 MiB in "),
        ({}, {"packed": torch.zeros(1 << 20, dtype=torch.uint8), "s": torch.zeros(2)}, "2 tensors, uint8, 1.0 MiB in "),
    ],
    ids=["plain", "of several parts", "unknown", "packed"],
)
def test_a_model_is_told_as_far_as_its_files_say(tmp_path, config, tensors, expected):
    """Catches "291 tensors", which tells nobody that the right model was chosen, and bytes counted as parameters."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    told = describe_model(str(tmp_path), None)
    assert told.startswith(expected) and told.endswith(f" in {tmp_path}")
