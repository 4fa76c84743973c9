"""Asks lorashard what needs torch, in processes of their own: this server has none, and holds no memory of a GPU.

A process begins with the first question (seconds, while torch is loaded) and answers the next ones at once. It ends by
itself when nobody asks for a while, with the server, and by `close`, which whoever starts a run calls first: a process
that has planned for GPUs keeps some of their memory. Questions and answers are lines of JSON through pipes.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import IO, Any

from lorashard.errors import ConfigError
from lorashard.launch.elastic import find_python_flags

from . import worker_main

_IDLE_S = 90.0
_IDLE_SLACK_S = 15.0  # the process waits this much longer than the server, so that no question meets its end
_TIMEOUT_S = 180.0
_CHECK_TIMEOUT_S = 3600.0  # reads every row of the data
_KEEP_S = 60.0  # how long an answer stands: free memory and files change
_KEPT_ANSWERS = 64

_log = logging.getLogger(__name__)


class Worker:
    """Answers as `lorashard plan`, `preview` and `validate` do; safe to use from several threads.

    Args:
        idle_s: seconds without a question after which a process ends.
        timeout_s: seconds after which a process that has not answered is ended.
        command: starts a process, for tests.
    """

    def __init__(
        self, idle_s: float = _IDLE_S, timeout_s: float = _TIMEOUT_S, command: Sequence[str] | None = None
    ) -> None:
        command = command or [
            sys.executable, *find_python_flags(), "-m", worker_main.__name__, str(idle_s + _IDLE_SLACK_S),
        ]  # fmt: skip
        # A check of large data takes minutes, and must not keep the plan waiting.
        self._quick = _Process(command, idle_s)
        self._slow = _Process(command, idle_s)
        self._timeout_s = timeout_s
        self._answers: OrderedDict[str, tuple[float, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the plan of a run as `lorashard plan --json` does.

        Args:
            words: of the command line, such as `["--model_name_or_path", "org/model"]`.

        Raises:
            ConfigError: what the command would say, or that the process has ended or does not answer.
        """
        return self._ask("plan", list(words))

    def preview(self, words: Sequence[str], num_rows: int = 3) -> list[dict[str, Any]]:
        """Return the first rows with their tokens, as the fields of `lorashard.data.preview.PreviewRow`.

        Raises:
            ConfigError: as `plan`.
        """
        return self._ask("preview", list(words), num_rows)

    def describe_model(self, name: str, revision: str | None = None) -> str:
        """Return a model's size and where it was found.

        Raises:
            ConfigError: as `plan`.
        """
        return self._ask("describe_model", name, revision)

    def validate(self, words: Sequence[str]) -> Iterator[str]:
        """Yield a line for each thing that is right.

        Raises:
            ConfigError: the first that is wrong; or as `plan`.
        """
        for message in self._slow.ask(("validate", list(words)), _CHECK_TIMEOUT_S):
            if "line" in message:
                yield message["line"]

    def close(self) -> None:
        """End the processes, and with them what they hold of GPUs. The next question starts new ones."""
        self._quick.close()
        self._slow.close()
        with self._lock:
            self._answers.clear()

    def _ask(self, *question: Any) -> Any:
        key = json.dumps(question)
        with self._lock:
            begin_s, answer = self._answers.get(key, (0.0, None))
        if begin_s and time.monotonic() - begin_s < _KEEP_S:
            return answer
        for message in self._quick.ask(question, self._timeout_s):
            answer = message.get("answer")
        with self._lock:
            self._answers[key] = time.monotonic(), answer
            while len(self._answers) > _KEPT_ANSWERS:
                self._answers.popitem(last=False)
        return answer


class _Process:
    """One process at a time, which answers one question at a time."""

    def __init__(self, command: Sequence[str], idle_s: float) -> None:
        self._command = command
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._last_s = 0.0
        self._closing = threading.Lock()
        self._is_closing = False
        self._num_closings = 0
        self._buffer = b""

    def ask(self, question: Sequence[Any], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the messages that answer a question; the last is its answer.

        Raises:
            ConfigError: the question was wrong, or the process ended or did not answer in time.
        """
        what = {"describe_model": "the model's size", "validate": "the check"}.get(question[0], f"the {question[0]}")
        num_closings = self._num_closings
        with self._lock:
            is_over = False
            try:
                process = self._start() if num_closings == self._num_closings else None
                if process is None or self._is_closing:  # it may have begun after `close` had looked
                    raise ConfigError(f"{what} was not asked for any more, since a run was started: try again")
                assert process.stdin is not None
                try:
                    process.stdin.write(json.dumps(question).encode() + b"\n")
                    process.stdin.flush()
                except OSError:
                    raise ConfigError(f"{what} cannot be told: {self._explain_end(process)}") from None
                end_s = time.monotonic() + timeout_s
                while True:
                    message = self._read(process, end_s, what, timeout_s)
                    if "error" in message:
                        is_over = True
                        raise ConfigError(message["error"])
                    is_over = "answer" in message
                    yield message
                    if is_over:
                        return
            finally:  # also where nobody reads on: the rest of this answer is no answer to the next question
                self._last_s = time.monotonic()
                if not is_over:
                    self._end()

    def close(self) -> None:
        """End the process, whatever it does, and turn away the questions that wait for it."""
        with self._closing:
            self._is_closing = True
            self._num_closings += 1
            try:
                process = self._process
                if process is not None:
                    process.kill()  # whoever waits for its answer sees it end, and lets go of the lock
                with self._lock:
                    self._end()
            finally:
                self._is_closing = False

    def _start(self) -> subprocess.Popen[bytes]:
        is_stale = time.monotonic() - self._last_s > self._idle_s
        if self._process is not None and (is_stale or self._process.poll() is not None):
            self._end()
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )
            self._buffer = b""
        return self._process

    def _read(self, process: subprocess.Popen[bytes], end_s: float, what: str, timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise ConfigError(f"{what} took more than {timeout_s:.0f} s and was given up: try again")
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise ConfigError(f"{what} cannot be told: {self._explain_end(process)}")
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _explain_end(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        last = ""
        if self._errors is not None:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
            if not self._is_closing:
                _log.warning("the worker ended %s:\n%s", how, said)
            last = f" ({said.splitlines()[-1]})" if said else ""
        return f"the process that finds it out ended {how}{last}: try again"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                if pipe is not None:
                    _close_quietly(pipe)
        self._process = self._errors = None


def _close_quietly(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was not yet written to a process that is gone
        return
