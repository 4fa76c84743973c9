"""What is asked in a chat and where answers go: typed by a person, or as JSON lines from and to a program."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

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
    """What is asked for; every rank gets the same.

    Args:
        sources: who is to answer, in order.
        content: goes on with the conversation that is kept.
        conversations: to be answered as they stand, by source, in place of `content`.
        seed: of the sampling; None: one that differs from answer to answer.
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


class Listener(Protocol):
    """Who asks and is answered, on rank 0."""

    def greet(self, placement: str, has_chat_template: bool) -> None:
        """Say that questions may come."""

    def read(self, patience_s: float) -> Ask | None:
        """Return what is asked next, nothing if that is all in this time, None if no more is to come."""

    def is_canceled(self) -> bool:
        """Tell, without waiting, whether the answer that is being made is wanted no more."""

    def begin(self, source: Source) -> None:
        """Say who answers now."""

    def add(self, source: Source, text: str) -> None:
        """Go on with an answer."""

    def end(self, answered: Answered) -> None:
        """End an answer."""

    def refuse(self, reason: str) -> None:
        """Say why there is no answer."""

    def tell_reset(self) -> None:
        """Say that what was said is forgotten."""


@contextlib.contextmanager
def open_listener(options: ChatOptions) -> Iterator[Listener]:
    """Open this process's own terminal, or the pipes to that of the launcher, which lie beside its result file."""
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
    """Where lines are read from and answers go to."""

    def __init__(self, input_descriptor: int, output: TextIO) -> None:
        self._input = input_descriptor
        self._output = output
        self._read = b""
        self._is_ended = False
        self.is_gone = False
        """Nobody reads the answers any more."""

    def write(self, text: str) -> None:
        try:
            self._output.write(text)
            self._output.flush()
        except BrokenPipeError:
            self.is_gone = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._output.fileno())  # for what is left in the buffer

    def read_line(self, patience_s: float) -> str | None:
        """Return the next line with its end; an empty text if none came in that time, None at the end of the input."""
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


class _Person:
    """Types lines and reads answers; what is not an answer goes to stderr."""

    def __init__(self, terminal: _Terminal, options: ChatOptions) -> None:
        self._terminal = terminal
        self._options = options
        self._is_prompted = False

    def greet(self, placement: str, has_chat_template: bool) -> None:
        say(0, "type, and end with /exit; /reset forgets the conversation")
        if not has_chat_template:
            say(0, "the tokenizer has no chat template: each line is a text to go on with, and none is remembered")

    def read(self, patience_s: float) -> Ask | None:
        if not self._is_prompted:
            print("> ", end="", file=sys.stderr, flush=True)
            self._is_prompted = True
        line = self._terminal.read_line(patience_s)
        if line == "":
            return Ask("nothing", self._options)
        self._is_prompted = False
        if line is None:
            print(file=sys.stderr)  # what comes next shall not stand behind the mark
        if line is None or line.strip() == "/exit":
            return None
        if not line.strip():
            return Ask("nothing", self._options)
        if line.strip() == "/reset":
            return Ask("reset", self._options)
        return Ask("answer", self._options, _choose_sources(self._options), line.removesuffix("\n"))

    def is_canceled(self) -> bool:
        return False  # Ctrl-C ends all

    def begin(self, source: Source) -> None:
        self._terminal.write(f"[{source}] " if self._options.compare else "")

    def add(self, source: Source, text: str) -> None:
        self._terminal.write(text)

    def end(self, answered: Answered) -> None:
        self._terminal.write("\n")

    def refuse(self, reason: str) -> None:
        say(0, f"not answered: {reason}; /reset begins anew")

    def tell_reset(self) -> None:
        say(0, "the conversation begins anew")


class _Program:
    """Writes a request on each line, and reads what comes of it as lines of JSON."""

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
                return self._understand(read_request(line))
            except ConfigError as error:
                self.refuse(str(error))
        return Ask("nothing", self._options)

    def _understand(self, request: ChatRequest) -> Ask:
        """Return what a request asks for; to cancel what has ended is nothing."""
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
        while line := self._terminal.read_line(0):  # at the input's end the answer is still wanted: it was a file
            if _is_cancel(line):
                return True
            self._waiting.append(line)
        return self._terminal.is_gone

    def begin(self, source: Source) -> None:
        pass

    def add(self, source: Source, text: str) -> None:
        if text:
            self._write(source=source, text=text)

    def end(self, answered: Answered) -> None:
        self._write(
            source=answered.source,
            is_end=True,
            num_tokens=answered.num_tokens,
            seconds=round(answered.seconds, 3),
            is_cut=answered.is_cut,
            is_canceled=answered.is_canceled,
        )

    def refuse(self, reason: str) -> None:
        self._write(error=reason)

    def tell_reset(self) -> None:
        self._write(reset=True)

    def _write(self, **said: Any) -> None:
        self._terminal.write(json.dumps(said) + "\n")


def read_request(line: str) -> ChatRequest:
    """Return the request on a line.

    Raises:
        ConfigError: it is none.
    """
    try:
        given = json.loads(line)
        json.dumps(given, ensure_ascii=False).encode()  # half of a pair of characters is no text
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"expected a JSON object on the line, found {line.strip()[:_SHOWN_CHARACTERS]!r}")
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
