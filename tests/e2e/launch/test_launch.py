"""Real ranks, ended in every way that a run can end: the exit code, what is said, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.launches import Launch, keep_launches
from helpers.waiting import wait_until

from lorashard.launch.elastic import run_ranks

RANK = r"""
import os, signal, subprocess, sys, time
from pathlib import Path
folder, behavior, word = sys.argv[1:]
rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']}: 50%\r100% of {word}", flush=True)
print("on stderr", file=sys.stderr)
if behavior == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behavior == "orphan" and rank == 1:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", folder], start_new_session=True)
Path(folder, f"pid_{rank}").write_text(str(os.getpid()))
while not Path(folder, "pid_0").exists() or not Path(folder, "pid_1").exists():
    time.sleep(0.02)
if behavior == "user_error":
    from lorashard.errors import ConfigError
    from lorashard.runtime.failures import record_failure
    record_failure(ConfigError("the rows are bad"), exit_code=2, is_plain=True)
    sys.exit(2)
if rank == 1 and behavior == "raise":
    raise ValueError("boom")
if rank == 1 and behavior == "exit_2":
    print("lorashard: error: the rows are bad")
    sys.exit(2)
if rank == 1 and behavior == "orphan":
    sys.exit(1)
if behavior != "end":
    time.sleep(600)
"""


def launch_ranks(command: list[str], folder: Path) -> int:
    """Be the launcher, as the command line is."""
    failure = run_ranks(command, 2, folder, grace_s=1)
    if failure:
        failure.report()
    return failure.exit_code if failure else 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Launch]]:
    yield from keep_launches(tmp_path, RANK, launch_ranks)


def test_ranks_that_end_end_the_run(start: Callable[[str], Launch], tmp_path: Path) -> None:
    """Catches a lost log, rank 1 on the terminal, a progress bar's carriage return or a `$` that is changed."""
    code, stdout, stderr = start("end").finish()

    assert (code, stderr) == (0, "")
    lines = ["rank 0 of 2: 50%\r100% of $$HOME", "on stderr"]
    assert sorted(stdout.replace("\r", "<CR>").splitlines()) == sorted(line.replace("\r", "<CR>") for line in lines)
    log = (tmp_path / "rank_1.log").read_bytes().decode()
    assert "rank 1 of 2: 50%\r100%" in log
    assert "on stderr" in log


@pytest.mark.parametrize(
    ("behavior", "code", "message"),
    [
        ("raise", 1, "error: rank 1 failed: ValueError: boom (exit code 1, log: {log})"),
        ("exit_2", 2, "error: the rows are bad (rank 1, log: {log})"),
    ],
)
def test_a_failing_rank_ends_all_and_is_named(
    start: Callable[[str], Launch], tmp_path: Path, behavior: str, code: int, message: str
) -> None:
    """Catches a rank that waits forever for one that is gone, and a failure that is not explained."""
    found_code, _, stderr = start(behavior).finish()

    log = tmp_path / "rank_1.log"
    assert found_code == code
    assert stderr == f"lorashard: {message.format(log=log)}\n"
    assert log.read_text().endswith(stderr)


def test_a_users_mistake_on_every_rank_is_said_once(start: Callable[[str], Launch]) -> None:
    """Catches a message for each rank, or exit code 1 for a mistake that only the ranks could find."""
    code, _, stderr = start("user_error").finish()

    assert code == 2
    assert stderr.startswith("lorashard: error: ") and "rows are bad" in stderr
    assert len(stderr.splitlines()) == 1


def test_a_killed_rank_ends_all_and_is_named(start: Callable[[str], Launch]) -> None:
    """Catches a rank that the kernel killed for memory, whose run hangs or fails without a reason."""
    launch = start("sleep")
    os.kill(launch.wait_for_ranks()[1], signal.SIGKILL)
    code, _, stderr = launch.finish()

    assert code == 1
    assert stderr.startswith("lorashard: error: rank 1 was killed by SIGKILL: out of memory?")


@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, 143)],
)
def test_a_signal_ends_all_ranks(
    start: Callable[[str], Launch], number: signal.Signals, to_group: bool, code: int
) -> None:
    """Catches Ctrl-C or a scheduler's SIGTERM that leaves ranks behind, or is reported as a crash."""
    launch = start("sleep")
    launch.wait_for_ranks()
    pid = launch.process.pid
    assert pid is not None
    (os.killpg if to_group else os.kill)(pid, number)
    found_code, _, stderr = launch.finish()

    assert found_code == code
    assert stderr.startswith(f"lorashard: stopped by {number.name}") and len(stderr.splitlines()) == 1


def test_a_rank_that_ignores_signals_is_killed(start: Callable[[str], Launch]) -> None:
    """Catches a rank stuck in a collective that outlives the run."""
    launch = start("stubborn")
    launch.wait_for_ranks()
    launch.process.terminate()
    code, _, _ = launch.finish()

    assert code == 143


def test_what_a_dead_rank_leaves_behind_is_ended(start: Callable[[str], Launch]) -> None:
    """Catches a data loader's worker that outlives its rank and holds the port or the GPU."""
    if sys.platform != "linux":
        pytest.skip("only Linux hands orphans to the launcher")
    code, _, _ = start("orphan").finish()

    assert code == 1


def test_ranks_die_with_a_launcher_that_is_killed(start: Callable[[str], Launch]) -> None:
    """Catches ranks that hold their GPUs after `kill -9` of the launcher."""
    if sys.platform != "linux":
        pytest.skip("only Linux can tie a process's life to another's")
    launch = start("sleep")
    launch.wait_for_ranks()
    launch.process.kill()
    wait_until(lambda: launch.find_processes() == [])
