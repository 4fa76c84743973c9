"""Processes that outlive the web UI: each has a session of its own, and its exit code is written to a file.

`start` runs this file as a script, which forks: one process ends once the command runs, so that the server has no
zombie to wait for, and the other waits for the command's end. Imports only the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Variables of the server, of a launcher around it, or of a run's own processes, which a command must not inherit.
_OTHERS_PREFIXES = ("GRADIO_", "TORCHELASTIC_", "ACCELERATE_")
PROGRESS_FILE_VARIABLE = "LORASHARD_PROGRESS_FILE"  # of lorashard.runtime.progress, which needs tqdm
_FAILURE_FILE_VARIABLE = "LORASHARD_FAILURE_FILE"  # of lorashard.runtime.failures
_OTHERS_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LORASHARD_RESULT_FILE",
    "LORASHARD_RESTARTS",
    "LORASHARD_TERMINAL_FD",
    PROGRESS_FILE_VARIABLE,
    _FAILURE_FILE_VARIABLE,
)
_COULD_NOT_START = 127  # a shell's
START_S = 30.0  # a start may take so long


def start(
    command: Sequence[str], log: Path, exit_file: Path, process_file: Path, progress_file: Path | None = None
) -> None:
    """Start a command, and return when it runs or could not be started.

    Args:
        log: its output is appended here.
        exit_file: gets `exit_code`, 128 + n if signal n ended it, `time`, when it has ended, and the `failure` that a
            command of lorashard has reported, or null.
        process_file: gets its `pid`, its `begin_s`, and the `waiter_pid` of the process that waits for its end.
        progress_file: where a command of lorashard writes its progress.

    Raises:
        OSError, subprocess.SubprocessError: no process could be started at all.
    """
    _failure_file(exit_file).unlink(missing_ok=True)  # of an earlier start
    words = [sys.executable, "-P", __file__, str(log), str(exit_file), str(process_file), *command]
    files = {PROGRESS_FILE_VARIABLE: progress_file, _FAILURE_FILE_VARIABLE: _failure_file(exit_file)}
    subprocess.run(
        words,
        env=build_environment(os.environ) | {name: str(file) for name, file in files.items() if file},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=START_S,
        check=False,
    )


def build_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the server's own variables."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OTHERS_PREFIXES) and name not in _OTHERS_VARIABLES
    }


def main() -> None:
    """Start the command, and wait for it."""
    log, exit_file, process_file, *command = sys.argv[1:]
    is_started, say_started = os.pipe()
    if os.fork():
        os.close(say_started)
        os.read(is_started, 1)  # also returns when the other process ends
        return
    os.close(is_started)
    os.setsid()
    # A server under nohup ignores SIGHUP, and one in a shell's background SIGINT; its runs must not.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with open(log, "ab", buffering=0) as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            message = f"{command[0]} cannot be started: {error.strerror}"
            output.write(f"lorashard: error: {message}\n".encode())
            _replace(exit_file, {"exit_code": _COULD_NOT_START, "time": time.time(), "failure": {"message": message}})
            return
    _replace(process_file, {"pid": process.pid, "begin_s": time.time(), "waiter_pid": os.getpid()})
    os.write(say_started, b"1")
    os.close(say_started)
    code = process.wait()
    failure = _take_failure(exit_file) if code != 0 else None  # ranks that were started again have failed as well
    _replace(exit_file, {"exit_code": code if code >= 0 else 128 - code, "time": time.time(), "failure": failure})


def _failure_file(exit_file: str | Path) -> Path:
    return Path(f"{exit_file}.failure")


def _take_failure(exit_file: str) -> Any:
    """Return what the command has left of its failure, and remove the file."""
    file = _failure_file(exit_file)
    try:
        failure = json.loads(file.read_bytes())
        file.unlink()
    except (OSError, ValueError):  # there is none, or the disk was full
        return None
    return failure


def _replace(path: str, content: dict[str, Any]) -> None:
    """Write a file atomically; do nothing if its folder has been deleted."""
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(partial, path)
    except FileNotFoundError:
        pass


if __name__ == "__main__":
    main()
