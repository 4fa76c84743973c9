"""`lorashard verify` as a person runs it: real processes, exit codes, lines, and each command of its document."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.finetune import LORASHARD
from helpers.finetune import run as run_command
from helpers.tiny import add_lora, build_base
from helpers.words import make_tokenizer
from transformers import AutoModelForCausalLM

from lorashard.cli import main

MODEL = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder as the document assumes it: a run with its dataset, the merged model, the base."""
    folder = tmp_path_factory.mktemp("task")
    build_base(num_hidden_layers=2).save_pretrained(folder / MODEL)
    model = add_lora(AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32))
    model.save_pretrained(folder / "runs/mine")
    model.merge_and_unload().save_pretrained(folder / "merged")
    make_tokenizer(["<pad>", "</s>", "one", "two", "three"]).save_pretrained(folder / "runs/mine")
    (folder / "rows.jsonl").write_text((json.dumps({"text": "one two three"}) + "\n") * 8)
    (folder / "runs/mine/config.yaml").write_text("dataset: rows.jsonl\n")
    return folder


def run(task: Path, *words: str) -> subprocess.CompletedProcess:
    return run_command([*LORASHARD, "verify", *words], task, folder=task)


@pytest.mark.slow
def test_a_good_adapter_and_a_good_engine_pass(task):
    """A verification that checks less than it lists, or that finds faults where there are none."""
    ranks = ["--cpu", "2", "--dtype", "float32"]
    for words in (["runs/mine", "--merged", "merged", *ranks], ["--model", MODEL, "--placement", "shard", *ranks[:2]]):
        result = run(task, *words)
        assert result.returncode == 0, result.stdout + result.stderr
        lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
        assert not any(text.startswith("WRONG") for text in lines.values())
        if "--model" in words:
            assert list(lines) == ["model", "sharded", "reference", "gradients"]
            assert "28 gradients of 2 layers" in lines["gradients"]
        else:
            checks = ["files", "learned", "keys", "base", "merged files", "rows", "logits", "merged logits"]
            assert list(lines) == checks
            assert lines["rows"].endswith("rows.jsonl")


def test_a_fault_is_reported_once_and_is_exit_code_1(task):
    """Scripts read the code and the JSON; people the last line."""
    ranks = ["--cpu", "2", "--dtype", "float32", "--placement", "shard"]
    result = run(task, "runs/mine", "--merged", MODEL, *ranks, "--json")
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
