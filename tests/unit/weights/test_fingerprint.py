"""A file's hash is remembered while the file is the same, and no longer."""

import os
import time
from pathlib import Path

from lorashard.weights import fingerprint as identity
from lorashard.weights.fingerprint import hash_file


def test_a_file_changed_in_the_same_tick_is_hashed_again(tmp_path, monkeypatch):
    """A remembered hash that outlives an edit which left size and times: the changed base would pass for the old."""
    monkeypatch.setattr(identity.constants, "HF_HOME", str(tmp_path / "home"))
    file = tmp_path / "weights"
    file.write_bytes(b"old")
    status = file.stat()
    frozen = os.stat_result(status)  # as a coarse clock shows it before and after the edit
    monkeypatch.setattr(Path, "stat", lambda self, **_: frozen if self == file else os.stat(self))
    before = hash_file(file)
    with file.open("r+b") as stream:
        stream.write(b"new")
    assert hash_file(file) != before


def test_a_settled_file_is_hashed_once(tmp_path, monkeypatch):
    """A memory that never remembers reads hundreds of gigabytes at each start."""
    monkeypatch.setattr(identity.constants, "HF_HOME", str(tmp_path / "home"))
    later_s = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later_s)
    file = tmp_path / "weights"
    file.write_bytes(b"old" * 2**20)
    pieces: list[list[int]] = [[], [], []]
    hashes = [hash_file(file, pieces[turn].append) for turn in range(2)]
    os.utime(file, (1, 1))  # times that were put back leave another time of the change of the inode
    hashes.append(hash_file(file, pieces[2].append))
    assert len(set(hashes)) == 1 and [sum(found) for found in pieces] == [3 * 2**20] * 3
    assert [len(found) > 1 for found in pieces] == [True, False, True]  # what is known comes at once
