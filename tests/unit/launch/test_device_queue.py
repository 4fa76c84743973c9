"""Runs that wait for their devices, with real processes that end in every way and a stand-in for the GPUs' driver."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.paths import ROOT
from helpers.talking import Talking
from helpers.waiting import wait_until

from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.launch.device_queue import hold_devices
from lorashard.launch.launcher import finetune
from lorashard.runs.status import Status
from lorashard.runtime.devices import RankChoice

# Holds devices in its folder's name, says which, and holds them until its stdin ends.
HOLDER = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
from helpers.nvml import Nvml, card
from lorashard.launch.device_queue import hold_devices
from lorashard.runtime.devices import RankChoice
from lorashard.errors import RunStopped
from lorashard.launch.elastic import Signals
from lorashard.runs.status import told_status

def list_cards():
    free = enumerate(json.loads(Path(os.environ["CARDS"]).read_text()))
    return [card(number, memory=SimpleNamespace(total=100, free=share)) for number, share in free]

sys.modules["pynvml"] = Nvml(list_cards)
run, num_ranks, device_type, ids, is_count, is_queued = json.loads(sys.argv[1])
choice = RankChoice(num_ranks, device_type, None if ids is None else tuple(ids))
run = Path(run)
run.mkdir(exist_ok=True)
try:
    with (
        Signals(can_save=True).before_ranks(),
        told_status(run) as status,
        hold_devices(run.name, choice, status, is_count=is_count, is_queued=is_queued) as given,
    ):
        print("has", json.dumps(given.gpu_ids), flush=True)
        sys.stdin.readline()
except RunStopped as error:
    print(error, flush=True)
    sys.exit(75)
finally:
    assert "torch" not in sys.modules
"""


class Holder(Talking):
    """A process that wants devices."""

    def __init__(self, run: Path, device_type: str, num: int, ids: list[int] | None, is_count: bool, is_queued: bool):
        self.run = run
        super().__init__(HOLDER, json.dumps([str(run), num, device_type, ids, is_count, is_queued]))

    def read_status(self) -> dict[str, Any]:
        try:
            return json.loads((self.run / "status.json").read_text())
        except FileNotFoundError:
            return {}

    def await_queue(self, place: int, *said: str) -> None:
        """Wait until status.json has it in the queue at a place, and why."""
        wait_until(lambda: self.read_status().get("queue", {}).get("place") == place)
        waits_for = self.read_status()["queue"]["waits_for"]
        assert all(part in waits_for for part in said), waits_for


@pytest.fixture
def queue(monkeypatch, tmp_path) -> Callable[..., Holder]:
    """Start a run that wants `cpu`, a number of GPUs, or GPUs by their ids, on a machine with four."""
    monkeypatch.setenv("LORASHARD_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("CARDS", str(tmp_path / "cards.json"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "cards.json").write_text("[95, 95, 95, 95]")
    holders: list[Holder] = []

    def start(name: str, wants: str | int | list[int] = "cpu", is_queued: bool = True) -> Holder:
        run = tmp_path / name
        if wants == "cpu":
            holders.append(Holder(run, "cpu", 2, None, False, is_queued))
        elif isinstance(wants, int):
            holders.append(Holder(run, "cuda", wants, None, True, is_queued))
        else:
            holders.append(Holder(run, "cuda", len(wants), wants, False, is_queued))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()


def test_queued_runs_come_one_after_another_in_order(queue):
    """Two runs on one machine's cores, or the third before the second."""
    first = queue("first", is_queued=False)
    assert first.read() == "has null"
    second = queue("second")
    second.await_queue(1, "the CPU is held by the run first", f"process {first.process.pid}")
    third = queue("third")
    third.await_queue(2, "the run second", "came first")
    assert second.read_status()["phase"] == "queue" and second.read_status()["pid"] == second.process.pid
    first.kill()  # SIGKILL
    assert second.read() == "has null"
    third.await_queue(1, "the CPU is held by the run second")
    second.end()
    assert third.read() == "has null"


def test_a_run_that_is_not_queued_waits_for_nobody(queue):
    """A person who said nothing of a queue, and whose run does not start."""
    assert queue("first").read() == "has null"
    assert queue("second", is_queued=False).read() == "has null"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGUSR1))]
)
def test_a_waiting_run_can_be_stopped(queue, number):
    """A run that can only be killed, keeps its place, or is said to wait for ever."""
    first = queue("first")
    assert first.read() == "has null"
    second, third = queue("second"), None
    second.await_queue(1)
    third = queue("third")
    third.await_queue(2)
    second.process.send_signal(number)
    assert second.process.wait(20) == (75 if number != signal.SIGINT else -signal.SIGINT)
    status = second.read_status()
    assert status["phase"] == "stopped" and "stopped by" in status["error"] and "queue" not in status
    third.await_queue(1, "the run first")


@pytest.mark.slow
def test_a_waiting_run_costs_next_to_nothing(queue):
    """A loop that keeps a core busy for days."""
    assert queue("first").read() == "has null"
    second = queue("second")
    second.await_queue(1)
    process = psutil.Process(second.process.pid)
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.1


