"""A model loaded for the chat: a process that all browsers share and that ends with the server.

The process is `lorashard chat RUN --json`. It ends when the kernel closes its pipes, even if the server was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from lorashard.errors import ConfigError
from lorashard.launch.elastic import find_python_flags
from lorashard.runtime.failures import FAILURE_FILE_VARIABLE

from ..reading.sanitize import show_safely

_WATCH_INTERVAL_S = 0.5
_GRACE_S = 20.0
_READ_S = 5.0
_KEPT_LINES = 40
_TOLD_LINES = 3
_NO_TEMPLATE = "the tokenizer has no chat template: each message is a prompt to complete, without the earlier ones"

State = Literal["loading", "ready", "answering", "ended"]


@dataclass(frozen=True)
class Piece:
    """The next part of an answer."""

    source: str
    text: str


@dataclass(frozen=True)
class End:
    """The end of an answer."""

    source: str
    num_tokens: int
    seconds: float
    is_cut: bool
    is_canceled: bool


@dataclass(frozen=True)
class Waiting:
    """Why there is no answer yet."""

    sentence: str


Event = Piece | End | Waiting


@dataclass(eq=False)
class _Turn:
    """A question, from when it is queued until its last answer has ended."""

    asker: str
    open_sources: set[str]
    events: SimpleQueue[Event | ConfigError | None] = field(default_factory=SimpleQueue)
    is_canceled: bool = False


class Chat:
    """A run's model in a process of its own. It answers one question at a time; others wait and see why."""

    def __init__(
        self, name: str, folder: Path, device_words: Sequence[str], idle_s: float, checkpoint: str = ""
    ) -> None:
        self.name = name
        self.checkpoint = checkpoint
        self.device_words = tuple(device_words)
        self._has_chat_template = True
        self._placement = ""
        self._idle_s = idle_s
        self._used_s = time.monotonic()
        self._unload_s: float | None = None
        self._end_reason: str | None = None
        self._is_ready = False
        self._turn: _Turn | None = None
        self._waiting: list[_Turn] = []
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._changed = threading.Condition()
        self._failure = tempfile.NamedTemporaryFile(prefix="lorashard-chat-")  # noqa: SIM115  as long as the process
        words = ["-m", "lorashard", "chat", str(folder), "--json", *device_words]
        self._process = subprocess.Popen(
            [sys.executable, *find_python_flags(), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {FAILURE_FILE_VARIABLE: self._failure.name},
            start_new_session=True,  # Ctrl-C in the server's terminal is the server's
        )
        self._readers = [threading.Thread(target=work, daemon=True) for work in (self._note, self._hear)]
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in (*self._readers, self._watcher):
            thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it is loaded or loading."""
        return self._process.poll() is None and self._unload_s is None

    @property
    def is_unloaded(self) -> bool:
        """Whether it was unloaded on purpose."""
        return self._unload_s is not None

    @property
    def state(self) -> State:
        """What it does."""
        with self._changed:
            if self._end_reason is not None:
                return "ended"
            if not self._is_ready:
                return "loading"
            return "ready" if self._turn is None else "answering"

    def describe(self) -> str:
        """Return a sentence for the user: the state of loading, the placement, or why it has ended."""
        state = self.state
        with self._changed:
            if state == "ended":
                return self._end_reason or ""
            if state == "loading":
                return self._lines[-1] if self._lines else "starting its process"
            if not self._has_chat_template:
                return f"{self._placement}; {_NO_TEMPLATE}"
            return self._placement

    def answer(
        self, asker: str, talks: Mapping[str, Sequence[Mapping[str, str]]], settings: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Ask, and yield why one has to wait, then the answers of each source in turn.

        Closing the iterator cancels the answer.

        Args:
            asker: identifies who asks, for `cancel`.
            talks: by source (`base`, `adapter`): messages; without a chat template, the last is a prompt to complete.
            settings: as in a request to `lorashard chat --json`.

        Raises:
            ConfigError: the question is refused, or the process has ended.
        """
        turn = _Turn(asker, set(talks))
        with self._changed:
            self._waiting.append(turn)
        try:
            while (sentence := self._begin(turn, talks, settings)) is not None:
                yield Waiting(sentence)
            yield from _join_pieces(turn.events)
        finally:
            self._leave(turn)

    def cancel(self, asker: str) -> None:
        """Cancel this asker's answers and waiting questions."""
        with self._changed:
            for turn in [*self._waiting, self._turn]:
                if turn is not None and turn.asker == asker:
                    turn.is_canceled = True
            if self._turn is not None and self._turn.is_canceled:
                self._send({"cancel": True})
            self._changed.notify_all()

    def unload(self, reason: str = "unloaded") -> None:
        """Start to end the process, whatever it does."""
        with self._changed:
            if self._unload_s is not None:
                return
            self._unload_s = time.monotonic()
            self._end_reason = self._end_reason or reason
            self._changed.notify_all()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait until the process is gone."""
        self._watcher.join()

    def _begin(
        self, turn: _Turn, talks: Mapping[str, Sequence[Mapping[str, str]]], settings: Mapping[str, Any]
    ) -> str | None:
        """Send a question if it is its turn; otherwise return, after some time, what it waits for."""
        with self._changed:
            is_free = self._is_ready and self._turn is None
            if not is_free and self._end_reason is None and not turn.is_canceled:
                self._changed.wait(_WATCH_INTERVAL_S)
                is_free = self._is_ready and self._turn is None
            if self._end_reason is not None:
                raise ConfigError(f"not answered: {self._end_reason}")
            if turn.is_canceled:
                turn.events.put(None)
                return None
            if is_free:
                self._turn = turn
                asked = {
                    source: list(messages) if self._has_chat_template else messages[-1]["content"]
                    for source, messages in talks.items()
                }
                self._send({"conversations": asked, **settings})
                return None
            is_loading = not self._is_ready
        return f"loading: {self.describe()}" if is_loading else "another tab is being answered; yours is next"

    def _leave(self, turn: _Turn) -> None:
        with self._changed:
            self._waiting.remove(turn)
            if self._turn is turn and not turn.is_canceled:
                self._send({"cancel": True})

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._used_s = time.monotonic()
        if self._process.stdin.closed:
            return
        with suppress(BrokenPipeError):  # it has ended, as reading its stdout shows
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self) -> None:
        """Read the answers of the process."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                said = None
            if not isinstance(said, dict):  # a library has printed something
                self._keep(line)
                continue
            with self._changed:
                self._take(said)
                self._changed.notify_all()

    def _take(self, said: dict[str, Any]) -> None:
        self._used_s = time.monotonic()
        if said.pop("ready", False):
            self._is_ready = True
            self._placement = str(said["placement"])
            self._has_chat_template = bool(said["has_chat_template"])
            return
        turn = self._turn
        if turn is None:
            return
        if "error" in said:
            turn.events.put(ConfigError(str(said["error"])))
            turn.open_sources.clear()
        elif said.pop("is_end", False):
            turn.events.put(End(**said))
            turn.open_sources.discard(said["source"])
        else:
            turn.events.put(Piece(**said))
        if not turn.open_sources:
            turn.events.put(None)
            self._turn = None

    def _note(self) -> None:
        """Keep the last lines that the process logs."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        if text := show_safely(line.decode("utf-8", errors="replace")).strip():
            with self._changed:
                self._lines.append(text)

    def _watch(self) -> None:
        """Unload an idle model, kill a process that does not end, and wake those who wait once it has ended."""
        while self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_WATCH_INTERVAL_S)
            now_s = time.monotonic()
            if self._unload_s is not None and now_s > self._unload_s + _GRACE_S:
                self._process.kill()  # its ranks end with it
            elif self.state == "ready" and now_s > self._used_s + self._idle_s:
                self.unload(f"unloaded after {self._idle_s / 60:.0f} minutes without a question")
        for reader in self._readers:
            reader.join(_READ_S)  # unless a child that outlived it holds the pipe
        with self._changed:
            self._end_reason = self._end_reason or self._explain_end(self._process.returncode)
            if self._turn is not None:
                self._turn.events.put(ConfigError(f"the answer has been cut off: {self._end_reason}"))
                self._turn = None
            self._changed.notify_all()
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._failure.close()

    def _explain_end(self, exit_code: int) -> str:
        with suppress(ValueError, KeyError):  # nothing was written, or not all of it
            return str(json.loads(self._failure.read())["message"])
        said = " | ".join(list(self._lines)[-_TOLD_LINES:])
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            why = f"{name} ended its process" + (" (the memory may have run out)" if name == "SIGKILL" else "")
        else:
            why = f"its process ended with exit code {exit_code}"
        return f"{why}: {said}" if said else why


def _join_pieces(events: SimpleQueue[Event | ConfigError | None]) -> Iterator[Event]:
    """Yield events as they come; pieces that came meanwhile are joined."""
    piece: Piece | None = None
    while True:
        if piece is not None and events.empty():
            yield piece
            piece = None
        event = events.get()
        if isinstance(event, Piece) and piece is not None and event.source == piece.source:
            piece = Piece(piece.source, piece.text + event.text)
            continue
        if piece is not None:
            yield piece
            piece = None
        if isinstance(event, Piece):
            piece = event
        elif event is None:
            return
        elif isinstance(event, ConfigError):
            raise event
        else:
            yield event
