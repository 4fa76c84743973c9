"""Who is blamed for silence, and who never: real processes around a real store, stopped and gone on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from helpers.waiting import wait_until

from lorashard.runtime.heartbeat import Heartbeat, Silences, describe_place, explain_silence
from lorashard.runtime.launch_env import read_launcher_env
from lorashard.runtime.rank_store import is_timeout

TIMEOUT_S = 5.0
DEADLINE_S = 100
ENDED = json.dumps({})


def make_beat(number: int, **facts: Any) -> str:
    return json.dumps({"number": number} | facts)


def count_all(silences: Silences, words: Sequence[str | None], times: int, elapsed_s: float = 1.0) -> list[int]:
    """Return who is overdue after the same words have been read several times."""
    overdue: list[int] = []
    for _ in range(times):
        overdue = silences.count(words, elapsed_s)
    return overdue


def test_a_rank_is_overdue_after_the_whole_time_and_not_before() -> None:
    """Catches a rank that is blamed early, or never, and one of the two that were stopped together going unnamed."""
    silences = Silences(rank=0, timeout_s=10)
    silences.count([make_beat(1), make_beat(1), make_beat(1), make_beat(1)], 1)
    silences.count([make_beat(1), make_beat(1), make_beat(2), make_beat(1)], 1)

    for number in range(8):
        assert silences.count([make_beat(1), make_beat(1), make_beat(2), make_beat(9 + number)], 1) == []
    assert silences.count([make_beat(1), make_beat(1), make_beat(2), make_beat(99)], 1) == [1, 2]


def test_ranks_that_are_not_there_or_have_ended_are_not_missed() -> None:
    """Catches a false alarm for a rank that starts slowly, or for one that was done before the others."""
    silences = Silences(rank=0, timeout_s=10)
    assert count_all(silences, [make_beat(1), None, ENDED], times=100) == []


def test_a_watcher_that_was_stopped_itself_gives_everybody_the_whole_time_again() -> None:
    """Catches the first rank that goes on after Ctrl-Z, or after a job was suspended, blaming the others."""
    silences = Silences(rank=0, timeout_s=10)
    words = [make_beat(1), make_beat(1)]
    assert count_all(silences, words, times=9) == []
    assert silences.count(words, 1000) == []
    assert count_all(silences, words, times=9) == []
    assert silences.count(words, 1) == [1]


def test_the_place_names_the_model_and_the_innermost_call() -> None:
    """Catches a report that names a queue's lock alone, or lorashard's entry alone."""
    source = "def forward(inner):\n    return inner()\n"
    layer: dict[str, Any] = {"__name__": "transformers.models.tiny.modeling_tiny"}
    exec(compile(source, "/site-packages/transformers/models/tiny/modeling_tiny.py", "exec"), layer)

    place = layer["forward"](lambda: describe_place(sys._getframe()))

    assert place.startswith("unit/runtime/test_heartbeat.py:")
    assert place.endswith(" (<lambda>) in models/tiny/modeling_tiny.py:2 (forward)")


def test_the_reason_is_what_can_be_seen_of_the_process() -> None:
    """Catches a stopped process that is reported as a lost machine, and the other way round."""
    facts = {"phase": "train", "step": 12, "place": "a/b/c.py:3 (wait)"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = facts | {"host": socket.gethostname(), "pid": process.pid}
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    stopped = explain_silence([None, here], [1], 120)
    process.kill()
    process.communicate()

    told = (f"rank 1 (host {here['host']}, pid {process.pid})", "120 s", "process is stopped", "'train' of step 12")
    assert [part for part in (*told, "a/b/c.py:3 (wait)", "heartbeat_timeout") if part not in stopped] == []
    assert "process is gone" in explain_silence([None, here], [1], 120)
    elsewhere = explain_silence([None, here | {"host": "node-7"}, here], [1, 2], 120)
    assert [part for part in ("(host node-7, ", "120 s", "rank 2", "network is gone") if part not in elsewhere] == []


@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        ("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation", True),
        ("wait timeout after 3000ms, keys: /a", True),
        ("Connection closed [127.0.0.1]:1234", False),
    ],
)
def test_a_timeout_is_told_from_other_failures(message: str, is_one: bool) -> None:
    """Catches the places of all ranks being left out where they are wanted, or tacked to every error."""
    assert is_timeout(RuntimeError(message)) == is_one
    assert not is_timeout(ValueError(message))


def test_one_rank_alone_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a thread, and a store to wait for, in a run that has nobody to watch; and 0 that does not mean off."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    num_threads = threading.active_count()
    with (
        Heartbeat(read_launcher_env(), TIMEOUT_S, print, read_place) as heartbeat,
        Heartbeat(None, TIMEOUT_S, print, read_place),
    ):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with Heartbeat(read_launcher_env(), 0, print, read_place):
            assert threading.active_count() == num_threads
        assert heartbeat.describe_ranks() == ""


# With processes: a store, and ranks around it.

PLACE: list[tuple[str, int | None]] = [("start", None)]  # of the rank that is this process


def read_place() -> tuple[str, int | None]:
    return PLACE[-1]


def keep_store(port: Any) -> None:
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    port.send(store.port)
    time.sleep(600)


def be_rank(rank: int, num_ranks: int, port: int, folder: Path, body: Callable[[int, Heartbeat], None]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"failure_{rank}"),
    }
    log = os.open(folder / f"log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stderr = os.fdopen(log, "w")

    def report(reason: str, silent_rank: int) -> None:
        (folder / f"told_{rank}").write_text(reason)

    with Heartbeat(read_launcher_env(), TIMEOUT_S, report, read_place) as heartbeat:
        wait_until(lambda: len(heartbeat.describe_ranks().splitlines()) == num_ranks)
        wait_until(lambda: "not there yet" not in heartbeat.describe_ranks())
        (folder / f"began_{rank}").touch()
        body(rank, heartbeat)


class Group:
    """A store and ranks, each a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = multiprocessing.get_context("fork")
        receiver, sender = self._context.Pipe(duplex=False)
        self.store: BaseProcess = self._context.Process(target=keep_store, args=(sender,), daemon=True)
        self.store.start()
        self._port = receiver.recv()
        self.ranks: list[BaseProcess] = []

    def start(self, body: Callable[[int, Heartbeat], None], num_ranks: int = 3) -> None:
        """Start ranks, and return once all have read beats of all."""
        for rank in range(num_ranks):
            arguments = (rank, num_ranks, self._port, self.folder, body)
            self.ranks.append(self._context.Process(target=be_rank, args=arguments, daemon=True))
            self.ranks[-1].start()
        wait_until(lambda: all((self.folder / f"began_{rank}").exists() for rank in range(num_ranks)))

    def send(self, number: signal.Signals, *processes: BaseProcess) -> None:
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def join(self, *ranks: int) -> list[int | None]:
        """Return the ranks' exit codes."""
        for rank in ranks:
            self.ranks[rank].join(DEADLINE_S)
        return [self.ranks[rank].exitcode for rank in ranks]

    def read_failures(self) -> list[dict[str, Any]]:
        """Return what the ranks left for a launcher, by rank."""
        return [json.loads(file.read_text())["message"] for file in sorted(self.folder.glob("failure_*"))]

    def end(self) -> None:
        for process in [*self.ranks, self.store]:
            process.kill()
            process.join()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.end()


