"""Files and headers: what a damaged or unsuitable checkpoint is told, and that reads touch only what was asked for."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

from lorashard.errors import CheckpointError
from lorashard.weights import hub as checkpoint_module
from lorashard.weights.hub import explain_hub_errors, resolve_folder
from lorashard.weights.safetensors_files import MAX_OPEN_FILES, Checkpoint


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5, generator=generator),
        "b.weight": torch.randn(33, generator=generator).to(torch.bfloat16),
        "c.steps": torch.arange(4),
        "d.mask": torch.tensor([True, False, True]),
        "e.scale": torch.tensor(2.5),
        "f.nothing": torch.empty(0, 4),
    }


def write_raw(file, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read(checkpoint, key, begin=0, end=None):
    stored = checkpoint.tensors[key]
    end = stored.num_bytes if end is None else end
    out = torch.empty(end - begin, dtype=torch.uint8)
    checkpoint.read_bytes(stored, begin, end, out)
    return out


def open_error(folder):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def count_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_every_tensor_is_read_as_it_was_saved(tmp_path):
    """A wrong offset, dtype or shape from the header."""
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(tensors)
        for key, tensor in tensors.items():
            stored = checkpoint.tensors[key]
            assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
            assert torch.equal(read(checkpoint, key).view(tensor.dtype).view(tensor.shape), tensor)


def test_a_range_reads_its_bytes_and_no_more(tmp_path):
    """Reading a whole tensor (or a file) for a slice of it: the counts would show it."""
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.bytes_read == 0
        with (tmp_path / "model.safetensors").open("rb") as stream:
            assert checkpoint.header_bytes == 8 + int.from_bytes(stream.read(8), "little")
        whole = tensors["b.weight"].view(torch.uint8)
        for begin, end in [(0, 66), (3, 17), (65, 66), (10, 10)]:
            before = checkpoint.bytes_read
            assert torch.equal(read(checkpoint, "b.weight", begin, end), whole[begin:end])
            assert checkpoint.bytes_read - before == end - begin


def test_reads_go_on_after_a_short_one(tmp_path, monkeypatch):
    """The kernel reads at most 2 GiB a call: the rest must not stay unread."""
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    whole_preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole_preadv(fd, [views[0][:10]], at))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(read(checkpoint, "a.weight").view(torch.float32).view(7, 5), tensors["a.weight"])
        assert checkpoint.bytes_read == 140


def test_reading_outside_a_tensor_is_refused(tmp_path):
    """A range past the end would silently read the next tensor's bytes; a wrong buffer, write elsewhere."""
    save_file(make_tensors(), tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        stored = checkpoint.tensors["a.weight"]
        with pytest.raises(ValueError, match="not inside a.weight"):
            checkpoint.read_bytes(stored, 0, stored.num_bytes + 4, torch.empty(stored.num_bytes + 4, dtype=torch.uint8))
        for out in (torch.empty(3, dtype=torch.uint8), torch.empty(4), torch.empty(8, dtype=torch.uint8)[::2]):
            with pytest.raises(ValueError, match="4 consecutive uint8"):
                checkpoint.read_bytes(stored, 0, 4, out)


def test_few_files_are_open_at_once_and_none_after_closing(tmp_path):
    """A descriptor for each of hundreds of weight files, or descriptors that leak."""
    weight_map = {}
    for i in range(12):
        save_file({f"t{i}": torch.full((3,), float(i))}, tmp_path / f"part-{i}.safetensors")
        weight_map[f"t{i}"] = f"part-{i}.safetensors"
    write_index(tmp_path, weight_map)
    before = count_descriptors()
    with Checkpoint.open(tmp_path) as checkpoint:
        for i in [*range(12), 0, 5, 5, 11]:
            assert read(checkpoint, f"t{i}").view(torch.float32).tolist() == [i] * 3
            assert count_descriptors() - before <= MAX_OPEN_FILES
    assert count_descriptors() == before


def test_a_file_that_shrinks_while_open_is_an_error(tmp_path):
    """The tail of the buffer would keep whatever it held before."""
    file = tmp_path / "model.safetensors"
    save_file(make_tensors(), file)
    with Checkpoint.open(tmp_path) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda stored: stored.begin_byte + stored.num_bytes)
        os.truncate(file, last.begin_byte + last.num_bytes - 1)
        with pytest.raises(CheckpointError, match=f"inside tensor {last.key}"):
            read(checkpoint, last.key)