def test_a_count_takes_any_gpus_that_are_free(queue):
    """A queue for GPU 0 while GPU 3 does nothing; two runs on one GPU."""
    assert queue("held", [0], is_queued=False).read() == "has [0]"
    assert queue("two", 2).read() == "has [1, 2]"
    three = queue("three", 2)
    three.await_queue(1, "GPU 0 is held by the run held", "GPU 1 is held by the run two")
    assert queue("on the cpu").read() == "has null"


def test_ids_wait_for_those_gpus_alone(queue):
    """A run on GPUs that nobody asked for, or one that waits for GPUs that it does not want."""
    held = queue("held", [1], is_queued=False)
    assert held.read() == "has [1]"
    waiting = queue("waiting", [1, 2])
    waiting.await_queue(1, "GPU 1 is held by the run held")
    assert queue("beside", [0, 3]).read() == "has [0, 3]"
    late = queue("late", [2])  # free, but not its turn
    late.await_queue(2, "the run waiting", "waits for GPUs 1, 2 too")
    held.end()
    assert waiting.read() == "has [1, 2]"


def test_gpus_are_the_same_whatever_they_are_called(queue, monkeypatch):
    """CUDA_VISIBLE_DEVICES gives a GPU another number: two runs on one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert queue("held", [0], is_queued=False).read() == "has [0]"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    queue("waiting", 1).await_queue(1, "GPU 0 is held by the run held")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,2")
    assert queue("other", 2).read() == "has [0, 1]"


def test_other_programs_on_a_gpu_count_for_a_number_and_not_for_ids(queue, tmp_path, monkeypatch):
    """A run that is started where there is no memory for it, though another GPU is empty."""
    (tmp_path / "cards.json").write_text("[20, 95, 95, 95]")
    assert queue("any", 1).read() == "has [1]"
    more = queue("more", 3)
    more.await_queue(1, "GPU 1 is held by the run any")
    more.kill()
    assert queue("named", [0]).read() == "has [0]"
    (tmp_path / "cards.json").write_text("[95, 95, 20, 95]")
    two = queue("two", 2)
    two.await_queue(1, "other programs use", "of GPU 2")
    (tmp_path / "cards.json").write_text("[95, 95, 95, 95]")
    assert two.read() == "has [2, 3]"


def test_without_flock_nobody_waits_for_ever(monkeypatch, tmp_path, capsys):
    """A run that waits for a turn that never comes, or one that is refused although it is in no queue."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("LORASHARD_QUEUE_DIR", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refuse)
    choice = RankChoice(1, "cpu")
    status = Status.begin(tmp_path)
    with hold_devices("run", choice, status, is_count=False, is_queued=False) as given:
        assert given == choice
    assert "No locks available" in (said := capsys.readouterr().err) and "LORASHARD_QUEUE_DIR" in said
    with (
        pytest.raises(ConfigError, match="queue: .*No locks available.*LORASHARD_QUEUE_DIR"),
        hold_devices("run", choice, status, is_count=False, is_queued=True),
    ):
        pass


def test_a_run_starts_where_there_can_be_no_tickets(monkeypatch, tmp_path, capsys):
    """A container's user without a home, or one who may not write there: a run that is in no queue and fails."""
    monkeypatch.delenv("LORASHARD_QUEUE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    choice = RankChoice(1, "cpu")
    status = Status.begin(tmp_path)
    for home, reason in (("~", "no home folder"), (str(tmp_path / "file"), "Not a directory")):
        monkeypatch.setattr(os.path, "expanduser", lambda path, home=home: path.replace("~", home))
        with hold_devices("run", choice, status, is_count=False, is_queued=False) as given:
            assert given == choice
        assert reason in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["file", "status.json"]


def test_a_ticket_that_was_deleted_is_told(queue, tmp_path):
    """A person who empties ~/.cache: a traceback, or a run that waits for ever."""
    assert queue("first").read() == "has null"
    second = queue("second")
    second.await_queue(1)
    (tmp_path / "queue" / "2.ticket").unlink()
    error = second.process.communicate(timeout=30)[1]
    assert second.process.returncode == 1 and "ConfigError: queue: " in error and "was deleted" in error
    assert "was deleted" in second.read_status()["error"]


def test_a_folder_that_somebody_keeps_locked_holds_up_no_run(monkeypatch, tmp_path, capsys):
    """A suspended process that keeps every run of the machine from starting."""
    monkeypatch.setenv("LORASHARD_QUEUE_DIR", str(tmp_path))
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", lambda s: now_s.append(now_s.pop() + s))
    status = Status.begin(tmp_path)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with hold_devices("run", RankChoice(1, "cpu"), status, is_count=False, is_queued=False):
            assert "folder locked" in capsys.readouterr().err
    assert 1 < now_s[0] < 10


def test_a_queue_is_refused_in_ranks_that_are_there_already(monkeypatch, tmp_path):
    """torchrun's ranks, which hold their GPUs while they wait for them."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    config = RunConfig(model_name_or_path="m", dataset="d.jsonl", output_dir=str(tmp_path / "out"), cpu=2, queue=True)
    with pytest.raises(ConfigError, match="queue: torchrun"):
        finetune(config)
    assert os.listdir(tmp_path) == []
