"""Broken and malicious files, through the functions that read them: each is told in one line, and none runs code."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny import add_lora, build_base
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lorashard
from lorashard.data.sources import open_source
from lorashard.data.tokenizer import load_tokenizer
from lorashard.errors import CheckpointError, ConfigError, DataError, UserError
from lorashard.model.saved import find_adapter
from lorashard.training.rewards import check_reward_model
from lorashard.training.trusted_files import check_checkpoint
from lorashard.weights.safetensors_files import Checkpoint

WEIGHTS = "adapter_model.safetensors"


class Malicious:
    """A pickle of it creates `mark` when it is loaded without care."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a whole model, its tokenizer, and an adapter that was trained on it."""
    folder = tmp_path_factory.mktemp("whole")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "a", "b"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "model")
    base = build_base(num_hidden_layers=2)
    base.save_pretrained(folder / "model")
    base.name_or_path = base.config.name_or_path = str(folder / "model")
    add_lora(base).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def model(whole, tmp_path):
    """A copy of the model, to be broken."""
    return Path(shutil.copytree(whole / "model", tmp_path / "model"))


@pytest.fixture
def adapter(whole, tmp_path):
    """A copy of the adapter, to be broken."""
    return Path(shutil.copytree(whole / "adapter", tmp_path / "adapter"))


def load(folder, **options):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return lorashard.load(str(folder), lora, placement="shard", dtype=torch.float32, **options)


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def read_error(function, *arguments, kind=UserError):
    with pytest.raises(kind) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message
    return message


def write_index(folder, name):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    keys = load_file(folder / "part.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, "part.safetensors") | {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../adapter/adapter_model.safetensors", "/etc/passwd", "..", "a/b", "", "x\0y"])
def test_an_index_names_files_beside_it_alone(model, name):
    """An edited index would have any file of the machine opened, and copied into a merged model."""
    write_index(model, name)
    message = read_error(Checkpoint.open, model, kind=CheckpointError)
    assert "model.safetensors.index.json" in message and repr(name) in message


def test_a_shard_of_another_model_is_told(model, whole, tmp_path):
    """A download that mixes two models would be loaded as one, of the wrong numbers' shapes at best."""
    write_index(model, "part.safetensors")
    build_base(num_hidden_layers=2, hidden_size=16).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", model / "part.safetensors")
    message = read_error(load, model)
    assert "LlamaForCausalLM" in message and "another shape" in message
    save_file({"strange.weight": torch.ones(2)}, model / "part.safetensors")
    assert "model.safetensors.index.json" in read_error(load, model)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a": {"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]}}',
        b'{"a\\n\\u001b[2J": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}',
    ],
)
def test_a_hostile_header_is_an_error_and_no_crash(model, header):
    """Brackets without end, a type that is a list, and a name that clears the terminal come from no writer."""
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "model.safetensors" in read_error(Checkpoint.open, model, kind=CheckpointError)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"model_type": "lla', "config.json: damaged"),
        (b"\xff\xfe\x00", "config.json: damaged"),
        ("[]", "config.json: damaged"),
        (None, "expected a config.json"),
        ({"model_type": None}, "config.json: describes no model"),
        ({"model_type": "nonsense"}, "model type `nonsense`"),
        ({"model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"model_type": "t5"}, "'t5'"),
        ({"hidden_size": "big"}, "'hidden_size'"),
        ({"hidden_size": 48}, "another shape"),
        ({"num_hidden_layers": 3}, "missing: model.layers.2"),
        ({"num_attention_heads": 0}, "config.json: describes no model"),
        ({"hidden_act": "nonsense"}, "a model that cannot be built"),
        ({"dtype": "nonsense"}, "config.json: describes no model"),
    ],
)
def test_a_damaged_or_foreign_config_is_told(model, content, said):
    """transformers answers with a traceback of its own validators, or a KeyError."""
    file = model / "config.json"
    if content is None:
        file.unlink()
    elif isinstance(content, dict):
        change(file, **content)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content)
    message = read_error(load, model)
    assert said in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]"])
