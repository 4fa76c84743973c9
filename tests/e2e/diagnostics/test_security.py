"""Secrets, malicious files and broken ones, as a user meets them: real commands, real processes, real files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.finetune import LORASHARD, make_options
from helpers.finetune import run as run_command
from safetensors.torch import load_file, save_file

SECRETS = {
    name: f"{prefix}RecognisableSecret{number:02}"
    for number, (name, prefix) in enumerate(
        {
            "HF_TOKEN": "hf_",
            "HUGGING_FACE_HUB_TOKEN": "hf_",
            "WANDB_API_KEY": "",
            "COMET_API_KEY": "",
            "MLFLOW_TRACKING_PASSWORD": "",
            "NEPTUNE_API_TOKEN": "",
            "CLEARML_API_SECRET_KEY": "",
            "OPENAI_API_KEY": "sk-",
            "AWS_SECRET_ACCESS_KEY": "",
            "HF_ENDPOINT_PASSWORD": "",
            "MY_PLAIN_VARIABLE": "",
        }.items()
    )
} | {"HTTPS_PROXY": "http://somebody:RecognisableSecret90@127.0.0.1:9"}
MARK = b"RecognisableSecret"


class Malicious:
    """Its pickle creates `mark` when it is loaded without `weights_only`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def run(task, *words, **environment) -> subprocess.CompletedProcess:
    return run_command([*LORASHARD, *map(str, words)], task, timeout_s=180, **environment)


def refuse(task, *words) -> str:
    """Run a command that must refuse something in one line; return the line."""
    result = run(task, *words)
    assert result.returncode == 2, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("lorashard: error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stdout + result.stderr, result.stdout + result.stderr
    return lines[0]


def find_secrets(result: subprocess.CompletedProcess, *folders: Path) -> list[str]:
    """Return where a secret is: in the output, or in a file, whatever its name and kind."""
    found = [f"output: {line}" for line in (result.stdout + result.stderr).splitlines() if MARK.decode() in line]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files or not folders
    return found + [str(path) for path in files if MARK in path.read_bytes()]


@pytest.fixture(scope="module")
def trained(task):
    """A run with secrets in its environment: what it printed, its folder and its checkpoints."""
    options = dict(cpu=1, max_steps=2, report_to="tensorboard", save_strategy="steps", save_steps=1, profile_steps="2")
    result = run(task, "finetune", *make_options(task, "trained", **options), **SECRETS)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_no_secret_of_the_environment_is_written_or_shown(task, trained):
    """A token in config.yaml, in TensorBoard's text, in a profile or a checkpoint is public with the run's folder."""
    assert list((task / "trained").rglob("events.out.tfevents*")) and (task / "trained" / "profile").is_dir()
    assert not find_secrets(trained, task / "trained", task / "hf")


def test_no_secret_is_shown_where_something_fails(task):
    """Bug reports and tracebacks are where tokens leak."""
    assert not find_secrets(run(task, "env", **SECRETS))
    assert not find_secrets(run(task, "env", "--json", **SECRETS))
    options = make_options(task, "failing", cpu=1)
    result = run(task, "validate", *options, **SECRETS)
    assert result.returncode == 0 and not find_secrets(result)
    (task / "broken.jsonl").write_text('{"question": "')
    result = run(task, "finetune", *make_options(task, "failing", cpu=1, dataset=task / "broken.jsonl"), **SECRETS)
    assert result.returncode == 2 and not find_secrets(result, task / "failing")
    crashing = Path(shutil.copytree(task / "model", task / "crashing"))
    (crashing / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig): model_type = 'crashing'\n"
        "class M(LlamaForCausalLM):\n"
        "    config_class = C\n"
        "    def forward(self, *args, **kwargs): raise RuntimeError('crashed on purpose')\n"
    )
    config = json.loads((crashing / "config.json").read_text())
    config |= {"model_type": "crashing", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (crashing / "config.json").write_text(json.dumps(config))
    options = make_options(task, "crashed", cpu=1, model=crashing, trust_remote_code=True)
    result = run(task, "finetune", *options, **SECRETS)
    assert result.returncode == 1 and "crashed on purpose" in result.stdout + result.stderr
    assert "Traceback" in (task / "crashed" / "logs" / "rank_0.log").read_text()
    assert not find_secrets(result, task / "crashed")


def test_a_broken_base_is_told_before_any_rank_starts(task, tmp_path):
    """A traceback from each rank instead of a line that names the file."""
    model = Path(shutil.copytree(task / "model", tmp_path / "model"))
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 5)
    line = refuse(task, "finetune", *make_options(task, "refused", cpu=2, model=model))
    assert str(model / "model.safetensors") in line
    assert not (task / "refused" / "logs" / "rank_0.log").exists()


