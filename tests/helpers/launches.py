"""A launcher process with two ranks that are small scripts, and what it leaves."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import lorashard
from helpers.waiting import wait_until

DEADLINE_S = 180


class Launch:
    """A launcher process with two ranks, each of which runs `script` with the folder and a word as arguments.

    A rank writes `pid_RANK` into the folder once it runs. `launch(command, folder)` is the launcher: it starts the
    ranks with that command and returns the exit code.
    """

    def __init__(self, folder: Path, script: str, launch: Callable[[list[str], Path], int], word: str) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(script)
        # This process has imported torch already, which takes seconds.
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_be_launcher, args=(folder, launch, word))
        self.process.start()

    def wait_for_ranks(self, attempt: str = "") -> list[int]:
        """Return the process ids of ranks 0 and 1, once both run."""
        files = [self.folder / f"pid_{rank}{attempt}" for rank in (0, 1)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), deadline_s=DEADLINE_S)
        time.sleep(0.3)  # elastic's watch begins right after it has started them
        return [int(file.read_text()) for file in files]

    def send(self, number: int) -> None:
        """Send the launcher a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def read(self, name: str) -> str:
        return (self.folder / name).read_bytes().decode()

    def finish(self) -> tuple[int | None, str, str]:
        """Return exit code, stdout and stderr, after checking that no process is left."""
        self.process.join(DEADLINE_S)
        assert self.find_processes() == []
        return self.process.exitcode, self.read("stdout"), self.read("stderr")

    def find_processes(self) -> list[psutil.Process]:
        """Return the ranks, and what they started, that are alive; all have the folder in their command line."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status"])
            if str(self.folder) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def kill(self) -> None:
        """End what is left of it."""
        for process in self.find_processes():
            process.kill()
        self.process.kill()
        self.process.join()


def keep_launches(
    folder: Path, script: str, launch: Callable[[list[str], Path], int]
) -> Iterator[Callable[[str], Launch]]:
    """Give a test what starts a `Launch` with a word; end them all after it."""
    launches: list[Launch] = []

    def start(word: str) -> Launch:
        launches.append(Launch(folder, script, launch, word))
        return launches[-1]

    yield start
    for started in launches:
        started.kill()


def _be_launcher(folder: Path, launch: Callable[[list[str], Path], int], word: str) -> None:
    os.setsid()  # its own process group, as a shell gives it
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))  # not what pytest captures with
    os.environ |= {"PYTHONPATH": str(Path(lorashard.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    sys.exit(launch([sys.executable, str(folder / "rank.py"), str(folder), word, "$$HOME"], folder))


def wait_for_steps(run: Path, process: subprocess.Popen[str], num_steps: int = 1) -> None:
    """Wait until a run in the folder `run` has logged that many steps."""
    metrics = run / "metrics.jsonl"
    wait_until(
        lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count('"loss"') >= num_steps),
        deadline_s=DEADLINE_S,
    )
    assert process.poll() is None, process.communicate()
