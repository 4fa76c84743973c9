"""Talk to an adapter: lines from the terminal, answers as they come, the same on every rank."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, TextStreamer

from . import dist
from .data.formats import Message
from .data.prompts import PromptWriter
from .data.sources import BadRow
from .errors import DataError
from .generation import Generator, check_length, describe_placement, read_sampling
from .output import RESULT_FILE_VARIABLE, say
from .use import load_for_use, load_saved_tokenizer
from .use_options import ChatOptions

_CACHED_TOKENS = 8192
# Ranks wait for what the person types in a collective, which gives up after some minutes: rank 0 speaks before that.
_PATIENCE_S = 60.0
_READ_BYTES = 65536


def chat(options: ChatOptions) -> None:
    """Answer what is typed until the input ends or `/exit`; `/reset` forgets the conversation.

    Raises:
        UserError: a mistake in the options or the adapter; all ranks raise alike.

    Ranks: run by every rank. Rank 0 reads and prints. Where base units are gathered, all ranks generate the same
        tokens; elsewhere the others end at once.
    """
    tokenizer = load_saved_tokenizer(options.adapter, options)
    writer = PromptWriter(tokenizer)
    _check_system(options, writer)
    model = load_for_use(options.adapter, options, _CACHED_TOKENS)
    rank = dist.get_rank()
    say(rank, describe_placement(model))
    conversation = _Conversation(options, model, tokenizer, writer)
    is_alone = not conversation.is_collective
    if is_alone and rank != 0:
        return
    if is_alone and dist.get_world_size() > 1:
        say(rank, "with this placement rank 0 answers alone, and the other ranks have ended")
    say(rank, "type, and end with /exit; /reset forgets the conversation")
    if tokenizer.chat_template is None:
        say(rank, "the tokenizer has no chat template: each line is a text to go on with, and none is remembered")
    with _open_terminal() if rank == 0 else nullcontext() as terminal:
        while True:
            line = terminal.read_line(_PATIENCE_S) if terminal is not None else None
            line = line if is_alone else dist.broadcast_object(line)
            if line is None or line.strip() == "/exit":
                return
            if line.strip() == "/reset":
                conversation.reset()
                say(rank, "the conversation begins anew")
            elif line.strip():
                conversation.answer(line, terminal)


class _Conversation:
    """What has been said, and the model that goes on with it."""

    def __init__(
        self, options: ChatOptions, model: PeftModel, tokenizer: PreTrainedTokenizerBase, writer: PromptWriter
    ) -> None:
        self._options = options
        self._model = model
        self._tokenizer = tokenizer
        self._writer = writer
        stop_ids = writer.find_stop_ids()
        self._generator = Generator(model, tokenizer, options.max_new_tokens, stop_ids, read_sampling(options))
        self.is_collective = self._generator.is_collective
        self._num_answers = 0
        self.reset()

    def reset(self) -> None:
        self._messages = _begin(self._options)

    def answer(self, line: str, terminal: _Terminal | None) -> None:
        """Answer a line, and remember both; a line that cannot be answered is named and forgotten.

        Ranks: collective over all ranks where base units are gathered.
        """
        is_chat = self._tokenizer.chat_template is not None
        messages = [*self._messages, {"role": "user", "content": line}]
        try:
            token_ids = self._writer.write(messages if is_chat else line)
            check_length(self._model, len(token_ids), self._options.max_new_tokens, "the conversation")
        except (BadRow, DataError) as error:
            say(dist.get_rank(), f"not answered: {error}; /reset begins anew")
            return
        self._num_answers += 1
        if self._options.compare:
            self._generate(token_ids, terminal, is_base=True, label="[base] ")
        label = "[adapter] " if self._options.compare else ""
        new = self._generate(token_ids, terminal, self._options.base_only, label)
        if is_chat:
            content = self._tokenizer.decode(new, skip_special_tokens=True)
            self._messages = [*messages, {"role": "assistant", "content": content}]

    def _generate(self, token_ids: list[int], terminal: _Terminal | None, is_base: bool, label: str) -> list[int]:
        streamer = None
        if terminal is not None:
            terminal.write(label)
            streamer = _Streamer(self._tokenizer, terminal, self._generator.stop_ids)
        torch.manual_seed(self._options.seed + self._num_answers)
        with self._model.disable_adapter() if is_base else nullcontext():
            new = self._generator.generate([token_ids], streamer)[0]
        # What is said next depends on it: rank 0's, which the person has read, is what was said.
        return dist.broadcast_object(new) if self.is_collective else new


class _Streamer(TextStreamer):
    """Writes tokens as they come, but for the prompt's and what ends the answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, terminal: _Terminal, stop_ids: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._terminal = terminal
        self._stop_ids = stop_ids

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt or int(value) not in self._stop_ids:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._terminal.write(text + ("\n" if stream_end else ""))


class _Terminal:
    """Where lines are read from and answers go to."""

    def __init__(self, input_descriptor: int, output: TextIO) -> None:
        self._input = input_descriptor
        self._output = output
        self._read = b""
        self._is_ended = False
        self._is_prompted = False

    def write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()

    def read_line(self, patience_s: float) -> str | None:
        """Return the next line; nothing but an empty text if none came in that time, None at the end of the input."""
        if not self._is_prompted:
            print("> ", end="", file=sys.stderr, flush=True)
            self._is_prompted = True
        while b"\n" not in self._read and not self._is_ended:
            if not select.select([self._input], [], [], patience_s)[0]:
                return ""
            chunk = os.read(self._input, _READ_BYTES)
            self._read += chunk
            self._is_ended = not chunk
        self._is_prompted = False
        if not self._read:
            print(file=sys.stderr)  # what comes next shall not stand behind the mark
            return None
        line, _, self._read = self._read.partition(b"\n")
        return line.decode("utf-8", errors="replace")


@contextlib.contextmanager
def _open_terminal() -> Iterator[_Terminal]:
    """Open this process's own terminal, or the pipes to that of the launcher, which lie beside its result file."""
    result_file = os.environ.get(RESULT_FILE_VARIABLE)
    if result_file is None:
        yield _Terminal(sys.stdin.fileno(), sys.stdout)
        return
    folder = Path(result_file).parent
    with (
        (folder / "stdin").open("rb", buffering=0) as lines,
        (folder / "stdout").open("w", encoding="utf-8") as answers,
    ):
        yield _Terminal(lines.fileno(), answers)


def _begin(options: ChatOptions) -> list[Message]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _check_system(options: ChatOptions, writer: PromptWriter) -> None:
    """Refuse a system message that the chat template does not take, before the model is loaded."""
    if not options.system:
        return
    try:
        writer.write([*_begin(options), {"role": "user", "content": "hello"}])
    except BadRow as error:
        raise DataError(f"system: {error.detail}") from error
