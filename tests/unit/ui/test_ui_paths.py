"""What a browser may name: paths by whatever way, and code by whatever option."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lorashard.config.methods import METHODS
from lorashard.config.run_config import RunConfig, read_known_options
from lorashard.errors import ConfigError
from lorashard_ui.form import paths
from lorashard_ui.form.paths import Allowed

# Words for people and models, and patterns of modules' names: nothing opens a file by them.
FREE_TEXT = {"sample_prompts", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "unit_paths"}
FREE_TEXT |= {"optim_target_modules", "eos_token", "dataset_text_field", "run_name", "project"}


@pytest.fixture
def allowed(tmp_path, monkeypatch):
    """A server over `runs`, which was also given `data`; beside them lies what is nobody's business."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs", "data", "data-private", "cache/hub", "cache/datasets"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret.jsonl").write_text('{"text": "a secret"}\n')
    (tmp_path / "cache/token").write_text("hf_secret")
    (tmp_path / "data-private" / "rows.jsonl").write_text("{}\n")
    (tmp_path / "data" / "rows.jsonl").write_text("{}\n")
    monkeypatch.setattr(paths.constants, "HF_HUB_CACHE", str(tmp_path / "cache/hub"))
    monkeypatch.setattr(paths.constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    return Allowed(tmp_path / "runs", [tmp_path / "data"])


def test_paths_inside_and_hub_ids_pass(allowed, tmp_path):
    """Catches a check that refuses what people use: the given folders, relative paths, the caches, ids of the hub."""
    good = [
        "data",
        "data/rows.jsonl",
        "./data/rows.jsonl",
        str(tmp_path / "data" / "not-there-yet.jsonl"),
        str(tmp_path / "runs/first/checkpoint-3"),
        str(tmp_path / "cache/hub/models--org--name/snapshots/1"),
        "org/name",
        "gpt2",
        "org-1/Name.2_b",
    ]
    for path in good:
        allowed.check(path, "dataset")
        allowed.check_options({"model_name_or_path": path})


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "secret.jsonl",
        "data-private",
        "data-private/rows.jsonl",
        "data/../secret.jsonl",
        "runs/../data-private/rows.jsonl",
        "../x",
        "..",
        ".",
        "~",
        "~/.ssh/id_rsa",
        "~root/.ssh",
        "cache/token",
        "cache",
        "/proc/self/environ",
        "file:///etc/passwd",
        "https://host/rows.jsonl",
        "data/rows.jsonl\0.csv",
        "org/../../etc",
        "/",
    ],
)
def test_paths_outside_are_refused(allowed, path):
    """Catches a path that is compared as text, names that begin alike, a home, an address, the tokens."""
    for option in ("dataset", "eval_dataset", "model_name_or_path", "chat_template_path", "resume_from_checkpoint"):
        with pytest.raises(ConfigError, match=option):
            allowed.check_options({option: path})


def test_the_folder_of_the_start_is_read_but_for_what_is_hidden(tmp_path, monkeypatch):
    """Catches keys and tokens of a home that may be named as a dataset, also through a link; a file of the folder that
    an option writes; and all of a machine whose server was started in `/`."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs", "place/data/.keys", "place/.ssh", "else"):
        (tmp_path / name).mkdir(parents=True)
    os.symlink(tmp_path / "place/.ssh", tmp_path / "place" / "link")
    os.symlink(tmp_path / "else", tmp_path / "place" / "outside")
    started = Allowed(tmp_path / "runs", start=tmp_path / "place")
    for path in ("place", "place/data/rows.jsonl"):
        started.check_options({"dataset": path, "model_name_or_path": path})
    for path in ("place/.ssh/id_rsa", "place/data/.keys/a", "place/link/id_rsa", "place/outside/a", "place/../else/a"):
        with pytest.raises(ConfigError, match="nothing hidden"):
            started.check_options({"dataset": path})
    for option in ("logging_dir", "resume_from_checkpoint", "accelerator_config"):
        with pytest.raises(ConfigError, match=option):
            started.check_options({option: "./place/data"})
    with pytest.raises(ConfigError, match="dataset"):
        Allowed(tmp_path / "runs", start=Path("/")).check("/etc/passwd", "dataset")


def test_links_are_followed(allowed, tmp_path):
    """Catches a check of the link's own place: it may lead out, and one that leads in is fine."""
    os.symlink(tmp_path / "secret.jsonl", tmp_path / "data" / "link.jsonl")
    os.symlink(tmp_path / "data-private", tmp_path / "runs" / "linked")
    os.symlink(tmp_path / "data", tmp_path / "inward")
    for path in ("data/link.jsonl", "runs/linked/rows.jsonl"):
        with pytest.raises(ConfigError, match="--allow"):
            allowed.check(path, "dataset")
    allowed.check("inward/rows.jsonl", "dataset")


