"""Run what needs torch in processes of their own: the server does not import it, and holds no GPU memory.

A process starts with the first question (seconds, while torch is imported) and answers the next ones at once. It ends
when it has been idle for a while, with the server, and by `close`, which is called before a run starts where there are
GPUs: a process that has planned for them keeps some of their memory. Questions and answers are JSON messages through
pipes.

A pool of a library (loky, `concurrent.futures`) does not fit: an answer may come line by line, and is canceled by
killing the process.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

from lorashard.errors import ConfigError
from lorashard.launch.elastic import find_python_flags

from . import worker_main

_IDLE_S = 300.0
_IDLE_SLACK_S = 15.0  # the process waits this much longer than the server, so that no question meets its end
_TIMEOUT_S = 180.0
_CHECK_TIMEOUT_S = 3600.0  # reads every row of the data
_KEEP_S = 60.0  # how long an answer stands: free memory and files change
_KEPT_ANSWERS = 64
_REST_S = 0.5
_LONGEST_REST_S = 5.0

_log = logging.getLogger(__name__)


class Canceled(ConfigError):
    """A question was not answered, for a reason that is not its own: it may be asked again."""


class Worker:
    """Answers as `lorashard plan`, `preview` and `validate` do; safe to use from several threads.

    Args:
        idle_s: seconds without a question after which a process ends.
        timeout_s: seconds after which a process that has not answered is ended.
        rest_s: seconds after a plan in which the next one is likely, as `wait_for_rest` waits for.
        command: starts a process, for tests.
    """

    def __init__(
        self,
        idle_s: float = _IDLE_S,
        timeout_s: float = _TIMEOUT_S,
        rest_s: float = _REST_S,
        command: Sequence[str] | None = None,
    ) -> None:
        command = command or [
            sys.executable, *find_python_flags(), "-m", worker_main.__name__, str(idle_s + _IDLE_SLACK_S),
        ]  # fmt: skip
        # A check of large data takes minutes, and must not keep the plan waiting.
        self._quick = _Process(command, idle_s)
        self._slow = _Process(command, idle_s)
        self._timeout_s = timeout_s
        self._rest_s = rest_s
        self._answers: OrderedDict[str, tuple[float, dict[str, Any]]] = OrderedDict()
        self._asking: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._num_planning = 0
        self._planned_s = -math.inf

    def warm_up(self) -> None:
        """Start the process of the plan, so that the first question does not wait for torch.

        Raises:
            ConfigError: the process has ended or does not answer.
        """
        for _ in self._quick.ask(("warm_up",), self._timeout_s):
            pass

    def plan(self, words: Sequence[str], gpu_type: str | None = None, num_gpus: int = 1) -> dict[str, Any]:
        """Return the plan of a run as `lorashard plan --json` does.

        Args:
            words: of the command line, such as `["--model_name_or_path", "org/model"]`.
            gpu_type: to plan for `num_gpus` of these in place of this machine.

        Raises:
            ConfigError: that of the command; or the process has ended or does not answer.
        """
        with self._lock:
            self._num_planning += 1
        try:
            return self._ask("plan", list(words), gpu_type, num_gpus)
        finally:
            with self._lock:
                self._num_planning -= 1
                self._planned_s = time.monotonic()

    def wait_for_rest(self) -> None:
        """Return once `rest_s` have passed since the last plan, or after five seconds.

        While somebody types, an estimate would keep the next plan waiting, and be of options that have changed.
        """
        begin_s = time.monotonic()
        while (now_s := time.monotonic()) < begin_s + _LONGEST_REST_S:
            rest_s = self._rest_s if self._num_planning else max(begin_s, self._planned_s) + self._rest_s - now_s
            if rest_s <= 0:
                return
            time.sleep(rest_s)

    def preview(self, words: Sequence[str], num_rows: int = 3, max_tokens: int | None = None) -> list[dict[str, Any]]:
        """Return the first rows with their tokens, as the fields of `lorashard.data.preview.PreviewRow`.

        Args:
            max_tokens: of a sequence, beyond which the tokens in its middle are left out.

        Raises:
            ConfigError: as `plan`.
        """
        return self._ask("preview", list(words), num_rows, max_tokens)

    def estimate(
        self,
        words: Sequence[str],
        gpu_type: str | None = None,
        num_gpus: int = 1,
        data_words: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Return what a run is expected to take, as the fields of `lorashard.planning.estimate.Estimate`.

        Args:
            gpu_type, num_gpus: as for `plan`.
            data_words: those of `words` that decide what the examples are, so that others do not count them anew.

        Raises:
            ConfigError: as `plan`.
        """
        num_closings, machine = self._quick.num_closings, (gpu_type, num_gpus)
        plan = self._ask("plan", list(words), *machine, num_closings=num_closings)
        survey = self._ask("survey", list(words if data_words is None else data_words), num_closings=num_closings)
        return self._ask("estimate", list(words), plan, survey, *machine, num_closings=num_closings)

    def describe_model(self, name: str, revision: str | None = None) -> str:
        """Return a model's size and where it was found.

        Raises:
            ConfigError: as `plan`.
        """
        return self._ask("describe_model", name, revision)

    def validate(self, words: Sequence[str]) -> Iterator[str]:
        """Yield a line for each check that passed.

        Raises:
            ConfigError: the first that is wrong; or as `plan`.
        """
        for message in self._slow.ask(("validate", list(words)), _CHECK_TIMEOUT_S):
            if "line" in message:
                yield message["line"]

    def close(self) -> None:
        """End the processes, which frees their GPU memory. The next question starts new ones."""
        self._quick.close()
        self._slow.close()
        with self._lock:
            self._answers.clear()

    def _ask(self, *question: Any, num_closings: int | None = None) -> Any:
        key = json.dumps(question)
        if num_closings is None:
            num_closings = self._quick.num_closings
        with self._lock:
            asking = self._asking.setdefault(key, threading.Lock())
        try:
            with asking:  # who asks the same meanwhile, such as another panel, waits for this answer
                with self._lock:
                    begin_s, answer = self._answers.get(key, (0.0, {}))
                if begin_s and time.monotonic() - begin_s < _KEEP_S:
                    return _read_answer(answer)
                try:
                    for message in self._quick.ask(question, self._timeout_s, num_closings):
                        answer = message
                except Canceled:
                    raise
                except ConfigError as error:  # it takes as long as an answer, and several panels ask for it
                    answer = {"error": error.to_json()}
                with self._lock:
                    self._answers[key] = time.monotonic(), answer
                    while len(self._answers) > _KEPT_ANSWERS:
                        self._answers.popitem(last=False)
                return _read_answer(answer)
        finally:
            with self._lock:
                self._asking.pop(key, None)