def sleep_at_step_7(rank: int, heartbeat: Heartbeat) -> None:
    PLACE.append(("train", 7))
    num_ranks = int(os.environ["WORLD_SIZE"])
    wait_until(lambda: heartbeat.describe_ranks().count("'train' of step 7") == num_ranks)
    (find_folder() / f"knows_{rank}").touch()
    time.sleep(600)


def test_a_stopped_rank_is_named_and_the_others_end(group: Group) -> None:
    """Catches ranks that wait for ever, two that speak at once, and a failure that no launcher can read."""
    group.start(sleep_at_step_7)
    wait_until(lambda: len(list(group.folder.glob("knows_*"))) == 3)
    group.send(signal.SIGSTOP, group.ranks[1])

    assert group.join(0, 2) == [1, 1]
    failures = group.read_failures()
    for failure in failures:
        details = failure["extraInfo"]
        assert details["user_error"].startswith(f"rank 1 (host {socket.gethostname()}, pid {group.ranks[1].pid}) has")
        assert "process is stopped" in details["user_error"]
        assert "'train' of step 7, at " in details["user_error"]
        assert (details["exit_code"], details["silent_rank"]) == (1, 1)
    assert len(failures) == 2
    assert len(list(group.folder.glob("told_*"))) == 1
    logs = "".join(file.read_text() for file in group.folder.glob("log_*"))
    assert logs.count("lorashard: error: rank 1 (host") == 1


