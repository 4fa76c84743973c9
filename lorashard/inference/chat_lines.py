"""Where a chat's questions come from and its answers go: lines of a person, or JSON lines of a program."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import ValidationError

from ..config.options import to_config_error
from ..config.use_options import AnswerOptions, ChatOptions, ChatRequest, Source
from ..data.formats import Message
from ..errors import ConfigError
from ..runtime.output import RESULT_FILE_VARIABLE, say

_READ_BYTES = 65536
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Ask:
    """A request; the same on every rank.

    Attributes:
        sources: which models answer, in order.
        content: the next message of the stored conversation.
        conversations: to be answered as they are, by source, instead of `content`.
        seed: of the sampling; None: a different one for each answer.
    """

    kind: Literal["nothing", "reset", "answer"]
    options: ChatOptions
    sources: tuple[Source, ...] = ()
    content: str = ""
    conversations: dict[Source, str | list[Message]] | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Answered:
    """How an answer ended."""

    source: Source
    num_tokens: int
    seconds: float
    is_cut: bool
    is_canceled: bool


class Listener:
    """Asks and is answered, on rank 0; this base class does neither, for the other ranks."""

    def greet(self, placement: str, has_chat_template: bool) -> None:
        """Announce that questions may come."""

    def read(self, patience_s: float) -> Ask | None:
        """Return the next request, one of the kind `nothing` if there is none in this time, None at the end."""

    def is_canceled(self) -> bool:
        """Return, without waiting, whether the current answer is no longer wanted."""
        return False

    def begin(self, source: Source) -> None:
        """Begin an answer."""

    def add(self, source: Source, text: str) -> None:
        """Continue an answer."""

    def end(self, answered: Answered) -> None:
        """End an answer."""

    def refuse(self, reason: str) -> None:
        """Report why there is no answer."""

    def confirm_reset(self) -> None:
        """Report that the stored conversations are gone."""


@contextlib.contextmanager
def open_listener(options: ChatOptions) -> Iterator[Listener]:
    """Open this process's own terminal, or the pipes to the launcher's terminal, which lie beside its result file."""
    kind = _Program if options.as_json else _Person
    result_file = os.environ.get(RESULT_FILE_VARIABLE)
    if result_file is None:
        yield kind(_Terminal(sys.stdin.fileno(), sys.stdout), options)
        return
    folder = Path(result_file).parent
    with (
        (folder / "stdin").open("rb", buffering=0) as lines,
        (folder / "stdout").open("w", encoding="utf-8") as answers,
    ):
        yield kind(_Terminal(lines.fileno(), answers), options)


class _Terminal:
    """Reads lines and writes answers."""

    def __init__(self, input_descriptor: int, output: TextIO) -> None:
        self._input = input_descriptor
        self._output = output
        self._read = b""
        self._is_ended = False
        self.is_gone = False
        """Whether nobody reads the answers any more."""

    def write(self, text: str) -> None:
        try:
            self._output.write(text)
            self._output.flush()
        except BrokenPipeError:
            self.is_gone = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._output.fileno())  # for what is left in the buffer

    def read_line(self, patience_s: float) -> str | None:
        """Return the next line with its end, an empty text if there is none in this time, None at the input's end."""
        if self.is_gone:
            return None
        while b"\n" not in self._read and not self._is_ended:
            if not select.select([self._input], [], [], patience_s)[0]:
                return ""
            chunk = os.read(self._input, _READ_BYTES)
            self._read += chunk
            self._is_ended = not chunk
        if not self._read:
            return None
        line, end, self._read = self._read.partition(b"\n")
        return (line + end).decode("utf-8", errors="replace")


