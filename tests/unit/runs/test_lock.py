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
from helpers.talking import Talking

from lorashard.errors import ConfigError
from lorashard.runs.lock import find_owner, find_process, lock_run

# Takes the lock, says so, and holds it until its stdin ends.
OWNER = """
import errno, fcntl, os, sys, time
from pathlib import Path
from lorashard.errors import ConfigError
from lorashard.runs.lock import lock_run
if sys.argv[2] == "no-flock":
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = refuse
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


class Owner(Talking):
    """A process that takes a folder's lock when it is told to."""

    def __init__(self, folder: Path, kind: str = "flock") -> None:
        super().__init__(OWNER, str(folder), kind)
        assert self.read() == "ready"

    def take(self) -> str:
        self.go_on()
        return self.read()


def refuse_flock(monkeypatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)


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
    named = (f"process {first.process.pid} on {platform.node()}", time.strftime("%Y-%m-%d"), str(tmp_path))
    assert all(part in str(refusal.value) for part in named)
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
    assert "killed" in said and f"process {killed.process.pid} on {platform.node()}" in said
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
    assert f"killed (process {first.process.pid}" in third.end()


@pytest.mark.parametrize(
    ("host", "is_judged"),
    [
        ("node-7", False),
        (platform.node(), True),
        (f"{platform.node()}?pidns-{os.stat('/proc/self/ns/pid').st_ino:x}", True),
        (f"{platform.node()}?pidns-1", False),
    ],
)
def test_without_flock_an_owner_elsewhere_is_not_judged(monkeypatch, tmp_path, host, is_judged):
    """A run of another node or container, whose number is another process here, and whose folder is taken from it.

    And a dead run that is shown as alive for ever in a container.
    """
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / ".lock.soft").write_text(f"{dead.pid}\n{host}\n")
    name = host.partition("?")[0]
    (tmp_path / ".owner.json").write_text(json.dumps({"pid": dead.pid, "host": name, "begin_s": 0}))
    assert (find_owner(tmp_path) is None) == is_judged
    if not is_judged:
        refuse_flock(monkeypatch)
        refused = rf"process {dead.pid} on {name}.*delete .*\.lock\.soft"
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

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(ConfigError, match="Read-only"), lock_run(tmp_path):
        pass


def test_a_stopped_owner_lives(start, tmp_path):
    """A run that somebody has suspended, whose folder another takes."""
    owner = start(tmp_path)
    assert owner.take() == "mine"
    owner.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match=f"process {owner.process.pid}"), lock_run(tmp_path):
        pass
    owner = find_owner(tmp_path)
    assert owner is not None and owner.is_here


@pytest.mark.parametrize("kind", ["flock", "no-flock"])
def test_the_owner_is_found_while_it_lives_and_not_when_it_is_dead(start, tmp_path, kind, monkeypatch):
    """A signal that goes to the number of a dead process; a dead run that is shown as alive for ever.

    In a container the first process does not wait for what it inherits, so that a dead run stays a zombie.
    """
    if kind == "no-flock":
        refuse_flock(monkeypatch)
    assert find_owner(tmp_path) is None
    run = start(tmp_path, kind)
    assert run.take() == "mine"
    owner = find_owner(tmp_path)
    assert owner is not None and owner.is_here and owner.begin_s is not None
    assert (owner.pid, owner.host) == (run.process.pid, platform.node()) and abs(owner.begin_s - time.time()) < 60
    assert find_process(run.process.pid, time.time()) is not None
    run.process.kill()
    os.waitid(os.P_PID, run.process.pid, os.WEXITED | os.WNOWAIT)
    os.kill(run.process.pid, 0)  # the zombie is there
    assert find_process(run.process.pid, time.time()) is None and find_owner(tmp_path) is None
    run.kill()
    assert (tmp_path / ".owner.json").exists() and find_owner(tmp_path) is None
    ended = start(tmp_path, kind)
    assert ended.take() == "mine"
    ended.end()
    assert find_owner(tmp_path) is None


def test_an_owner_is_not_taken_for_another_process_of_its_number(start, tmp_path):
    """A signal to a process that has the number of a dead run, or of a run on another machine."""
    run = start(tmp_path)
    assert run.take() == "mine"
    file = tmp_path / ".owner.json"
    said = {"pid": os.getpid(), "host": platform.node(), "begin_s": 1.0}  # this process has begun later
    for left in (said, said | {"pid": run.process.pid, "host": "node-7", "begin_s": time.time()}):
        file.write_text(json.dumps(left))
        owner = find_owner(tmp_path)
        assert owner is not None and not owner.is_here and owner.host == left["host"]
    file.unlink()
    owner = find_owner(tmp_path)
    assert owner is not None and owner.pid is None and not owner.is_here


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