def test_a_home_is_not_a_folder_called_tilde(allowed, tmp_path, monkeypatch):
    """Catches a path that is checked as it is written and opened as it is meant."""
    monkeypatch.setenv("HOME", str(tmp_path / "data-private"))
    monkeypatch.chdir(tmp_path / "data")
    for path in ("~", "~/rows.jsonl"):
        with pytest.raises(ConfigError, match="--allow"):
            allowed.check(path, "dataset")


def test_nothing_tells_whether_a_file_is_there(allowed):
    """Catches an answer by which somebody finds out what lies on the machine."""
    said = []
    for path in ("/etc/passwd", "/etc/no-such-file"):
        with pytest.raises(ConfigError) as caught:
            allowed.check(path, "dataset")
        said.append(str(caught.value).replace(path, ""))
    assert said[0] == said[1]


def test_the_own_readers_of_the_datasets_library_are_refused(allowed):
    """Catches `dataset: text`, by which the library takes every file of the folder that the server stands in."""
    for name in ("text", "json", "csv", "pandas", "imagefolder"):
        with pytest.raises(ConfigError, match="datasets library"):
            allowed.check_options({"dataset": name})
    allowed.check_options({"model_name_or_path": "text"})


def test_a_run_is_only_in_the_folder_of_runs(allowed, tmp_path):
    """Catches an output folder in the data, in another run, or above."""
    allowed.check_options({"output_dir": str(tmp_path / "runs" / "new")})
    for path in (tmp_path / "data" / "new", tmp_path / "runs", tmp_path / "runs/a/b", "/tmp/new", "runs/../new"):
        with pytest.raises(ConfigError, match="output_dir"):
            allowed.check_options({"output_dir": str(path)})


def test_any_option_that_holds_a_path_is_checked(allowed):
    """Catches an option of TRL, or of a later version of it, that takes a file and is in nobody's list."""
    texts = {
        name
        for method in METHODS.values()
        for name, option in read_known_options(method).items()
        if "str" in option.kinds and not option.choices
    }
    assert len(texts - FREE_TEXT) > 50
    for name in texts - FREE_TEXT:
        for value in ("/etc/passwd", "~/x.json", "a/../../x"):
            with pytest.raises(ConfigError, match=name):
                allowed.check_options({name: value})
    allowed.check_options(dict.fromkeys(FREE_TEXT, "/etc/passwd"))
    for value in ({"a": ["/etc/passwd"]}, ["../x"], {"../x": 1}):
        with pytest.raises(ConfigError, match="lr_scheduler_kwargs"):
            allowed.check_options({"lr_scheduler_kwargs": value})
    with pytest.raises(ConfigError, match="accelerator_config"):
        allowed.check_options({"accelerator_config": "secret.jsonl"})


@pytest.mark.parametrize(
    "values",
    [
        {"trust_remote_code": True},
        {"reward_funcs": ["os.system"]},
        {"reward_funcs": ["think_format_reward", "my.reward"]},
        {"attn_implementation": "kernels-community/flash-attn"},
        {"attn_implementation": "paged|org/kernel"},
        {"attn_implementation": "org/kernel:function"},
        {"generation_kwargs": {"custom_generate": "org/code", "trust_remote_code": True}},
        {"chat_template_kwargs": {"deep": [{"trust_remote_code": 1}]}},
    ],
)
def test_code_of_others_needs_trust(allowed, values, tmp_path):
    """Catches a door by which a browser has this machine run code from the hub or from any importable module."""
    with pytest.raises(ConfigError, match="--trust_remote_code"):
        allowed.check_options(values)
    Allowed(tmp_path / "runs", [], trusts_code=True).check_options(values)


def test_the_defaults_and_usual_values_pass(allowed):
    """Catches a check that takes words for paths."""
    defaults = {name: field.default for name, field in RunConfig.model_fields.items()}
    allowed.check_options({name: value for name, value in defaults.items() if name != "output_dir"})
    allowed.check_options(
        {
            "reward_funcs": ["think_format_reward"],
            "attn_implementation": "flash_attention_2",
            "sample_prompts": ["/help me ~ ../ now", "https://a.b/c"],
            "lora_target_modules": r".*\.(q|k)_proj",
            "hub_model_id": "me/mine",
            "model_revision": "refs/pr/1",
            "resume_from_checkpoint": "auto",
            "report_to": ["tensorboard"],
        }
    )