class _Person(Listener):
    """Types lines and reads answers; everything else goes to stderr."""

    def __init__(self, terminal: _Terminal, options: ChatOptions) -> None:
        self._terminal = terminal
        self._options = options
        self._is_prompted = False

    def greet(self, placement: str, has_chat_template: bool) -> None:
        say(0, "type a message; /reset forgets the conversation, /exit ends the chat")
        if not has_chat_template:
            say(0, "the tokenizer has no chat template: each line is a text to continue, and none is remembered")

    def read(self, patience_s: float) -> Ask | None:
        if not self._is_prompted:
            print("> ", end="", file=sys.stderr, flush=True)
            self._is_prompted = True
        line = self._terminal.read_line(patience_s)
        if line == "":
            return Ask("nothing", self._options)
        self._is_prompted = False
        if line is None:
            print(file=sys.stderr)  # end the line of the prompt mark
        if line is None or line.strip() == "/exit":
            return None
        if not line.strip():
            return Ask("nothing", self._options)
        if line.strip() == "/reset":
            return Ask("reset", self._options)
        return Ask("answer", self._options, _choose_sources(self._options), line.removesuffix("\n"))

    def begin(self, source: Source) -> None:
        self._terminal.write(f"[{source}] " if self._options.compare else "")

    def add(self, source: Source, text: str) -> None:
        self._terminal.write(text)

    def end(self, answered: Answered) -> None:
        self._terminal.write("\n")

    def refuse(self, reason: str) -> None:
        say(0, f"not answered: {reason}; /reset starts a new conversation")

    def confirm_reset(self) -> None:
        say(0, "a new conversation starts")


class _Program(Listener):
    """Writes a request on each line, and reads the answers as lines of JSON."""

    def __init__(self, terminal: _Terminal, options: ChatOptions) -> None:
        self._terminal = terminal
        self._options = options
        self._waiting: deque[str] = deque()

    def greet(self, placement: str, has_chat_template: bool) -> None:
        self._write(ready=True, placement=placement, has_chat_template=has_chat_template)

    def read(self, patience_s: float) -> Ask | None:
        line = self._waiting.popleft() if self._waiting else self._terminal.read_line(patience_s)
        if line is None:
            return None
        if line.strip():
            try:
                return self._build_ask(read_request(line))
            except ConfigError as error:
                self.refuse(str(error))
        return Ask("nothing", self._options)

    def _build_ask(self, request: ChatRequest) -> Ask:
        """Return what a request asks for; canceling an answer that has ended does nothing."""
        if request.cancel:
            return Ask("nothing", self._options)
        if request.reset:
            return Ask("reset", self._options)
        given = {
            name: getattr(request, name) for name in AnswerOptions.model_fields if name in request.model_fields_set
        }
        options = self._options.model_copy(update=given)
        if request.conversations is not None:
            sources = tuple(request.conversations)
            return Ask("answer", options, sources, conversations=request.conversations, seed=given.get("seed"))
        assert request.content is not None
        sources = tuple(request.sources or _choose_sources(self._options))
        return Ask("answer", options, sources, request.content, seed=given.get("seed"))

    def is_canceled(self) -> bool:
        while line := self._terminal.read_line(
            0
        ):  # at the end of the input, which may be a file, the answer is still wanted
            if _is_cancel(line):
                return True
            self._waiting.append(line)
        return self._terminal.is_gone

    def add(self, source: Source, text: str) -> None:
        if text:
            self._write(source=source, text=text)

    def end(self, answered: Answered) -> None:
        self._write(is_end=True, **asdict(answered) | {"seconds": round(answered.seconds, 3)})

    def refuse(self, reason: str) -> None:
        self._write(error=reason)

    def confirm_reset(self) -> None:
        self._write(reset=True)

    def _write(self, **message: Any) -> None:
        self._terminal.write(json.dumps(message) + "\n")


def read_request(line: str) -> ChatRequest:
    """Return the request on a line.

    Raises:
        ConfigError: the line is not a request.
    """
    try:
        given = json.loads(line)
        json.dumps(given, ensure_ascii=False).encode()  # an unpaired surrogate is not text
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(expected="a JSON object on the line", found=repr(line.strip()[:_SHOWN_CHARACTERS]))
    try:
        return ChatRequest(**given)
    except ValidationError as error:
        raise to_config_error(error) from error


def _is_cancel(line: str) -> bool:
    try:
        return read_request(line).cancel
    except ConfigError:
        return False


def _choose_sources(options: ChatOptions) -> tuple[Source, ...]:
    if options.compare:
        return ("base", "adapter")
    return ("base",) if options.base_only else ("adapter",)