def test_a_damaged_tokenizer_file_is_named(model, name, damage):
    """The libraries say 'Unterminated string' or a KeyError, of no file."""
    file = model / name
    file.write_text(damage(file.read_text()))
    message = read_error(load_tokenizer, str(model), kind=CheckpointError)
    assert str(file) in message and "damaged" in message


def test_damaged_files_beside_a_model_are_named(model, tmp_path):
    """The generation config is read last, and crashed after the base was planned; a .jinja in another encoding, too."""
    (model / "generation_config.json").write_text('{"max_new_tokens": -4}')
    assert "generation_config.json: damaged" in read_error(load, model, kind=CheckpointError)
    (tmp_path / "chat.jinja").write_bytes(b"\xff\xfe\x00")
    message = read_error(load_tokenizer, str(model), None, False, str(tmp_path / "chat.jinja"), kind=ConfigError)
    assert "chat.jinja" in message and "UTF-8" in message


def _cut(file):
    os.truncate(file, file.stat().st_size - 3)


def _tag(file, text):
    save_file(load_file(file), file, metadata={"lorashard.base": text})


ADAPTER_DAMAGES = {
    "cut": (lambda f: _cut(f / WEIGHTS), f"{WEIGHTS}: damaged"),
    "cut in the header": (lambda f: os.truncate(f / WEIGHTS, 50), f"{WEIGHTS}: damaged"),
    "empty": (lambda f: os.truncate(f / WEIGHTS, 0), f"{WEIGHTS}: damaged"),
    "base's hashes cut": (lambda f: _tag(f / WEIGHTS, '{"a'), f"{WEIGHTS}: damaged"),
    "base's hashes a list": (lambda f: _tag(f / WEIGHTS, "[1]"), f"{WEIGHTS}: damaged"),
    "base's hashes numbers": (lambda f: _tag(f / WEIGHTS, '{"a": 1}'), f"{WEIGHTS}: damaged"),
    "NaN": (
        lambda f: save_file({k: v * float("nan") for k, v in load_file(f / WEIGHTS).items()}, f / WEIGHTS),
        "NaN or infinity in base_model.model",
    ),
    "config cut": (lambda f: _cut(f / "adapter_config.json"), "adapter_config.json: damaged"),
    "config a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "adapter_config.json: damaged"),
    "kind": (
        lambda f: change(f / "adapter_config.json", peft_type="NONSENSE"),
        "adapter_config.json: it cannot be read",
    ),
    "base a number": (
        lambda f: change(f / "adapter_config.json", base_model_name_or_path=4),
        "base_model_name_or_path cannot be 4",
    ),
    "modules a number": (lambda f: change(f / "adapter_config.json", modules_to_save=4), "modules_to_save cannot be 4"),
    "ranks a number": (lambda f: change(f / "adapter_config.json", rank_pattern=4), "rank_pattern cannot be 4"),
    "targets no expression": (lambda f: change(f / "adapter_config.json", target_modules="((("), "PEFT cannot put"),
    "rank of another": (lambda f: change(f / "adapter_config.json", r=8), "does not fit its base"),
}


@pytest.mark.parametrize("damage", ADAPTER_DAMAGES)
def test_a_damaged_adapter_is_told_by_load_and_merge(adapter, tmp_path, damage):
    """Each was a traceback of PEFT, safetensors or json, or NaN in every weight of a merged model."""
    spoil, said = ADAPTER_DAMAGES[damage]
    spoil(adapter)
    assert said in read_error(lorashard.load_adapter, adapter)
    assert said in read_error(lorashard.merge, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}", b"\x1f\x8b\x08\x00" * 5], ids=lambda _: "damage"
)
def test_a_broken_row_is_a_bad_row(tmp_path, content):
    """A crash in place of a row that is counted and named: brackets, digits, and a gz under another name."""
    (tmp_path / "a.jsonl").write_bytes(content)
    [row] = open_source(str(tmp_path / "a.jsonl"), "train", None, None).read()
    assert row.value.reason == "broken JSON"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"text": "whole"}, {"text": "cu', "a.json, line 1"),
        ("a.json", b"[" * 100_000, "a.json: "),
        ("a.parquet", b"PAR1" + bytes(50), "a.parquet"),
        ("a.parquet", b"", "a.parquet"),
        ("train.jsonl.gz", b"\x1f\x8b\x08\x00", ".jsonl, .json"),
    ],
)
def test_a_broken_dataset_file_is_named(tmp_path, name, content, said):
    """A traceback of pyarrow or json."""
    (tmp_path / name).write_bytes(content)
    message = read_error(lambda: list(open_source(str(tmp_path / name), "train", None, None).read()), kind=DataError)
    assert re.search(said, message)