def find_folder() -> Path:
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent


def wait_until_done(rank: int, heartbeat: Heartbeat) -> None:
    wait_until((find_folder() / "done").exists)


@pytest.mark.slow
def test_ranks_that_were_all_stopped_go_on(group: Group) -> None:
    """Catches a job that a scheduler suspends and continues, which ends by its own watch."""
    group.start(wait_until_done)
    for _ in range(3):  # whoever goes on first must not blame the others
        group.send(signal.SIGSTOP, *group.ranks)
        time.sleep(TIMEOUT_S * 1.5)
        group.send(signal.SIGCONT, *group.ranks)
        time.sleep(TIMEOUT_S / 4)
    assert all(rank.is_alive() for rank in group.ranks)
    (group.folder / "done").touch()

    assert group.join(0, 1, 2) == [0, 0, 0]
    assert group.read_failures() == []


def compute_and_end_in_turn(rank: int, heartbeat: Heartbeat) -> None:
    """Rank 1 is busy until rank 0 ends, which watches it, and watches afterward."""
    PLACE.append(("save", 3))
    end_s = time.monotonic() + 1.5 * TIMEOUT_S
    while time.monotonic() < end_s:
        if rank == 0:
            time.sleep(0.1)
    while rank and time.monotonic() < end_s + 1.5 * TIMEOUT_S:
        time.sleep(0.1)
    (find_folder() / f"ranks_{rank}").write_text(heartbeat.describe_ranks())


@pytest.mark.slow
def test_ranks_may_end_at_different_times(group: Group) -> None:
    """Catches a rank that is missed because it was done first, and a busy main thread that is taken for silence.

    Where every rank stood can be asked: else a collective's timeout does not tell which rank did not come.
    """
    group.start(compute_and_end_in_turn, num_ranks=2)

    assert group.join(0, 1) == [0, 0]
    assert group.read_failures() == []
    early, late = ((group.folder / f"ranks_{rank}").read_text().splitlines() for rank in (0, 1))
    assert [line.split(", at ")[0] for line in early] == [f"rank {rank}: 'save' of step 3" for rank in (0, 1)]
    assert late[0] == "rank 0: at its end"


@pytest.mark.slow
def test_without_a_store_nobody_is_blamed(group: Group) -> None:
    """Catches an alarm because the launcher was stopped for a while, or is gone: neither says anything of a rank."""
    group.start(sleep_at_step_7, num_ranks=2)
    group.send(signal.SIGSTOP, group.store)
    time.sleep(TIMEOUT_S * 1.5)
    group.send(signal.SIGCONT, group.store)
    time.sleep(TIMEOUT_S * 1.5)
    group.store.kill()
    time.sleep(TIMEOUT_S * 1.5)

    assert [rank.is_alive() for rank in group.ranks] == [True, True]
    assert group.read_failures() == []
