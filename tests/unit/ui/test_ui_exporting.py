"""What is asked of a merge, a verification or an upload, before a job starts."""

from __future__ import annotations

import pytest

from lorashard.errors import ConfigError
from lorashard_ui.form import exporting


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


def test_a_verification_is_of_the_merged_model_that_was_chosen(root):
    """Catches a verification of another folder, and one that a name leads out of the folder of runs."""
    _, words = exporting.check_verify(root, "first", "full", ["--cpu", "1"])
    assert words == ["--merged", f"{root}/full", "--cpu", "1"]
    with pytest.raises(ConfigError):
        exporting.check_verify(root, "first", "../full", ["--cpu", "1"])
