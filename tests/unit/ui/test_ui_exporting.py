"""What is asked of a merge, a verification or an upload, before a job starts."""

from __future__ import annotations

import shutil
import zipfile

import pytest

from lorashard.errors import ConfigError
from lorashard_ui.form import exporting
from lorashard_ui.running.packing import list_checkpoint_names, pack_adapter


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of runs with an adapter, on a machine where nobody is logged in to the hub."""
    monkeypatch.setattr(exporting, "get_token", lambda: None)
    (tmp_path / "first").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "first" / name).write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("field", "wrong", "place"),
    [
        ("out_name", "../outside", "out: "),
        ("out_name", "", "out: "),
        ("out_name", "full", "out: .*empty"),
        ("repo", "https://me:password@other.example/x", "repo: "),
        ("repo", "no name", "repo: "),
        ("repo", "me/model", "hf auth login"),
        ("device_words", ["--cpu", "0"], "cpu: "),
        ("name", "none", "none"),
        ("name", "../first", "name"),
    ],
)
def test_a_wrong_field_is_told_before_a_merge_starts(root, field, wrong, place):
    """Catches a job that starts to fail, a path that leads out of the folder of runs, and a password in an answer."""
    fields = {"name": "first", "out_name": "merged", "dtype": "auto", "device_words": ["--cpu", "1"], "repo": ""}
    assert exporting.check_merge(root, **fields, is_private=True).out == root / "merged"
    with pytest.raises(ConfigError, match=place) as refusal:
        exporting.check_merge(root, **fields | {field: wrong}, is_private=True)
    assert "password" not in str(refusal.value)


def test_a_checkpoint_is_used_in_place_of_the_last_adapter(root):
    """Catches the last adapter exported under the name of the checkpoint that was chosen, and a checkpoint that leads
    out of the run."""
    checkpoint = root / "first" / "checkpoint-20"
    shutil.copytree(root / "first", root / "elsewhere")
    shutil.copytree(root / "elsewhere", checkpoint)
    (checkpoint / "adapter_model.safetensors").write_text("of step 20")
    (root / "first" / "checkpoint-30").symlink_to(root / "elsewhere")
    (root / "first" / "checkpoint-40").mkdir()
    assert list_checkpoint_names(root / "first") == ["checkpoint-20"]
    fields = {"name": "first", "out_name": "out", "dtype": "auto", "device_words": ["--cpu", "1"], "repo": ""}
    asked = exporting.check_merge(root, **fields, is_private=True, checkpoint="checkpoint-20")
    assert asked.run_folder == checkpoint
    assert exporting.check_verify(root, "first", None, ["--cpu", "1"], "checkpoint-20")[0] == checkpoint
    zips = [pack_adapter(root / "first", root / "zips", name) for name in ("", "checkpoint-20")]
    assert [path.name for path in zips] == ["first-adapter.zip", "first-checkpoint-20-adapter.zip"]
    with zipfile.ZipFile(zips[1]) as packed:
        assert packed.read("first-checkpoint-20-adapter/adapter_model.safetensors") == b"of step 20"
    for wrong in ("checkpoint-30", "checkpoint-40", "../elsewhere", ".", "checkpoint-99"):
        with pytest.raises(ConfigError, match="checkpoint: "):
            exporting.check_merge(root, **fields, is_private=True, checkpoint=wrong)


def test_a_verification_is_of_the_merged_model_that_was_chosen(root):
    """Catches a verification of another folder, and one that a name leads out of the folder of runs."""
    _, words = exporting.check_verify(root, "first", "full", ["--cpu", "1"])
    assert words == ["--merged", f"{root}/full", "--cpu", "1"]
    with pytest.raises(ConfigError):
        exporting.check_verify(root, "first", "../full", ["--cpu", "1"])
