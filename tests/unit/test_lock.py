"""Who owns a run's folder, with real processes that end in every way."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from lorashard.errors import ConfigError
from lorashard.lock import lock_run

# Takes the lock, says so, and holds it until its stdin ends.
OWNER = """
import errno, os, sys, time
from pathlib import Path
import filelock, filelock._unix
from lorashard.errors import ConfigError
from lorashard.lock import lock_run
if sys.argv[2] == "no-flock":
    def refuse(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")
    filelock._unix.lock_fd_nonblocking = refuse
print("ready", flush=True)
sys.stdin.readline()
try:
    with lock_run(Path(sys.argv[1])):
        if sys.argv[2] == "worker" and os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        print("mine", flush=True)
        sys.stdin.readline()
except ConfigError as error:
    print(error, flush=True)
"""


class Owner:
    """A process that takes a folder's lock when it is told to."""

    def __init__(self, folder: Path, kind: str = "flock") -> None:
        words = [sys.executable, "-c", OWNER, str(folder), kind]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def take(self) -> str:
        self.go_on()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> str:
        """Let go; return what it said on stderr."""
        return self.process.communicate("\n", timeout=30)[1]


@pytest.fixture
def start():
    owners: list[Owner] = []

    def start(*words) -> Owner:
        owners.append(Owner(*words))
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()


def test_a_live_run_owns_its_folder(start, tmp_path):
    """Two runs that write one folder mix their logs and delete each other's checkpoints."""
    first = start(tmp_path)
    assert first.take() == "mine"
    with pytest.raises(ConfigError) as refusal, lock_run(tmp_path):
        pass
    named = f"process {first.process.pid} on {platform.node()}, since {time.strftime('%Y-%m-%d')}"
    assert named in str(refusal.value) and "choose another folder" in str(refusal.value)
    assert first.end() == ""
    with lock_run(tmp_path):
        assert json.loads((tmp_path / ".owner.json").read_text())["pid"] == os.getpid()
    assert not (tmp_path / ".owner.json").exists()


def test_the_lock_of_a_killed_run_is_taken_over_and_said(start, tmp_path, capsys):
    """A folder that nobody can use again until a person finds and deletes a file."""
    killed = start(tmp_path)
    assert killed.take() == "mine"
    killed.kill()
    with lock_run(tmp_path):
        said = capsys.readouterr().err
    assert f"left behind by a run that was killed (process {killed.process.pid} on {platform.node()}" in said
    with lock_run(tmp_path):
        assert capsys.readouterr().err == ""


def test_a_worker_of_a_killed_run_does_not_keep_its_lock(start, tmp_path):
    """A restart that is refused for as long as a data loader's workers take to see that their rank is gone."""
    killed = start(tmp_path, "worker")
    assert killed.take() == "mine"
    killed.kill()
    with lock_run(tmp_path):
        pass


@pytest.mark.parametrize("kind", ["flock", "no-flock"])
def test_of_runs_that_start_at_one_moment_one_wins(start, tmp_path, kind):
    """A look before the lock, so that two find the folder free."""
    owners = [start(tmp_path / "run", kind) for _ in range(4)]
    for owner in owners:
        owner.go_on()
    said = [owner.read() for owner in owners]
    assert sorted(line == "mine" for line in said) == [False, False, False, True], said
    winner = owners[said.index("mine")].process.pid
    assert all(line == "mine" or f"process {winner} on" in line for line in said), said


def test_without_flock_a_live_owner_is_told_from_a_dead_one(start, tmp_path):
    """A network disk without flock on which a killed run blocks the folder for ever, or two runs share it."""
    first, second = start(tmp_path, "no-flock"), start(tmp_path, "no-flock")
    assert first.take() == "mine"
    assert f"process {first.process.pid} on" in second.take()
    first.kill()
    third = start(tmp_path, "no-flock")
    assert third.take() == "mine"
    assert "left behind by a run that was killed" in third.end()


def test_without_flock_an_owner_of_another_machine_is_not_judged(monkeypatch, tmp_path):
    """A run of another node, which cannot be seen from here, whose folder is taken from it."""

    def refuse(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("filelock._unix.lock_fd_nonblocking", refuse)
    (tmp_path / ".lock.soft").write_text("1\nnode-7\n")
    (tmp_path / ".owner.json").write_text(json.dumps({"pid": 1, "host": "node-7", "begin_s": 0}))
    refused = r"process 1 on node-7.*cannot be known here.*delete .*\.lock\.soft"
    with pytest.raises(ConfigError, match=refused), lock_run(tmp_path):
        pass


def test_a_folder_that_came_to_nothing_leaves_nothing(tmp_path):
    """An empty folder after each mistake in the options; a folder with something in it that is removed."""
    with lock_run(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with lock_run(tmp_path / "new"):
        (tmp_path / "new" / "metrics.jsonl").touch()
    assert (tmp_path / "new" / "metrics.jsonl").exists()


def test_a_folder_that_cannot_be_written_to_is_a_users_mistake(monkeypatch, tmp_path):
    """A traceback for a read-only disk; root may write where others may not, so the disk's answer is put in."""

    def refuse(lock):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "_acquire", refuse)
    with pytest.raises(ConfigError, match="cannot be locked: Read-only file system"), lock_run(tmp_path):
        pass


def test_a_stopped_owner_lives(start, tmp_path):
    """A run that somebody has suspended, whose folder another takes."""
    owner = start(tmp_path)
    assert owner.take() == "mine"
    owner.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="is owned by another run"), lock_run(tmp_path):
        pass
