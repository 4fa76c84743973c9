"""`lorashard verify` as a person runs it: real processes, exit codes, lines, and each command of its document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import warm
from helpers.tiny import add_lora, build_base
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lorashard.cli import main

LORASHARD = str(Path(sys.executable).with_name("lorashard"))
MODEL = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder as the document supposes it: a run with its dataset, the merged model, the base."""
    folder = tmp_path_factory.mktemp("task")
    build_base(num_hidden_layers=2).save_pretrained(folder / MODEL)
    model: PeftModel = add_lora(AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32))
    model.save_pretrained(folder / "runs/mine")
    model.merge_and_unload().save_pretrained(folder / "merged")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "one": 2, "two": 3, "three": 4}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "runs/mine")
    (folder / "rows.jsonl").write_text((json.dumps({"text": "one two three"}) + "\n") * 8)
    (folder / "runs/mine/config.yaml").write_text("dataset: rows.jsonl\n")
    return folder


def run(task: Path, command: list[str]) -> subprocess.CompletedProcess:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"HF_HOME": str(task / "hf")}
    return warm.run(command, cwd=task, env=env, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
def test_a_good_adapter_and_a_good_engine_are_said_to_be_good(task):
    """A verification that is content with less than it lists, or that finds faults where there are none."""
    ranks = ["--cpu", "2", "--dtype", "float32"]
    for words in (["runs/mine", "--merged", "merged", *ranks], ["--model", MODEL, "--placement", "shard", *ranks[:2]]):
        result = run(task, [LORASHARD, "verify", *words])
        assert result.returncode == 0, result.stdout + result.stderr
        lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
        assert not any(text.startswith("WRONG") for text in lines.values())
        if "--model" in words:
            assert list(lines) == ["model", "sharded", "reference", "gradients"]
            assert lines["gradients"].startswith("equal: 28 gradients of 2 layers")
        else:
            checks = ["files", "learned", "keys", "base", "merged files", "rows", "logits", "merged logits"]
            assert list(lines) == checks
            assert lines["rows"].endswith("rows.jsonl")


def test_a_fault_is_told_once_and_is_exit_code_1(task):
    """Scripts look at the code and the JSON; people at the last line."""
    command = ["verify", "runs/mine", "--merged", MODEL, "--cpu", "2", "--dtype", "float32", "--placement", "shard"]
    result = run(task, [LORASHARD, *command, "--json"])
    assert result.returncode == 1, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert not found["is_right"] and not found["checks"]["merged logits"]["is_right"]
    assert "merged logits: " in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "neither"),
        (["runs/mine", "--model", MODEL], "both"),
        (["--model", MODEL, "--merged", "merged"], "merged: "),
        (["nowhere"], "nowhere"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["runs/mine", "--mergd", "merged"], "did you mean 'merged'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(task, words, message, monkeypatch, capsys):
    """A fault that was found, and a command that could not look, must not have one exit code."""
    monkeypatch.chdir(task)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # and taken back: the command sets it
    assert main(["verify", *words, "--cpu", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lorashard: error: ") and message in lines[0]
