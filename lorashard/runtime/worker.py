"""A rank's first steps: it ties its life and its output to its launcher, and tells it its process id.

`python -m lorashard.runtime.worker LAUNCHER_PID LOGS_DIR CPUS COMMAND...` becomes COMMAND. CPUS is JSON:
for each rank of this machine the logical CPUs that it runs on, or [] for all. Imports nothing but the standard library,
and files that do the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from .output import TERMINAL_VARIABLE

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PID_PREFIX = "pid-"


def main() -> None:
    """Prepare this process and become the command."""
    launcher_pid, logs_dir, cpus, *command = sys.argv[1:]
    die_with_launcher(int(launcher_pid))
    # A request to stop or to save waits until the command can take it, instead of killing what has not come so far.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(f"{_PID_PREFIX}{os.getpid()}").touch()
    rank = int(os.environ["RANK"])
    if rank == 0:  # the one whose log the person is shown
        terminal = os.dup(2)
        os.set_inheritable(terminal, True)
        os.environ[TERMINAL_VARIABLE] = str(terminal)
    # Appending, since both streams share the file, and a resumed run its log.
    log = os.open(find_log(Path(logs_dir), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _bind(json.loads(cpus))
    os.execvp(command[0], command)


def die_with_launcher(launcher_pid: int) -> None:
    """Have the kernel kill this process when its launcher dies, be it by SIGKILL, which the launcher cannot pass on.

    Only Linux can: elsewhere a rank outlives a launcher that was killed, until its next collective fails.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher_pid:  # it died before the kernel was asked
        sys.exit(1)


def _bind(cpus_of_ranks: list[list[int]]) -> None:
    """Run this process, and so all of its threads and the memory that they touch first, on its GPU's NUMA node."""
    if cpus_of_ranks:
        try:
            os.sched_setaffinity(0, cpus_of_ranks[int(os.environ["LOCAL_RANK"])])
        except OSError as error:
            print(f"this rank is not bound to its GPU's NUMA node: {error.strerror}", file=sys.stderr)


def find_log(logs_dir: Path, rank: int) -> Path:
    """Return where a rank writes its output."""
    return logs_dir / f"rank_{rank}.log"


def find_pids(notes_dir: Path) -> list[int]:
    """Return the process ids of the ranks that have noted below the launcher's folder that signals may come."""
    return [int(path.name.removeprefix(_PID_PREFIX)) for path in notes_dir.rglob(f"{_PID_PREFIX}*")]


if __name__ == "__main__":
    main()
