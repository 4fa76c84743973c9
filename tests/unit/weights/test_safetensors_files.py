"""Safetensors files: damaged or unsuitable ones are refused by name, and reads touch only the bytes asked for."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from lorashard.errors import CheckpointError
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
    return caught.value


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


def test_a_short_read_is_continued(tmp_path, monkeypatch):
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
        with pytest.raises(CheckpointError, match=last.key) as caught:
            read(checkpoint, last.key)
        assert caught.value.where == file


def test_folders_without_safetensors_say_what_was_found(tmp_path):
    """The user must learn what is there, and how a .bin checkpoint is converted."""
    assert open_error(tmp_path / "nowhere").where == tmp_path / "nowhere"
    assert open_error(tmp_path).found == "an empty folder"
    (tmp_path / "config.json").write_text("{}")
    error = open_error(tmp_path)
    assert "model.safetensors" in error.expected and error.found == "config.json"
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    error = open_error(tmp_path)
    assert "pytorch_model.bin" in error.found
    assert f"A.from_pretrained('{tmp_path}', dtype='auto').save_pretrained('{tmp_path}-safetensors')" in error.fix


def test_an_index_must_match_its_files(tmp_path):
    """A half-finished download, and an index from another checkpoint, must be found before anything is read."""
    index = tmp_path / "model.safetensors.index.json"

    def check(weight_map, *names):
        write_index(tmp_path, weight_map)
        error = open_error(tmp_path)
        assert error.where == index and all(name in error.problem for name in names), error

    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    check(
        {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}, "three.safetensors, two.safetensors"
    )
    check({"a": "one.safetensors", "b": "one.safetensors"}, ": b (one.safetensors)")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    check({"a": "two.safetensors", "b": "one.safetensors"}, "a (two.safetensors), b (one.safetensors)")
    check({}, "weight_map")
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    error = open_error(tmp_path)
    assert error.where == tmp_path and "one.safetensors and in two.safetensors" in error.problem
    index.write_text("{")
    assert open_error(tmp_path).where == index


def test_tensors_that_an_index_forgets_belong_to_the_checkpoint(tmp_path):
    """transformers loads everything in the files that an index names; leaving some out would be another model."""
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors"})
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b"}


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        (b"{not json}", 0),
        (b"\xff\xfe\x00\x01", 0),
        ([], 0),
        ({"a": 7}, 0),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": ENTRY | {"shape": [3]}}, 8),
        ({"a": ENTRY}, 7),  # truncated
        ({"a": ENTRY}, 9),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, 12),  # an overlap
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, 20),  # a gap
        ({"a": ENTRY | {"dtype": "F4", "shape": [16]}}, 8),  # of the format, but of no dtype that torch has
        ({"a\n": ENTRY}, 8),
    ],
)
def test_a_damaged_file_is_named(tmp_path, header, data_bytes):
    """Offsets that are used although they cannot be trusted, and a file cut short, would be read as noise."""
    file = tmp_path / "model.safetensors"
    write_raw(file, header, bytes(data_bytes))
    error = open_error(tmp_path)
    assert error.where == file and error.fix and "\n" not in str(error)


def test_files_that_are_no_safetensors_are_named(tmp_path):
    """A clone without Git LFS, another format under this name, or a file cut within its first bytes."""
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in open_error(tmp_path).fix
    for content in (b"\x80\x02}q\x00(X\x01\x00\x00" * 10, b"12345", (100).to_bytes(8, "little") + b"{}", b""):
        file.write_bytes(content)
        assert open_error(tmp_path).where == file


def test_tensors_may_be_in_any_order(tmp_path):
    """A header need not list tensors in the order of their bytes."""
    header = {"b": ENTRY | {"data_offsets": [8, 16]}, "a": ENTRY}
    write_raw(tmp_path / "model.safetensors", header, bytes(8) + b"\1" * 8)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert read(checkpoint, "b").tolist() == [1] * 8 and read(checkpoint, "a").tolist() == [0] * 8


def test_a_single_file_wins_over_an_index(tmp_path):
    """transformers' own order: the other would load another model."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"b": "other.safetensors"})
    assert set(Checkpoint.open(tmp_path).tensors) == {"a"}
