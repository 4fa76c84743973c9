"""Every command, snippet and path that the documents show, tried."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import warm
from helpers.paths import ROOT
from helpers.tiny import build_base
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lorashard.cli import app
from lorashard.config import use_options
from lorashard.config.run_config import RunConfig
from lorashard_ui.serving.options import UiOptions
from lorashard_ui.terminal.options import RunsOptions, WatchOptions

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
USE_OPTIONS = {
    "merge": use_options.MergeOptions,
    "verify": use_options.VerifyOptions,
    "chat": use_options.ChatOptions,
    "generate": use_options.GenerateOptions,
    "eval": use_options.EvalOptions,
    "doctor": use_options.DoctorOptions,
    "ui": UiOptions,
    "runs": RunsOptions,
    "watch": WatchOptions,
}
CPU_BUDGET_S = 150  # each recipe is planned, of which the model is traced twice
LAUNCHERS = ("torchrun", "accelerate")
# The others take seconds each: they are planned, or their table is computed.
QUICK_RECIPE, SLOW_RECORD = "llama-8b-2x24gb.yaml", "scaling-activations.json"


def list_blocks(language: str) -> list[tuple[str, str]]:
    """Return (document, text) of each code block of a language."""
    found = []
    for document in DOCUMENTS:
        blocks = re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)
        found += [(document.name, block) for block in blocks]
    return found


def list_recipes() -> list[Any]:
    found = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "# Hardware: " in path.read_text()]
    return [_leave_out(path, path.name != QUICK_RECIPE) for path in found]


def list_records() -> list[Any]:
    found = sorted((ROOT / "benchmarks/records").glob("*.json"))
    return [_leave_out(path, path.name == SLOW_RECORD) for path in found]


def _leave_out(path: Path, is_slow: bool) -> Any:
    return pytest.param(path, marks=[pytest.mark.slow] if is_slow else [], id=path.name)


def list_commands() -> list[str]:
    return [line for _, block in list_blocks("sh") for line in block.splitlines() if line and not line.startswith("#")]


@pytest.fixture
def run_benchmark(monkeypatch, capsys):
    """Run a script of benchmarks/ in this process, which has imported torch already; return what it prints."""

    def run(script: Path, *options: str) -> str:
        monkeypatch.syspath_prepend(str(script.parent))
        monkeypatch.setattr(sys, "argv", [str(script), *options])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out.strip()

    return run


def find_unknown_options(words: list[str], monkeypatch) -> list[str]:
    """Run the script `words[0]` until it has parsed its options; return what it does not know."""
    parse = argparse.ArgumentParser.parse_known_args

    class Parsed(Exception):
        """What comes after is not wanted."""

    def stop(self, *args, **kwargs):
        raise Parsed(parse(self, *args, **kwargs)[1])

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.syspath_prepend(Path(words[0]).parent)
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(words[0], run_name="__main__")
    return parsed.value.args[0]


@pytest.mark.parametrize("command", list_commands())
def test_a_command_in_the_documents_is_accepted(command, monkeypatch):
    """A renamed option makes the first thing that a person copies fail. That commands train is tested elsewhere."""
    monkeypatch.chdir(ROOT)
    words = [word for word in shlex.split(command) if not word.startswith("ACCELERATE_USE_CPU=")]
    if words[:3] == ["pip", "install", "-e"]:
        assert (ROOT / words[3].partition("[")[0] / "pyproject.toml").exists()
        return
    if words[0] in (*LAUNCHERS, "python") and "-m" not in words:
        script = next(index for index, word in enumerate(words) if word.endswith(".py"))
        assert find_unknown_options(words[script:], monkeypatch) == []
        return
    if words[0] in LAUNCHERS:
        assert words[words.index("-m") + 1] == "lorashard"
        words = words[words.index("-m") + 1 :]
    assert words[0] == "lorashard"
    name, *options = words[1:]
    assert name in {registered.name for registered in app.registered_commands}
    if name in USE_OPTIONS:
        USE_OPTIONS[name].read(options)
        return
    if name == "env":
        assert set(options) <= {"--json"}
        return
    if name == "plan":
        for option in ("--gpu_type", "--nodes"):  # the command's own
            if option in options:
                position = options.index(option)
                del options[position : position + 2]
    config = None
    if "--config" in options:
        position = options.index("--config")
        config = Path(options[position + 1])
        del options[position : position + 2]
    required = ("model_name_or_path",) if name == "plan" else ("model_name_or_path", "dataset")
    RunConfig.resolve(config, options, required=required)


def test_make_targets_in_the_documents_exist():
    """`make` with a target that is not there is the first thing that a person would see."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:^    |`)make ([a-z]+)", document.read_text(), re.MULTILINE))
        assert named <= targets, document.name


def test_files_in_the_documents_exist():
    """A tree that names files of last month sends the reader astray."""
    text = (ROOT / "README.md").read_text()
    tree = [re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if line.startswith("    ")]
    names = {word for part in tree for word in part.split() if word.endswith((".py", "/"))}
    assert "errors.py" in names and "engine/" in names
    for name in names:
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "lorashard", ROOT / "ui")), name
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (ROOT / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("record", list_records())
def test_the_tables_are_those_of_the_records(record, run_benchmark):
    """A figure in prose that no record holds is a claim."""
    table = run_benchmark(ROOT / "benchmarks" / f"{record.name.partition('-')[0]}.py", "--table", str(record))
    assert table and any(table in document.read_text() for document in DOCUMENTS)


@pytest.mark.parametrize("document, snippet", list_blocks("python"))
def test_a_snippet_in_the_documents_runs(document, snippet, tmp_path):
    """The script that a person copies trains, with a tiny model in the real one's place."""
    vocabulary = {"<pad>": 0, "</s>": 1, "one": 2, "two": 3, "three": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path / "meta-llama/Llama-3.1-8B")
    build_base(num_hidden_layers=2, vocab_size=5).save_pretrained(tmp_path / "meta-llama/Llama-3.1-8B")
    (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "one two three"}) + "\n") * 8)
    if not torch.cuda.is_available():
        snippet = snippet.replace("SFTConfig(", "SFTConfig(use_cpu=True, ")
    (tmp_path / "script.py").write_text(snippet)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    result = warm.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment | {"HF_HOME": str(tmp_path / "hf"), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_a_config_is_accepted(path):
    """A recipe with a key that nobody reads trains something else than it says."""
    config = RunConfig.resolve(path, ["--model", "m", "--dataset", "d", "--output_dir", "o"])
    assert config.model_name_or_path == "m"


@pytest.mark.parametrize("path", list_recipes())
def test_the_header_of_a_recipe_is_the_planners(path, monkeypatch):
    """A recipe whose figures are of last month's planner promises what does not fit."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from recipes import make_recipe

    assert make_recipe(path) == path.read_text(), "bring it up to date with `python benchmarks/recipes.py`"
