"""Who owns a run's folder, with real processes that end in every way."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import pytest

from lorashard.errors import ConfigError
from lorashard.runs.lock import find_owner, find_process, lock_run

# Takes the lock, says so, and holds it until its stdin ends.
OWNER = """
import errno, os, sys, time
from pathlib import Path
import filelock, filelock._unix
from lorashard.errors import ConfigError
from lorashard.runs.lock import lock_run
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
    owner = find_owner(tmp_path)
    assert owner is not None and owner.is_here


@pytest.mark.parametrize("kind", ["flock", "no-flock"])
def test_the_owner_is_found_while_it_lives_and_not_when_it_is_dead(start, tmp_path, kind, monkeypatch):
    """A signal that goes to the number of a dead process; a dead run that is shown as alive for ever."""
    if kind == "no-flock":

        def refuse(descriptor, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
    assert find_owner(tmp_path) is None
    run = start(tmp_path, kind)
    assert run.take() == "mine"
    owner = find_owner(tmp_path)
    assert owner is not None and owner.is_here and owner.begin_s is not None
    assert (owner.pid, owner.host) == (run.process.pid, platform.node()) and abs(owner.begin_s - time.time()) < 60
    run.kill()
    assert (tmp_path / ".owner.json").exists() and find_owner(tmp_path) is None
    ended = start(tmp_path, kind)
    assert ended.take() == "mine"
    ended.end()
    assert find_owner(tmp_path) is None


@pytest.mark.parametrize("kind", ["flock", "no-flock"])
def test_an_owner_that_nobody_has_waited_for_is_dead(start, tmp_path, kind, monkeypatch):
    """A run that is shown as alive for ever in a container, whose first process does not wait for what it inherits."""
    if kind == "no-flock":

        def refuse(descriptor, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr("fcntl.flock", refuse)
    run = start(tmp_path, kind)
    assert run.take() == "mine"
    assert find_process(run.process.pid, time.time()) is not None
    run.process.kill()
    os.waitid(os.P_PID, run.process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    os.kill(run.process.pid, 0)
    assert find_process(run.process.pid, time.time()) is None and find_owner(tmp_path) is None


@pytest.mark.parametrize("namespace", ["", f"?pidns-{os.stat('/proc/self/ns/pid').st_ino:x}", "?pidns-1"])
def test_without_flock_an_owner_in_another_container_is_not_judged(tmp_path, namespace):
    """In a container, a dead run that is shown as alive for ever; a run beside it that is judged by a number which is
    another process there."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / ".lock.soft").write_text(f"{dead.pid}\n{platform.node()}{namespace}\n")
    (tmp_path / ".owner.json").write_text(json.dumps({"pid": dead.pid, "host": platform.node(), "begin_s": 0}))
    assert (find_owner(tmp_path) is not None) == (namespace == "?pidns-1")


def test_an_owner_that_has_not_said_who_it_is_is_not_taken_for_the_one_before(start, tmp_path):
    """A signal to a process that has been given the number of a dead run, while the next run starts."""
    run = start(tmp_path)
    assert run.take() == "mine"
    left = {"pid": os.getpid(), "host": platform.node(), "begin_s": 1.0}  # this process has begun later
    (tmp_path / ".owner.json").write_text(json.dumps(left))
    owner = find_owner(tmp_path)
    assert owner is not None and not owner.is_here
    (tmp_path / ".owner.json").unlink()
    owner = find_owner(tmp_path)
    assert owner is not None and owner.pid is None and not owner.is_here and "not said who it is" in str(owner)


def test_an_owner_on_another_machine_is_said_to_be_there(start, tmp_path):
    """A signal to a process of this machine that has the number of another's."""
    run = start(tmp_path)
    assert run.take() == "mine"
    said = {"pid": run.process.pid, "host": "node-7", "begin_s": time.time()}
    (tmp_path / ".owner.json").write_text(json.dumps(said))
    owner = find_owner(tmp_path)
    assert owner is not None and owner.host == "node-7" and not owner.is_here


def test_looking_for_the_owner_stops_no_run_from_starting(start, tmp_path):
    """A page that looks each second, and a run that is refused because it looked at the wrong moment."""
    run = start(tmp_path)
    (tmp_path / ".lock").touch()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            find_owner(tmp_path)

    lookers = [threading.Thread(target=look) for _ in range(4)]
    for looker in lookers:
        looker.start()
    said = run.take()
    is_over.set()
    for looker in lookers:
        looker.join()
    assert said == "mine"
