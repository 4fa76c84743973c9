"""Folders that appear complete or not at all, and what killed processes have left of them."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from lorashard.runtime.atomic_folder import fill_atomically, list_partials, name_partial, remove_abandoned


def leave_partial(folder: Path) -> None:
    name_partial(folder).mkdir()


def test_a_folder_appears_when_it_is_complete(tmp_path):
    """Catches a name that is given before the content, and parents of a target that a failure leaves behind."""
    folder = tmp_path / "new" / "deep"
    for error in (KeyboardInterrupt, OSError):
        with pytest.raises(error), fill_atomically(folder) as partial:
            (partial / "inner").mkdir()
            raise error
        assert os.listdir(tmp_path) == []
    with fill_atomically(folder) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("x")
        assert not folder.exists() and list_partials(folder) == [partial]
    assert (folder / "inner" / "file").read_text() == "x" and os.listdir(tmp_path) == ["new"]


def test_a_folder_that_holds_something_stays(tmp_path):
    """Catches two processes of which the slower replaces what the faster has published."""
    with pytest.raises(OSError), fill_atomically(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("x")
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "x"


def test_what_a_killed_process_left_is_removed_and_no_more(tmp_path):
    """Catches leftovers that fill the disk, and a folder that another process, or another machine, is filling."""
    folder = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(target=leave_partial, args=(folder,))
    process.start()
    process.join()
    (left,) = list_partials(folder)
    leave_partial(folder)
    kept = {name_partial(folder), tmp_path / ".out.partial-elsewhere-1", tmp_path / f".other{left.name[4:]}"}
    for path in kept - {name_partial(folder)}:
        path.mkdir()
    remove_abandoned(folder)
    assert not left.exists() and set(tmp_path.iterdir()) == kept
