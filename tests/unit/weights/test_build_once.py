"""Derived folders are built once, by one process at a time, and are never left incomplete."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from helpers.waiting import wait_until

from lorashard.runtime.atomic_folder import list_partials
from lorashard.weights.build_once import make_once


def start(folder: Path, fill) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=make_once, args=(folder, lambda free: None, fill))
    process.start()
    return process


def test_a_folder_is_built_once_after_a_killed_attempt(tmp_path):
    """An incomplete folder that is used has zeros for weights; one that is built at each start costs hours."""
    folder, attempts, free_bytes = tmp_path / "made", [], []

    def fill(partial: Path) -> None:
        attempts.append(partial)
        (partial / "file").write_text("complete")

    def fill_and_die(partial: Path) -> None:
        (partial / "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    start(folder, fill_and_die).join()
    (left,) = list_partials(folder)
    assert not folder.exists()
    for _ in range(2):
        make_once(folder, free_bytes.append, fill)
    assert (folder / "file").read_text() == "complete" and not left.exists()
    assert len(attempts) == len(free_bytes) == 1 and free_bytes[0] > 0


def test_a_failure_leaves_nothing(tmp_path):
    """A folder that cannot be completed, on a full disk, must not be found by the next run."""
    folder = tmp_path / "made"

    def fail(_: object) -> None:
        raise OSError("full")

    for check_room, fill in ((fail, lambda partial: None), (lambda free: None, fail)):
        with pytest.raises(OSError, match="full"):
            make_once(folder, check_room, fill)
        assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_others_wait_and_look_on(tmp_path):
    """Two processes that fill one folder, or one that waits for hours without a sign of progress."""
    folder, seen = tmp_path / "made", []

    def fill(partial: Path) -> None:
        wait_until(lambda: (tmp_path / "seen").exists())
        (partial / "file").touch()

    def look(partials: list[Path]) -> None:
        seen.extend(partials)
        (tmp_path / "seen").touch()

    process = start(folder, fill)
    wait_until(lambda: list_partials(folder))
    make_once(folder, lambda free: pytest.fail("checked"), lambda partial: pytest.fail("filled"), look)
    process.join()
    assert seen and os.listdir(folder) == ["file"]