def test_folders_without_safetensors_say_what_was_found(tmp_path):
    """The person must learn what lies there, and how a .bin checkpoint is converted."""
    assert "does not exist" in open_error(tmp_path / "nowhere")
    assert "empty folder" in open_error(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    message = open_error(tmp_path)
    assert "Expected model.safetensors or model.safetensors.index.json" in message and "config.json" in message
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = open_error(tmp_path)
    assert "only pickled weights (pytorch_model.bin)" in message
    assert f"A.from_pretrained('{tmp_path}', dtype='auto').save_pretrained('{tmp_path}-safetensors')" in message


def test_an_index_must_match_its_files(tmp_path):
    """A half-finished download, and an index from another checkpoint, are told before anything is read."""
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"})
    message = open_error(tmp_path)
    assert "index.json" in message and "three.safetensors, two.safetensors" in message
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    assert ": b (one.safetensors)" in open_error(tmp_path)
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors"})
    assert "a (two.safetensors), b (one.safetensors)" in open_error(tmp_path)
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert "one.safetensors and in two" in open_error(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "valid JSON" in open_error(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in open_error(tmp_path)


def test_tensors_that_an_index_forgets_belong_to_the_checkpoint(tmp_path):
    """transformers loads all that is in the files that an index names; to leave some out would be another model."""
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors"})
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b"}


def test_truncated_files_are_told_at_any_length(tmp_path):
    """A file cut in the tensors, in the header, or in the first 8 bytes would be read as noise, or crash."""
    file = tmp_path / "model.safetensors"
    save_file(make_tensors(), file)
    whole_bytes = file.stat().st_size
    os.truncate(file, whole_bytes - 1)
    message = open_error(tmp_path)
    assert "truncated" in message and f"byte {whole_bytes}, the file has {whole_bytes - 1}" in message
    os.truncate(file, 50)
    assert "truncated: its header" in open_error(tmp_path)
    os.truncate(file, 5)
    assert "does not begin" in open_error(tmp_path)


def test_files_that_are_no_safetensors_are_told(tmp_path):
    """A clone without Git LFS, or another format under this name."""
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "`git lfs pull`" in open_error(tmp_path)
    file.write_bytes(b"\x80\x02}q\x00(X\x01\x00\x00" * 10)
    assert "does not begin" in open_error(tmp_path)
    write_raw(file, b"{not json}")
    assert "The header of" in open_error(tmp_path) and "is damaged" in open_error(tmp_path)
    write_raw(file, b"\xff\xfe\x00\x01")
    assert "is damaged" in open_error(tmp_path)
    write_raw(file, [])
    assert "a JSON object" in open_error(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "data_offsets"),
        (7, "data_offsets"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "whole numbers"),
        ({"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}, "whole numbers"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, r"takes 8 bytes, its offsets \[8, 0\) say -8"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, r"takes 12 bytes, its offsets \[0, 8\) say 8"),
        ({"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}, "dtype F4"),
    ],
)
def test_a_damaged_header_entry_is_told_with_its_tensor(tmp_path, entry, message):
    """Each check on a tensor's entry: without it the numbers would be used as they are."""
    write_raw(tmp_path / "model.safetensors", {"x.weight": entry}, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert "x.weight" in str(caught.value) and "model.safetensors" in str(caught.value)


def test_tensors_must_follow_one_another(tmp_path):
    """Overlapping tensors, gaps and trailing bytes mean that the offsets cannot be trusted."""
    file = tmp_path / "model.safetensors"
    entry = {"dtype": "F32", "shape": [2]}
    write_raw(file, {"a": entry | {"data_offsets": [0, 8]}, "b": entry | {"data_offsets": [4, 12]}}, bytes(12))
    assert "tensor b" in open_error(tmp_path) and "overlaps with a" in open_error(tmp_path)
    write_raw(file, {"a": entry | {"data_offsets": [0, 8]}, "b": entry | {"data_offsets": [12, 20]}}, bytes(20))
    assert "gap after a" in open_error(tmp_path)
    write_raw(file, {"a": entry | {"data_offsets": [0, 8]}}, bytes(9))
    assert "end at byte 77" in open_error(tmp_path)
    write_raw(file, {"b": entry | {"data_offsets": [8, 16]}, "a": entry | {"data_offsets": [0, 8]}}, bytes(16))
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b"}


def test_a_single_file_wins_over_an_index(tmp_path):
    """transformers' own order: the other would load another model."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"b": "other.safetensors"})
    assert set(Checkpoint.open(tmp_path).tensors) == {"a"}


def test_local_folders_are_taken_as_they_are(tmp_path, monkeypatch):
    """A folder must never be looked up on the hub, nor its files copied."""
    assert resolve_folder(str(tmp_path)) == tmp_path
    assert resolve_folder(tmp_path, revision="main") == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").mkdir()
    assert resolve_folder("org/model").is_dir()


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "/nowhere", "./model", "../model", "~/no-such-model", "runs/a/b", "model/"]
)
def test_a_missing_folder_is_not_sought_on_the_hub(tmp_path, monkeypatch, name):
    """A mistyped path must not become 'repository not found'."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_folder(name)


def test_a_file_is_not_a_model_folder(tmp_path):
    """Somebody gives the weight file itself."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="found a file"):
        resolve_folder(tmp_path / "model.safetensors")


def test_hub_ids_that_cannot_be_had_say_so(tmp_path, monkeypatch):
    """Offline, or with a name that is no hub id, the person gets a sentence, not the hub client's traceback."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="'org/model' here, .*revision main"):
        resolve_folder("org/model", allow_download=False)
    with pytest.raises(CheckpointError, match="my model!"):
        resolve_folder("my model!")


@pytest.mark.parametrize(
    ("error_class", "message"),
    [
        (GatedRepoError, "gated.*https://huggingface.co/org/model"),
        (RepositoryNotFoundError, "no model org/model"),
        (RevisionNotFoundError, "no revision 'v1'"),
        (HfHubHTTPError, "org/model .revision v1. .*downloaded.* Try again"),
        (LocalEntryNotFoundError, ".offline, .* Check the path"),
        (OSError, "org/model .revision v1. .*: OSError. Try again"),
    ],
)
def test_the_hubs_refusals_become_one_sentence(tmp_path, monkeypatch, error_class, message):
    """Each refusal needs another action from the person; gated is a kind of not found and must be told first."""

    def refuse(*args, **kwargs):
        error = error_class.__new__(error_class)
        error.response = SimpleNamespace(status_code=500)
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint_module, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=message):
        resolve_folder("org/model", revision="v1")


def test_a_login_that_the_hub_does_not_accept_is_named(tmp_path, monkeypatch):
    """With an outdated token the hub refuses public models too: trying again does not help."""
    refusal = HfHubHTTPError.__new__(HfHubHTTPError)
    refusal.response = SimpleNamespace(status_code=401)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="log in with `hf auth login`"), explain_hub_errors("org/model", None):
        raise refusal


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_cache_without_the_weights_is_no_model(tmp_path, monkeypatch, is_offline):
    """Loading a tokenizer alone makes a snapshot folder, which is not the model."""
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(checkpoint_module, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setattr(checkpoint_module.constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(CheckpointError, match="org/model .*not whole"):
        resolve_folder("org/model", allow_download=is_offline)


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

    monkeypatch.setattr(checkpoint_module, "snapshot_download", record)
    assert resolve_folder("org/model", revision="v1") == folder
    assert [call[1] for call in calls] == ["v1", "0123"]
    assert not any("safetensors" in pattern or "bin" in pattern for pattern in calls[0][2])
    assert calls[1][2] == ["model.safetensors"]
    write_index(
        folder, {"a": "model-00001.safetensors", "b": "model-00002.safetensors", "c": "model-00001.safetensors"}
    )
    resolve_folder("org/model")
    assert calls[-1][2] == ["model-00001.safetensors", "model-00002.safetensors"]