def write_checkpoint(adapter, **files):
    """Make of an adapter's folder what a trainer leaves: states that hold tensors and plain values."""
    (adapter / "trainer_state.json").write_text("{}")
    rng = {"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}
    for name, state in ({"optimizer.pt": {"state": {0: torch.ones(2)}}, "rng_state_1.pth": rng} | files).items():
        torch.save(state, adapter / name)
    return adapter


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_1.pth"])
@pytest.mark.parametrize("save", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))])
def test_a_checkpoint_with_a_pickle_that_runs_code_is_refused(adapter, tmp_path, name, save):
    """The pickle runs; or torch's page of advice on how to let it run reaches the person."""
    check_checkpoint(write_checkpoint(adapter))
    save(Malicious(tmp_path / "mark"), adapter / name)
    message = read_error(check_checkpoint, adapter, kind=CheckpointError)
    assert str(adapter / name) in message and "not loaded" in message and "weights_only" not in message
    assert not (tmp_path / "mark").exists()


def test_what_a_checkpoint_does_not_need_is_not_read(adapter, tmp_path):
    """Checkpoints of a bare Trainer hold training_args.bin, a pickle that nothing reads: it is no reason to refuse.

    A pickle that harms nobody would prove nothing.
    """
    write_checkpoint(adapter)
    (adapter / "training_args.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "mark")))
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "mark")))
    check_checkpoint(adapter)
    assert not (tmp_path / "mark").exists()
    pickle.loads((adapter / "training_args.bin").read_bytes())
    assert (tmp_path / "mark").exists()


