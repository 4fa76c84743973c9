"""An attention that cannot be had is refused; that the one that is named computes, the exactness ladder shows."""

from __future__ import annotations

import importlib.util

import pytest
from helpers.tiny import build_base
from peft import LoraConfig

import lorashard
from lorashard.errors import ConfigError

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("name", "package"),
    [("flash_attention_2", "flash_attn"), ("kernels-community/flash-attn3", "kernels"), ("fastest", None)],
)
def test_an_attention_that_cannot_be_had_is_refused_in_a_line(tmp_path, monkeypatch, name, package):
    """Catches a traceback from deep inside of transformers in place of the package that is missing."""
    if package is not None and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    build_base().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        lorashard.load(tmp_path, LoraConfig(**LORA), "replicate", attn_implementation=name)
    assert str(caught.value).startswith(f"attn_implementation: {name}: ")
    assert len(str(caught.value).splitlines()) == 1
