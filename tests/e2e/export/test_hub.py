"""Models and datasets from the hub: the real client over real HTTP, with a local stand-in at the other end."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import warm
from helpers.hub_server import HubRepo, HubServer
from helpers.tiny import build_base
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LORASHARD = str(Path(sys.executable).with_name("lorashard"))
WEIGHTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
# Other copies of the weights, as they lie beside the safetensors in repos of the hub, and what belongs to them.
COPIES = [
    "pytorch_model-00001-of-00001.bin",
    "consolidated.safetensors",
    "tiny.gguf",
    "gguf/tiny.gguf",
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "onnx/config.json",
]
SOURCES = dict(model_name_or_path="org/tiny", dataset="org/rows", eval_dataset="org/parquet", dtype="float32")
TRAINING = dict(per_device_train_batch_size=1, lora_r=4, save_strategy="no", placement="shard")
# Command lines one after another in one interpreter, whose imports take longer than they do.
SEVERAL_COMMANDS = """
import contextlib, io, json, sys
from lorashard.cli import main
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = main(words)
    print(json.dumps([code, stdout.getvalue(), stderr.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """The contents of repos: a tiny model in two weight files among other copies of them, and two datasets."""
    folder = tmp_path_factory.mktemp("repos")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "one": 2, "two": 3, "three": 4}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "tiny")
    # Each file is larger than the 100 kB that the hub's client reads to find a header.
    build_base(vocab_size=5, intermediate_size=256).save_pretrained(folder / "tiny", max_shard_size="400KB")
    shutil.copytree(folder / "tiny", folder / "pickled", ignore=shutil.ignore_patterns("model*"))
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"{}")
    for name in COPIES:
        (folder / "tiny" / name).parent.mkdir(exist_ok=True)
        (folder / "tiny" / name).write_text(json.dumps(name))  # each another, or the cache would hold one for all
    for split, word in (("train", "one"), ("test", "two")):
        rows = [{"text": f"{word} three " * count} for count in range(1, 9)]
        (folder / "rows").mkdir(exist_ok=True)
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "parquet" / "data").mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).to_parquet(folder / "parquet" / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def hub(folders) -> Iterator[HubServer]:
    """A hub with repos that can be had, and with others that cannot for one reason each."""
    tiny, rows, parquet = folders / "tiny", folders / "rows", folders / "parquet"
    server = HubServer(
        models={
            "org/tiny": HubRepo(tiny),
            "org/gated": HubRepo(tiny, is_gated=True),
            "org/cut": HubRepo(tiny, cut_at_byte={WEIGHTS[0]: 1000}),
            "org/pickled": HubRepo(folders / "pickled"),
        },
        datasets={
            "org/rows": HubRepo(rows),
            "org/parquet": HubRepo(parquet),
            "org/gated": HubRepo(rows, is_gated=True),
            "org/cut": HubRepo(rows, cut_at_byte={"train.jsonl": 100}),
        },
    )
    with server:
        yield server


def make_environment(hf_home: Path, **values: str) -> dict[str, str]:
    """Return the environment of a person who has set nothing for the hub but `values`."""
    unset = ("HF_", "TRANSFORMERS_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    defaults = {"HF_HOME": str(hf_home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    defaults["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return kept | defaults | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "localhost,127.0.0.1"} | values


def make_command(name: str, **options) -> list[str]:
    return [name, *(word for key, value in options.items() for word in (f"--{key}", str(value)))]


def run_commands(commands: list[list[str]], environment: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return each command's exit code, stdout and stderr."""
    result = warm.run(
        [sys.executable, "-c", SEVERAL_COMMANDS],
        input=json.dumps(commands),
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    return [tuple(json.loads(line)) for line in result.stdout.splitlines()]


def train(out: Path, environment: dict[str, str], **options) -> None:
    """Run `lorashard finetune` and look at the adapter that it leaves."""
    command = [LORASHARD, *make_command("finetune", output_dir=out, **options)]
    result = warm.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    adapter = load_file(out / "adapter_model.safetensors")
    assert all(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)


@pytest.fixture(scope="module")
def trained(hub, tmp_path_factory) -> tuple[dict[str, list], Path]:
    """What a hub has sent of each repo to two ranks that trained, and the caches that this left."""
    folder = tmp_path_factory.mktemp("trained")
    environment = make_environment(folder / "hf", HF_ENDPOINT=hub.endpoint)
    train(folder / "out", environment, **SOURCES, **TRAINING, cpu=2, max_steps=2)
    return {repo: list(hub.list_sent(repo)) for repo in hub.repos}, folder / "hf"


def test_a_hub_model_is_downloaded_once(folders, trained):
    """A download for each rank, or of every copy of the weights, takes hours where the model is large."""
    requests, _ = trained
    sent = {repo: Counter(request.path for request in found) for repo, found in requests.items()}
    expected = {path.name: 1 for path in (folders / "tiny").iterdir() if path.is_file() and path.name not in COPIES}
    assert sent["models/org/tiny"] == expected
    sent_bytes = sum(request.sent_bytes for request in requests["models/org/tiny"])
    assert sent_bytes == sum((folders / "tiny" / name).stat().st_size for name in expected)
    assert sent["datasets/org/rows"] == {"train.jsonl": 1, "test.jsonl": 1}
    assert sorted(sent["datasets/org/parquet"].values()) == [1, 1]


def test_what_was_downloaded_is_enough_offline(trained, tmp_path):
    """Nodes without a network train from a cache that another filled; rows of another revision must not slip in."""
    environment = os.environ | {"HF_HOME": str(trained[1])}
    train(tmp_path / "offline", environment, **SOURCES, **TRAINING, cpu=1, max_steps=1)
    command = make_command("validate", **SOURCES, cpu=1, output_dir=tmp_path / "out")
    known, unknown = run_commands([[*command, "--dataset_revision", name] for name in ("main", "v9")], environment)
    assert known[0] == 0 and f"in {trained[1]}" in known[1], known
    assert unknown[0] == 2 and "v9" in unknown[2], unknown


def test_validate_reads_headers_alone(folders, hub, tmp_path):
    """Downloading a large model in order to say that a run may start."""
    command = make_command("validate", **SOURCES, output_dir=tmp_path / "out", cpu=1)
    num_before = len(hub.list_sent("models/org/tiny"))
    environment = make_environment(tmp_path / "hf", HF_ENDPOINT=hub.endpoint)
    # The second finds the tokenizer and the index in the cache, but no weights.
    for code, stdout, stderr in run_commands([command, command], environment):
        assert code == 0, stderr
        assert " M parameters, float32, 0.6 MiB on the hub" in stdout and "eval_dataset: 8 rows" in stdout
    requests = hub.list_sent("models/org/tiny")[num_before:]
    sent = [request for request in requests if request.path in WEIGHTS]
    assert len(sent) == 8  # twice by each: for the model's size, and for its plan
    assert all(request.sent_bytes < (folders / "tiny" / request.path).stat().st_size for request in sent)
    assert not {request.path for request in requests} & set(COPIES)


def test_what_the_hub_does_not_give_is_said_in_a_line(folders, hub, tmp_path):
    """A traceback out of an HTTP client, or a refusal that leaves a person without anything to do."""
    model = dict(output_dir=tmp_path / "out", dataset=folders / "rows", cpu=1)
    model_cases = [
        (dict(model_name_or_path="org/gated"), "https://huggingface.co/org/gated"),
        (
            dict(model_name_or_path="org/nothing"),
            "org/nothing",
        ),
        (dict(model_name_or_path="org/tiny", model_revision="v9"), "revision v9"),
        (dict(model_name_or_path="org/cut"), "try again"),
        (dict(model_name_or_path="org/pickled"), "call save_pretrained"),
        (dict(model_name_or_path="./nothing"), "nothing"),
    ]
    data = dict(output_dir=tmp_path / "out", model_name_or_path=folders / "tiny")
    data_cases = [
        (dict(dataset="org/gated"), "https://huggingface.co/datasets/org/gated"),
        (dict(dataset="org/nothing"), "org/nothing"),
        (dict(dataset="org/rows", dataset_revision="v9"), "Revision 'v9'"),
        (dict(dataset="org/cut"), "try again"),
    ]
    cases = [
        (make_command(name, **model, **options), message)
        for name in ("finetune", "validate")
        for options, message in model_cases
    ]
    cases += [(make_command("preview", **data, **options), message) for options, message in data_cases]
    environment = make_environment(tmp_path / "hf", HF_ENDPOINT=hub.endpoint)
    results = run_commands([command for command, _ in cases], environment)
    for (command, message), (code, _, stderr) in zip(cases, results, strict=True):
        lines = stderr.splitlines()
        assert code == 2 and len(lines) == 1 and message in lines[0], (command, code, stderr)
        assert lines[0].startswith("lorashard: error: ")