def test_a_malicious_checkpoint_runs_nothing(task, trained, tmp_path):
    """Its pickle runs when the run is resumed; or the user reads torch's advice on how to allow that."""
    mark = tmp_path / "mark"
    checkpoint = Path(shutil.copytree(task / "trained" / "checkpoint-1", tmp_path / "checkpoint-1"))
    (checkpoint / "manifest.json").unlink()
    for name in ("training_args.bin", "adapter_model.bin"):  # which nothing reads
        (checkpoint / name).write_bytes(pickle.dumps(Malicious(mark)))
    options = dict(cpu=1, max_steps=2, resume_from_checkpoint=checkpoint)
    result = run(task, "finetune", *make_options(task, "resumed", **options))
    assert result.returncode == 0 and not mark.exists(), result.stdout + result.stderr
    torch.save(Malicious(mark), checkpoint / "optimizer.pt")
    line = refuse(task, "finetune", *make_options(task, "malicious", **options))
    assert str(checkpoint / "optimizer.pt") in line and "weights_only" not in line
    assert not mark.exists()


def test_a_malicious_adapter_runs_nothing_and_a_broken_one_is_told(task, trained, tmp_path):
    """The same for every command that takes an adapter."""
    mark = tmp_path / "mark"
    adapter = Path(shutil.copytree(task / "trained" / "checkpoint-2", tmp_path / "adapter"))
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    out = tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "what is"}\n')
    commands = {
        "merge": ("merge", adapter, out, "--cpu", 1),
        "chat": ("chat", adapter, "--cpu", 1),
        "generate": ("generate", adapter, "--prompts", prompts, "--out", out, "--cpu", 1),
    }
    for words in commands.values():
        assert str(weights) in refuse(task, *words)
    weights.unlink()
    torch.save(Malicious(mark), adapter / "adapter_model.bin")
    assert "adapter_model.bin" in refuse(task, *commands["merge"])
    assert not out.exists() and not mark.exists()


def test_a_base_that_changed_since_the_checkpoint_is_told(task, trained, tmp_path):
    """The same names, sizes and times, other values: the resumed run would continue another model's adapter."""
    model = Path(shutil.copytree(task / "model", tmp_path / "model"))
    weights = model / "model.safetensors"
    status = weights.stat()
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size
    checkpoint = task / "trained" / "checkpoint-1"
    options = dict(cpu=1, max_steps=2, model=model, resume_from_checkpoint=checkpoint)
    line = refuse(task, "finetune", *make_options(task, "changed", **options))
    assert "model.safetensors" in line


def test_code_of_a_model_is_named_and_not_run(task, tmp_path):
    """A model that comes with code runs it on every rank without consent."""
    mark = tmp_path / "mark"
    model = Path(shutil.copytree(task / "model", tmp_path / "model"))
    (model / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass T: pass\n")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "evil.T"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    line = refuse(task, "finetune", *make_options(task, "code", cpu=1, model=model))
    assert str(model / "evil.py") in line and "--trust_remote_code" in line
    assert not mark.exists()


def test_a_link_out_of_a_base_reaches_no_merged_model(task, trained, tmp_path):
    """The private file that the link points to would be published with the model."""
    model = Path(shutil.copytree(task / "model", tmp_path / "model"))
    (tmp_path / "id_rsa").write_text("private")
    (model / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    line = refuse(task, "merge", task / "trained", tmp_path / "merged", "--base", model, "--cpu", 1)
    assert "vocab.txt" in line and str(tmp_path / "id_rsa") in line
    assert not (tmp_path / "merged").exists()
