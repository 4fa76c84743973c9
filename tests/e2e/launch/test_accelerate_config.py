"""`accelerate config` as a person answers it, and `accelerate launch` with what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import cluster
from accelerate.commands.menu import BulletMenu
from helpers import warm
from helpers.bases import write_small_base
from helpers.forked_ranks import run_ranks
from helpers.paths import ROOT
from helpers.tiny import build_base
from peft import LoraConfig
from torch.distributed.fsdp import fully_shard

import lorashard
from lorashard.errors import ShardError

CONFIG = ROOT / "examples/accelerate_config.yaml"
DEMO = ROOT / "examples/demo"
TWO_GPUS = {"type of machine": "multi-GPU", "How many GPU": 2}
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]


def answer(monkeypatch, path: Path, **answers: object) -> None:
    """Answer accelerate's questions, each by a word of it, with yes, a choice or a number; the others by default."""

    def find(text: str, default: object) -> str:
        return str(next((value for words, value in answers.items() if words in text), default))

    def choose(menu: BulletMenu, default_choice: int = 0) -> int:
        choices = [str(choice).lower() for choice in menu.choices]
        return choices.index(find(menu.prompt, choices[default_choice]).lower())

    monkeypatch.setattr(BulletMenu, "run", choose)
    monkeypatch.setattr("builtins.input", lambda prompt: find(prompt, ""))
    cluster.get_cluster_input().to_yaml_file(path)


def make_words(out: Path, **options: object) -> list[str]:
    values = {
        "model": write_small_base(out / "base"),
        "dataset": DEMO / "train.jsonl",
        "output_dir": out,
        "placement": "shard",
    }
    return [word for key, value in (values | options).items() for word in (f"--{key}", str(value))]


def launch(config: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"ACCELERATE_USE_CPU": "true"} | environment
    return warm.run(
        [*LAUNCH, "--config_file", str(config), *command], env=env, capture_output=True, text=True, timeout=280
    )


def test_the_answers_in_the_documents_give_the_example(monkeypatch, tmp_path):
    """Catches a file in examples/ that accelerate's own questions would no longer write."""
    answer(monkeypatch, tmp_path / "config.yaml", **TWO_GPUS)
    committed, written = (yaml.safe_load(path.read_text()) for path in (CONFIG, tmp_path / "config.yaml"))
    assert {key: written.get(key) for key in committed} == committed


@pytest.mark.slow
def test_the_example_config_trains_on_all_ranks(tmp_path):
    """Catches ranks that train alone, each on the whole data, under the setting that the documents call right."""
    result = launch(CONFIG, "-m", "lorashard", "finetune", *make_words(tmp_path, max_steps=2))
    assert result.returncode == 0, result.stdout + result.stderr
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["phase"], status["world_size"]) == ("done", 2)


@pytest.mark.parametrize(
    "answers, message",
    [
        ({"use FullyShardedDataParallel": "yes"}, "FSDP (ACCELERATE_USE_FSDP=true)"),
        pytest.param(
            {"use Megatron-LM": "yes"}, "Megatron-LM (ACCELERATE_USE_MEGATRON_LM=true)", marks=pytest.mark.slow
        ),
        pytest.param(
            {"torch dynamo": "yes"},
            "ACCELERATE_DYNAMO_BACKEND: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_another_config_is_refused(monkeypatch, tmp_path, answers, message):
    """Catches a base that is sharded twice or compiled with its hooks, and an answer that only a traceback gives."""
    answer(monkeypatch, tmp_path / "config.yaml", **answers, **TWO_GPUS)
    result = launch(tmp_path / "config.yaml", "-m", "lorashard", "finetune", *make_words(tmp_path))
    # Rank 0 says it too, unless the launcher ends it first because another rank has failed.
    assert result.returncode == 1 and "ConfigError: " in result.stderr, result.stderr
    assert message in result.stderr and "exitcode  : 2" in result.stderr


SCRIPT = """
import lorashard
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig
Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
lorashard.load("nowhere", LoraConfig())
"""


@pytest.mark.slow
def test_a_plugin_in_a_script_is_refused(tmp_path):
    """Catches a plugin that no variable of the launcher told of."""
    (tmp_path / "script.py").write_text(SCRIPT)
    result = launch(CONFIG, str(tmp_path / "script.py"), "--num_processes", "1")
    assert "FSDP (ACCELERATE_USE_FSDP=true)" in result.stderr


def wrap(rank: int, folder: str) -> str:
    model = lorashard.load(folder, LoraConfig(target_modules=["q_proj"]), placement="shard")
    with pytest.raises(ShardError) as caught:
        fully_shard(model.get_base_model().model.layers[0])
    return str(caught.value)


def test_fsdp_that_comes_later_fails_at_once(tmp_path):
    """Catches a model that is wrapped all the same, which a trainer's own `fsdp` does after it was loaded."""
    build_base().save_pretrained(tmp_path)
    for message in run_ranks(wrap, 2, str(tmp_path)):
        assert "'model.layers.0.self_attn.q_proj.weight'" in message and "sharded" in message
