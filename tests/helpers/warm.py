"""Programs as tests start them, in processes that have imported everything: `run` and `Popen` as in `subprocess`.

See `helpers.zygote` for what is real about them.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.zygote import ForkingPopen, be_zygote

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Libraries read these when they are imported, so programs that differ in one are forked from different processes.
_SETTINGS = (
    "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_HUB_DISABLE_XET",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)
_zygotes: dict[str, tuple[subprocess.Popen | _Forked, socket.socket]] = {}


class _Forked:
    """A process that is waited for as a `Popen` is."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_alive = True

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> None:
        self._wait(0)

    def _wait(self, flags: int) -> int | None:
        if self._is_alive:
            with suppress(ChildProcessError):
                if os.waitpid(self._pid, flags)[0] == 0:
                    return None
            self._is_alive = False
        return 0


def fork_zygote() -> None:
    """Let programs be forked from a copy of this process, which has imported all that the tests do."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        be_zygote(theirs)
    theirs.close()
    _keep(_read_settings(os.environ), _Forked(pid), ours)


class Popen(ForkingPopen):
    """`subprocess.Popen` whose Python is forked from one that has imported everything; it is a child all the same."""

    def _fork(self, words: list[str], environment: dict[str, str], folder: str, streams: Sequence[int]) -> int:
        settings = _read_settings(environment)
        request = {
            "words": words,
            "environment": environment,
            "folder": folder,
            "has_own_session": self._has_own_session,
        }
        process = ctypes.CDLL(None)
        process.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            answer = _ask(settings, request, streams) or _ask(settings, request, streams)
            assert answer, "two processes that fork have ended: their stderr says why"
            return int(answer)
        finally:
            process.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def run(command: Sequence[Any], *, timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess:
    """`subprocess.run`, but warm."""
    given = options.pop("input", None)
    is_checked = options.pop("check", False)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen([str(word) for word in command], **options) as process:
        try:
            stdout, stderr = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    result = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if is_checked:
        result.check_returncode()
    return result


def _read_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in _SETTINGS if name in environment}


def _ask(settings: dict[str, str], request: dict[str, Any], streams: Sequence[int]) -> bytes:
    """Return the id of the process that was forked; nothing where the one that forks has ended, which is forgotten."""
    requests = _find_zygote(settings)
    with suppress(ConnectionError):
        socket.send_fds(requests, [json.dumps(request).encode()], list(streams))
        answer = requests.recv(100)
        if answer:
            return answer
    del _zygotes[json.dumps(settings)]
    return b""


def _find_zygote(settings: dict[str, str]) -> socket.socket:
    key = json.dumps(settings)
    if key not in _zygotes or _zygotes[key][0].poll() is not None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        home = os.path.join(tempfile.gettempdir(), "lorashard-tests-home-of-nobody")
        names = ("PYTHONPATH", *_SETTINGS)
        kept = {name: value for name, value in os.environ.items() if name not in names}
        environment = kept | settings | {"HF_HOME": home}
        command = [sys.executable, str(Path(__file__).with_name("zygote.py")), str(theirs.fileno())]
        process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        _keep(settings, process, ours)
    return _zygotes[key][1]


def _keep(settings: dict[str, str], process: subprocess.Popen | _Forked, requests: socket.socket) -> None:
    _zygotes[json.dumps(settings)] = process, requests
    atexit.register(_end, process, requests)


def _end(process: subprocess.Popen | _Forked, requests: socket.socket) -> None:
    requests.close()
    process.wait()