def _read_answer(message: dict[str, Any]) -> Any:
    if "error" in message:
        raise ConfigError.of_json(message["error"])
    return message["answer"]


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
        self.num_closings = 0
        self._questions: Connection | None = None
        self._answers: Connection | None = None

    def ask(
        self, question: Sequence[Any], timeout_s: float, num_closings: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the messages that answer a question; the last is its answer.

        Args:
            num_closings: when the question was asked; None: now.

        Raises:
            ConfigError: the answer, or the process ended or did not answer in time.
        """
        names = {"describe_model": "the model's size", "validate": "the check", "survey": "counting the examples"}
        what = (names | {"warm_up": "loading torch"}).get(question[0], f"the {question[0]}")
        num_closings = self.num_closings if num_closings is None else num_closings
        with self._lock:
            is_over = False
            try:
                process = self._start() if num_closings == self.num_closings else None
                if process is None or self._is_closing:  # it may have begun after `close` had looked
                    raise Canceled(f"{what} was canceled, since a run was started", fix="try again")
                assert self._questions is not None
                with suppress(OSError):  # it has ended, as reading shows
                    self._questions.send_bytes(json.dumps(question).encode())
                end_s = time.monotonic() + timeout_s
                while True:
                    message = self._read(process, end_s, what, timeout_s)
                    if "error" in message:
                        is_over = True
                        raise ConfigError.of_json(message["error"])
                    is_over = "answer" in message
                    yield message
                    if is_over:
                        return
            finally:  # also if nobody reads on: the rest of this answer must not answer the next question
                self._last_s = time.monotonic()
                if not is_over:
                    self._end()

    def close(self) -> None:
        """End the process, whatever it does, and refuse the questions that wait for it."""
        with self._closing:
            self._is_closing = True
            self.num_closings += 1
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
            assert self._process.stdin is not None and self._process.stdout is not None
            self._questions = Connection(os.dup(self._process.stdin.fileno()), readable=False)
            self._answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
            self._process.stdin.close()
            self._process.stdout.close()
        return self._process

    def _read(self, process: subprocess.Popen[bytes], end_s: float, what: str, timeout_s: float) -> dict[str, Any]:
        assert self._answers is not None
        if not self._answers.poll(max(0.0, end_s - time.monotonic())):
            raise Canceled(f"{what} took more than {timeout_s:.0f} s and was canceled", fix="try again")
        try:
            return json.loads(self._answers.recv_bytes())
        except (EOFError, OSError):
            raise Canceled(f"{what} failed: {self._explain_end(process)}", fix="try again") from None

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
        return f"its process ended {how}{last}"

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._questions, self._answers, self._errors):
                if pipe is not None:
                    pipe.close()
        self._process = self._errors = self._questions = self._answers = None
