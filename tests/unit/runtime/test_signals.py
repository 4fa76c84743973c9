"""What a rank makes of signals, each case in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lorashard.errors import RunStopped
from lorashard.runtime.signals import StopRequest, find_restarts

BEGIN = "import os, signal, sys, time\nfrom lorashard.runtime.signals import StopRequest\nstop = StopRequest()\n"


def run(code: str) -> tuple[int, str]:
    result = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=30)
    return result.returncode, result.stdout.strip()


def test_a_request_that_came_before_it_can_be_taken_is_kept():
    """A rank killed by a warning that came while it imported torch."""
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
assert stop.signal_name is None
stop.install(is_lorashard=True)
print(stop.signal_name)
"""
    assert run(code) == (0, "SIGUSR1")


def test_a_checkpoint_that_was_asked_for_is_taken_once_and_stops_nothing():
    """A rank killed by SIGUSR2 while it imports torch or as it ends; one that stops, or saves in each step."""
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.kill(os.getpid(), signal.SIGUSR2)
stop.install(is_lorashard=True)
os.kill(os.getpid(), signal.SIGUSR2)
print(stop.take_save(), stop.take_save(), stop.signal_name)
stop.check()
stop.close()
os.kill(os.getpid(), signal.SIGUSR2)
"""
    assert run(code) == (0, "True False None")


def test_under_lorashards_launcher_sigterm_ends_a_rank():
    """A rank that takes the launcher's end of a group for a request, and waits for peers that are dead."""
    assert run("stop.install(is_lorashard=True)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)") == (143, "")


def test_under_lorashards_launcher_sigterm_to_all_processes_is_a_request():
    """A scheduler that ends each process of a job: ranks that die before their launcher can ask them to save."""
    code = """
stop.install(is_lorashard=True)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(5)
print(stop.signal_name, flush=True)
os.kill(os.getpid(), signal.SIGTERM)  # the launcher's or elastic's, when it was asked before: at once
time.sleep(60)
"""
    assert run(code) == (143, "SIGUSR1")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_elsewhere_each_signal_is_a_request_and_ctrl_c_then_stops_at_once(name: str):
    """A request that is forgotten, a repeated SIGTERM that ends the save, and a second Ctrl-C that does nothing."""
    code = f"""
stop.install()
for number in (signal.{name}, signal.SIGTERM, signal.SIGUSR1):
    os.kill(os.getpid(), number)
print(stop.signal_name, flush=True)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)
except KeyboardInterrupt:
    print("at once")
"""
    assert run(code) == (0, f"{name}\nat once")


def test_a_worker_serves_a_rank_that_was_asked_to_stop_until_it_is_ended():
    """A data loader's worker that dies of a signal to all processes, or one that nothing but SIGKILL ends."""
    code = """
stop.install()
worker = os.fork()
if worker == 0:
    time.sleep(60)
    os._exit(0)
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
    os.kill(worker, number)
time.sleep(0.3)
print(os.waitpid(worker, os.WNOHANG)[0], flush=True)
os.kill(worker, signal.SIGTERM)
print(os.WTERMSIG(os.waitpid(worker, 0)[1]))
"""
    assert run(code) == (0, "0\n15")


def test_a_request_ends_the_run_where_it_is_looked_at():
    """A phase that begins although the run was asked to stop; a run that stops although nobody asked."""
    stop = StopRequest()
    stop.check()
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)]
    try:
        stop.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        with pytest.raises(RunStopped, match="stopped by SIGUSR1: .*nothing to save; .*--resume auto"):
            stop.check()
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("environ", "restarts"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"LORASHARD_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0"}, 3),
    ],
)
def test_a_restart_is_known_from_either_launcher(environ: dict[str, str], restarts: int):
    """A run started again by torchrun that begins anew in its own folder."""
    assert find_restarts(environ) == restarts
