"""Checkpoints are whole or not there: whatever is broken in one, and wherever the process that writes it is killed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from lorashard.errors import CheckpointError
from lorashard.runs.checkpoints import (
    MANIFEST_NAME,
    clear_leftovers,
    find_newest,
    list_checkpoints,
    place_partial,
    publish,
    read_manifest,
    read_step,
    rotate,
    set_aside,
    verify,
)

FACTS = {"world_size": 2, "lora": {"r": 16, "target_modules": ["q_proj"]}}
CALLS = ("rename", "fsync", "unlink", "rmdir")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch) -> None:
    """Nothing here ends with the machine, so nothing need wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the code under test may catch it."""


def write_parts(checkpoint: Path, content: str = "") -> None:
    folder = place_partial(checkpoint)
    (folder / "ref").mkdir(parents=True)
    for name in ("adapter_model.safetensors", "optimizer.pt", "ref/adapter_model.safetensors"):
        (folder / name).write_text(f"{name} of {content or checkpoint.name}\n" * 50)


def save(run: Path, step: int) -> Path:
    checkpoint = run / f"checkpoint-{step}"
    write_parts(checkpoint)
    publish(checkpoint, FACTS)
    return checkpoint


def get_names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_a_published_checkpoint_is_what_was_written(tmp_path):
    """Facts that come back changed refuse a run that is the same; a file left out of the list is never looked at.

    A person's notes in a checkpoint are no reason to lose it.
    """
    checkpoint = save(tmp_path, 6)
    found = verify(checkpoint)
    assert (found.step, found.facts) == (6, FACTS)
    assert sorted(found.files) == ["adapter_model.safetensors", "optimizer.pt", "ref/adapter_model.safetensors"]
    (checkpoint / "notes.txt").write_text("the good one")
    assert verify(checkpoint).step == 6
    assert get_names(tmp_path) == ["checkpoint-6"] and find_newest(tmp_path) == checkpoint


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "ref/adapter_model.safetensors"])
def test_a_damaged_file_is_found_and_named(tmp_path, name):
    """A damaged optimizer that is loaded gives a run that looks healthy and learns something else."""
    path = save(tmp_path, 6) / name
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"\n", b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}.*expected {len(content)} bytes"):
            read_manifest(path.parent if "/" not in name else path.parent.parent)
    path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    assert find_newest(tmp_path) is not None, "the sizes alone do not tell"
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: damaged.*SHA-256"):
        verify(tmp_path / "checkpoint-6")
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}.*no file"):
        verify(tmp_path / "checkpoint-6")
    assert find_newest(tmp_path) is None


def test_a_damaged_manifest_is_never_believed(tmp_path):
    """One flipped bit in the facts would let a run go on with another batch, or refuse it for no reason."""
    path = save(tmp_path, 6) / MANIFEST_NAME
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: damaged"):
            read_manifest(path.parent)
    for damaged in (content[:-1], content[: len(content) // 2], b"", b"[]", b"null", b'{"format": 2}', b"\xff\xfe"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: damaged"):
            read_manifest(path.parent)
    path.unlink()
    with pytest.raises(CheckpointError, match="no manifest.json"):
        read_manifest(path.parent)


def test_only_a_checkpoint_s_own_name_counts_and_steps_are_numbers(tmp_path):
    """Sorted as words, checkpoint-9 is newer than checkpoint-10."""
    for step in (9, 10, 100):
        save(tmp_path, step)
    for name in ("checkpoint-foo", "checkpoint-", "checkpoint-7.old", "my-checkpoint-200", "checkpoint-0300"):
        shutil.copytree(tmp_path / "checkpoint-100", tmp_path / name)
    (tmp_path / "checkpoint-400").write_text("a file")
    write_parts(tmp_path / "checkpoint-500")
    set_aside(save(tmp_path, 600))
    assert [read_step(path) for path in list_checkpoints(tmp_path)] == [100, 10, 9]
    assert list_checkpoints(tmp_path / "nowhere") == [] and find_newest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "limit, best, left",
    [
        (None, None, [2, 4, 9, 10, 12]),
        (3, None, [9, 10, 12]),
        (2, None, [10, 12]),
        (1, None, [12]),
        (1, 4, [4, 12]),
        (2, 4, [4, 12]),
        (3, 4, [4, 10, 12]),
        (1, 12, [12]),
        (2, 77, [10, 12]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path, limit, best, left):
    """The best one deleted is found out at the end of the training; the newest one, after a kill."""
    for step in (2, 4, 9, 10, 12):
        published = save(tmp_path, step)
    rotate(published, limit, best and f"elsewhere/checkpoint-{best}")
    assert sorted(map(read_step, list_checkpoints(tmp_path))) == left
    assert len(get_names(tmp_path)) == len(left)


def test_rotation_keeps_the_published_one_beside_another_run_s(tmp_path):
    """A folder that another run has left checkpoints of later steps in: the one just written would go first."""
    save(tmp_path, 1000)
    rotate(save(tmp_path, 2), 1, None)
    assert get_names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("steps", [(2, 4, 6, 8), (2, 4, 6, 6)])
def test_a_kill_anywhere_leaves_a_complete_checkpoint(tmp_path, monkeypatch, limit, steps):
    """A checkpoint that has its name before its content, or one deleted in place: both are found after a kill.

    The process ends at each call that changes the disk, one after the other. The checkpoint before is there until the
    new one is; what is there is what was saved.
    """
    real = {name: getattr(os, name) for name in CALLS}
    *before, last = steps
    for kill_at in itertools.count():
        run = tmp_path / str(kill_at)
        run.mkdir()
        for step in before:
            rotate(save(run, step), limit, None)
        expected = {read_step(path): (path / "optimizer.pt").read_text() for path in list_checkpoints(run)}
        newest = run / f"checkpoint-{last}"
        write_parts(newest, "the last")
        expected_last = (place_partial(newest) / "optimizer.pt").read_text()
        calls = itertools.count()

        def die(name: str, *args, calls=calls, kill_at=kill_at, **kwargs):
            if next(calls) == kill_at:
                raise Killed
            return real[name](*args, **kwargs)

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, lambda *args, name=name, **kwargs: die(name, *args, **kwargs))
            try:
                publish(newest, FACTS)
                rotate(newest, limit, None)
                is_killed = False
            except Killed:
                is_killed = True

        found = find_newest(run)
        if found is None:  # the same step's was put aside a moment before
            assert last == before[-1] and limit == 1
            found = run / f"set-aside-checkpoint-{last}"
        verify(found)
        content = (found / "optimizer.pt").read_text()
        assert content == expected_last or content == expected[read_step(found)]
        clear_leftovers(run)
        for checkpoint in list_checkpoints(run):
            verify(checkpoint)
        assert all(re.fullmatch("(set-aside-)?checkpoint-[0-9]+", name) for name in get_names(run))
        if not is_killed:
            break
    assert kill_at > 8 and content == expected_last


def test_a_kill_while_leftovers_are_cleared_leaves_them_to_the_next(tmp_path, monkeypatch):
    """Half of a deleted folder must not take a name that counts."""
    save(tmp_path, 2)
    write_parts(tmp_path / "checkpoint-4")
    os.rename(save(tmp_path, 1), tmp_path / ".checkpoint-1.deleted")

    def die(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "rmdir", die)
        clear_leftovers(tmp_path)
    assert find_newest(tmp_path) == tmp_path / "checkpoint-2"
    clear_leftovers(tmp_path)
    assert get_names(tmp_path) == ["checkpoint-2"]


def test_what_is_put_aside_takes_no_place_and_can_be_gone_on_from(tmp_path):
    """A second resume from an older checkpoint must neither stumble over what the first put aside nor delete it."""
    for content in ("first", "second"):
        write_parts(tmp_path / "checkpoint-6", content)
        publish(tmp_path / "checkpoint-6", FACTS)
        place = set_aside(tmp_path / "checkpoint-6")
    assert get_names(tmp_path) == ["set-aside-2-checkpoint-6", "set-aside-checkpoint-6"] and read_step(place) == 6
    assert "second" in (place / "optimizer.pt").read_text() and verify(place).step == 6
    assert json.loads((place / MANIFEST_NAME).read_text())["step"] == 6
