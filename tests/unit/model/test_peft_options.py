"""PEFT's options of `finetune`, as they reach LoraConfig, and the ones that are refused before anything is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from helpers.tiny import build_base
from peft import LoraConfig

import lorashard
from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.model.loftq import make_lora

REQUIRED = ["--model", "m", "--dataset", "d", "--output_dir", "o"]


def read(*words: str, yaml: Path | None = None) -> RunConfig:
    return RunConfig.resolve(yaml, [*REQUIRED, *words])


def test_the_options_reach_peft(tmp_path):
    """An option that is accepted and read by nobody trains something else than was asked for."""
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        "lora_target_modules: [q_proj]\nlayers_to_transform: [2, 5]\nuse_rslora: true\n"
        "lora_target_parameters: [mlp.experts.down_proj]\ninit_lora_weights: orthogonal\nloraplus_lr_ratio: 16\n"
    )
    words = ["--lora_target_modules", "q_proj", "--layers_to_transform", "2,5", "--use_rslora", "--loraplus_lr_ratio"]
    words += ["16", "--target_parameters", "mlp.experts.down_proj,", "--init_lora_weights", "orthogonal"]
    for config in (read(yaml=yaml), read(*words)):
        lora = LoraConfig(**config.lora_options())
        assert (lora.target_modules, lora.layers_to_transform, lora.use_rslora) == ({"q_proj"}, [2, 5], True)
        assert (lora.target_parameters, lora.init_lora_weights) == (["mlp.experts.down_proj"], "orthogonal")
        assert config.loraplus_lr_ratio == 16.0
    loftq = read("--init_lora_weights", "loftq", "--load_in_4bit", "--lora_r", "8", "--lora_alpha", "8")
    assert make_lora(loftq.lora_options()).init_lora_weights == "loftq"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--init_lora_weights", "corda"], "rewrites the base"),
        (["--init_lora_weights", "pissa_niter_x"], "rewrites the base"),
        (["--init_lora_weights", "gausian"], "'gausian'"),
        (["--init_lora_weights", "loftq"], "none"),
        (["--init_lora_weights", "loftq", "--load_in_8bit"], "int8"),
        (["--init_lora_weights", "loftq", "--load_in_4bit"], "32"),
        (["--init_lora_weights", "loftq", "--load_in_4bit", "--use_dora"], "use_dora"),
        (["--quantization", "nf4", "--torch_compile"], "torch_compile"),
        (["--layers_to_transform", "3"], "lora_target_modules"),
        (["--loraplus_lr_ratio", "0.5"], "loraplus_lr_ratio"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words, part):
    """PEFT's own refusals come from each rank, after the data has been prepared."""
    with pytest.raises(ConfigError) as caught:
        read(*words)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "option", "words"),
    [
        ({"target_modules": ["q_proj", "v_prj"]}, "target_modules", ["'v_prj'", "'v_proj'"]),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_haed"]},
            "modules_to_save",
            ["'lm_haed'", "'lm_head'"],
        ),
        ({"target_modules": ["q_proj"], "target_parameters": ["experts.gate"]}, "target_parameters", ["experts.gate"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 99]}, "layers_to_transform", ["0 to 5", "99"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": -1}, "layers_to_transform", ["0 to 5", "-1"]),
    ],
)
def test_what_would_silently_not_be_trained_is_named(tmp_path, options, option, words):
    """PEFT adapts the rest; the run ends without an error, and half of it was never trained."""
    build_base().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        lorashard.load(str(tmp_path), LoraConfig(task_type="CAUSAL_LM", **options), "shard", dtype=torch.float32)
    assert caught.value.option == option and all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "package"),
    [("flash_attention_2", "flash_attn"), ("kernels-community/flash-attn3", "kernels"), ("fastest", None)],
)
def test_an_attention_that_is_not_available_is_refused_in_a_line(tmp_path, monkeypatch, name, package):
    """Catches a traceback from inside transformers in place of the package that is missing."""
    if package is not None and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    build_base().save_pretrained(tmp_path)
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError) as caught:
        lorashard.load(tmp_path, lora, "replicate", attn_implementation=name)
    assert caught.value.option == "attn_implementation" and name in caught.value.problem
    assert len(str(caught.value).splitlines()) == 1
