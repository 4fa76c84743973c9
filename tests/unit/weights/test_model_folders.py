"""Model folders: local ones are used as they are, hub models are downloaded by name, and refusals say what to do."""

import json
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lorashard.errors import CheckpointError
from lorashard.weights import hub
from lorashard.weights.hub import resolve_folder


def resolve_error(name, **options):
    with pytest.raises(CheckpointError) as caught:
        resolve_folder(name, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_local_folders_are_used_as_they_are(tmp_path, monkeypatch):
    """A folder must never be looked up on the hub, nor its files copied."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_folder(tmp_path, revision="main") == tmp_path
    assert resolve_folder("org/model").is_dir()


def test_what_cannot_be_a_hub_id_is_not_looked_up_there(tmp_path, monkeypatch):
    """A mistyped path must not become 'repository not found', nor the weight file itself; a URL may hold a password."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    for name in ("/no/such/folder", "./model", "../model", "~/no-such-model", "runs/a/b", "model/"):
        assert "does not exist" in resolve_error(name).problem
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "model.safetensors" in resolve_error(tmp_path / "model.safetensors").found
    assert "secret" not in str(resolve_error("https://user:secret@host/model"))


def test_hub_ids_that_are_not_available_say_so(tmp_path, monkeypatch):
    """Offline, or with a name that is no hub id, the user gets a sentence, not the hub client's traceback."""
    monkeypatch.chdir(tmp_path)
    assert "org/model" in resolve_error("org/model", allow_download=False).where
    assert "my model!" in resolve_error("my model!").found


def make_error(error_class, status_code=500):
    error = error_class.__new__(error_class)
    error.response = SimpleNamespace(status_code=status_code)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (make_error(GatedRepoError), "https://huggingface.co/org/model"),
        (make_error(RepositoryNotFoundError), "hf auth login"),
        (make_error(RevisionNotFoundError), "revision v1"),
        (make_error(HfHubHTTPError), "try again"),
        # With an outdated token the hub refuses public models too: trying again does not help.
        (make_error(HfHubHTTPError, 401), "hf auth login"),
        (make_error(LocalEntryNotFoundError), "check the path"),
        (OSError(), "OSError.*try again"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_refusal_of_the_hub_says_what_to_do(tmp_path, monkeypatch, error, message):
    """Each refusal needs another action; gated is a kind of not found and must be recognized first."""

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_folder("org/model", revision="v1")
    assert "org/model" in caught.value.where


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_cache_without_the_weights_is_no_model(tmp_path, monkeypatch, is_offline):
    """Loading a tokenizer alone makes a snapshot folder, which is not the model."""
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", is_offline)
    assert "incomplete" in resolve_error("org/model", allow_download=is_offline).problem


def test_hub_models_are_downloaded_by_the_names_in_their_index(tmp_path, monkeypatch):
    """Second copies of the weights (consolidated, .bin, .gguf, original/) must not be downloaded."""
    folder = tmp_path / "snapshots" / "0123"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "model-00001.safetensors", "model-00002.safetensors"):
        (folder / name).write_bytes(b"")
    calls = []

    def record(repo_id, *, revision, allow_patterns, ignore_patterns, local_files_only, tqdm_class):
        calls.append((repo_id, revision, allow_patterns, local_files_only))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", record)
    assert resolve_folder("org/model", revision="v1") == folder
    assert [call[1] for call in calls] == ["v1", "0123"]
    assert not any("safetensors" in pattern or "bin" in pattern for pattern in calls[0][2])
    assert calls[1][2] == ["model.safetensors"]
    names = {"a": "model-00001.safetensors", "b": "model-00002.safetensors", "c": "model-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    resolve_folder("org/model")
    assert calls[-1][2] == ["model-00001.safetensors", "model-00002.safetensors"]