def test_a_damaged_checkpoint_is_told_by_file(adapter):
    """The trainer reads these after the base is loaded, and its errors name no file."""
    write_checkpoint(adapter)
    (adapter / "trainer_state.json").write_text('{"a')
    assert "trainer_state.json: damaged" in read_error(check_checkpoint, adapter, kind=CheckpointError)
    write_checkpoint(adapter)
    _cut(adapter / "optimizer.pt")
    assert "optimizer.pt" in read_error(check_checkpoint, adapter, kind=CheckpointError)
    write_checkpoint(adapter)
    (adapter / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in read_error(check_checkpoint, adapter, kind=CheckpointError)
    (adapter / "pytorch_model.bin").unlink()
    (adapter / "ref").mkdir()
    (adapter / "ref" / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.bin" in read_error(check_checkpoint, adapter)


@pytest.mark.parametrize("save", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))])
def test_a_pickled_adapter_is_refused(adapter, tmp_path, save):
    """PEFT falls back to adapter_model.bin, and safetensors' reader is not asked what the file is."""
    (adapter / WEIGHTS).unlink()
    save(Malicious(tmp_path / "mark"), adapter / "adapter_model.bin")
    said = "adapter_model.bin is a pickle"
    assert said in read_error(lorashard.load_adapter, adapter, kind=CheckpointError)
    (adapter / "adapter_model.bin").rename(adapter / WEIGHTS)
    assert f"{WEIGHTS}: damaged" in read_error(lorashard.merge, adapter, tmp_path / "merged", kind=CheckpointError)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickled_base_and_a_pickled_reward_model_are_refused(model, tmp_path, name):
    """GRPO's trainer loads its reward model itself, and takes pickles."""
    (model / "model.safetensors").unlink()
    torch.save(Malicious(tmp_path / "mark"), model / name)
    said = "only pickled weights" if name == "pytorch_model.bin" else "model.safetensors: damaged"
    for function in (load, lambda folder: check_reward_model(str(folder))):
        message = read_error(function, model, kind=CheckpointError)
        assert said in message
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name", ["train.pkl", "train.pickle", "train.pth", "train.arrow", "load.py", "train.tar", "train.jsonl.gz"]
)
def test_a_dataset_folder_of_pickles_code_or_archives_is_refused(tmp_path, name):
    """The datasets library has readers for many kinds; ours are four, and none unpacks or runs anything."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Malicious(tmp_path / "mark")))
    message = read_error(open_source, str(folder), "train", None, None, kind=DataError)
    assert ("train.jsonl.gz" if name.endswith("gz") else ".jsonl, .json, .csv, .parquet") in message
    message = read_error(open_source, str(folder / name), "train", None, None, kind=DataError)
    assert ".jsonl, .json, .csv, .parquet" in message
    assert not (tmp_path / "mark").exists()


def write_code(folder, mark):
    """Give a model's folder code that creates `mark` when it is imported, under the classes that it might replace."""
    (folder / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class C(LlamaConfig): model_type = 'evil'\n"
        "class M(LlamaForCausalLM): config_class = C\n"
        "class T(PreTrainedTokenizerFast): pass\n"
    )
    auto_map = {
        "AutoConfig": "evil.C",
        "AutoModelForCausalLM": "evil.M",
        "AutoModelForSequenceClassification": "evil.M",
    }
    change(folder / "config.json", model_type="evil", auto_map=auto_map)
    change(folder / "tokenizer_config.json", tokenizer_class="T", auto_map={"AutoTokenizer": [None, "evil.T"]})


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(model, tmp_path, monkeypatch):
    """It runs unasked; or the person learns neither the option nor what would run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "mark"
    write_code(model, mark)
    for function in (load, lambda folder: load_tokenizer(str(folder)), lambda folder: check_reward_model(str(folder))):
        message = read_error(function, model, kind=CheckpointError)
        assert str(model / "evil.py") in message and "--trust_remote_code" in message
        assert not mark.exists()
    load_tokenizer(str(model), trust_remote_code=True)
    assert mark.exists()
    mark.unlink()
    change(model / "config.json", auto_map={"AutoConfig": "org/code--evil.C"})
    assert "org/code" in read_error(load, model, kind=CheckpointError)
    change(
        model / "config.json", model_type="llama", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    )
    load(model)  # transformers' own code, where it knows the type
    assert not mark.exists()


def test_a_link_out_of_a_folder_is_refused(model, adapter, tmp_path):
    """A downloaded folder whose tokenizer is a link to a private key would be copied beside the merged model."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (model / "chat_template.jinja").symlink_to(secret)
    said = f"chat_template.jinja -> {secret}"
    assert said in read_error(load, model, kind=CheckpointError)
    assert said in read_error(load_tokenizer, str(model), kind=CheckpointError)
    assert said in read_error(lorashard.merge, adapter, tmp_path / "merged", str(model), kind=CheckpointError)
    (model / "chat_template.jinja").rename(adapter / "chat_template.jinja")
    assert said in read_error(find_adapter, adapter, kind=CheckpointError)
    (adapter / "chat_template.jinja").unlink()
    (model / "additional_chat_templates").symlink_to(tmp_path)
    assert "additional_chat_templates/secret" in read_error(load, model, kind=CheckpointError)
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").symlink_to(secret)
    assert f"train.jsonl -> {secret}" in read_error(open_source, str(data), "train", None, None, kind=DataError)


def test_links_inside_and_those_of_the_hubs_cache_are_followed(model, tmp_path):
    """The hub's cache is made of links; so may be a folder that a person names."""
    repo = tmp_path / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(repo / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    (snapshot / "twin.txt").symlink_to("config.json")
    (tmp_path / "named").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "named"):
        load(folder)
        load_tokenizer(str(folder))


def test_an_address_is_refused_and_not_repeated():
    """The password in https://user:password@host would be in the log, in status.json and on the screen."""
    address = "https://user:hunter2@example.com/model"
    lora = LoraConfig(task_type="CAUSAL_LM")
    for function in (
        lambda: lorashard.load(address, lora, placement="shard"),
        lambda: load_tokenizer(address),
        lambda: open_source(address, "train", None, None),
        lambda: find_adapter(address),
    ):
        assert "hunter2" not in read_error(function)
