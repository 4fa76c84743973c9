"""Prompts: rows of a file, or texts and conversations, as the tokens that a model continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import DataError
from .chat import ChatWriter
from .formats import Message, convert_conversation
from .sources import BadRow, name_type, open_source


@dataclass(frozen=True)
class Prompt:
    """A prompt: its place in the file, its row, its tokens."""

    place: str
    row: dict[str, Any]
    token_ids: list[int]


class PromptWriter:
    """Turns texts and conversations into tokens, as in training."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, as_chat: bool = False) -> None:
        """Choose how texts are written.

        Args:
            as_chat: take a text as a user's message of a conversation, rather than as a text to continue.

        Raises:
            DataError: `as_chat` without a chat template.
        """
        if as_chat and tokenizer.chat_template is None:
            raise DataError("needs a chat template, and the tokenizer has none", option="as_chat", fix="leave it out")
        self._tokenizer = tokenizer
        self._as_chat = as_chat
        self._chat = ChatWriter(tokenizer, needs_turns=False) if tokenizer.chat_template is not None else None

    def find_stop_ids(self) -> set[int]:
        """Return the tokens that end an answer: the tokenizer's own, and those that the chat template writes."""
        if self._chat is not None:
            return self._chat.find_stop_ids()
        return {self._tokenizer.eos_token_id} - {None}

    def write(self, prompt: str | Sequence[Message], columns: dict[str, Any] | None = None) -> list[int]:
        """Return the tokens of a text, or of a conversation up to where the assistant's turn starts.

        Args:
            columns: of a conversation's row: `tools`, `system`, `chat_template_kwargs`.

        Raises:
            BadRow: it cannot be written.
        """
        if isinstance(prompt, str) and not self._as_chat:
            token_ids = list(self._tokenizer(prompt)["input_ids"])
            eos = self._tokenizer.eos_token
            if eos and token_ids[-1:] == [self._tokenizer.eos_token_id] and not prompt.endswith(eos):
                token_ids.pop()  # some tokenizers end every text, but this one is continued
            if not prompt or not token_ids:
                raise BadRow("empty field", "the prompt is empty")
            return token_ids
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._chat is None:
            raise BadRow(
                "no chat template",
                "it is a conversation, but the tokenizer has no chat template to write it: give the prompt as a text",
            )
        example = convert_conversation((columns or {}) | {"messages": messages}, "messages", is_prompt=True)
        if example.body[-1]["role"] == "assistant":  # type: ignore[index]
            raise BadRow("nothing to answer", "the last message is the assistant's: leave it out, to have it answered")
        text = self._chat.write(
            example.body,  # type: ignore[arg-type]
            example.tools,
            example.chat_template_kwargs,
            add_generation_prompt=True,
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def read_prompts(name: str, writer: PromptWriter) -> list[Prompt]:
    """Return the prompts of a file in its order; each row has a `prompt`, a text or messages, or has `messages`.

    Raises:
        DataError: the file or one of its rows cannot be used.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise DataError(option="prompts", where=name, expected="a file of rows", found=found)
    prompts = []
    for row in open_source(name, "train", None, None).read():
        place = str(path.parent / row.place)
        try:
            if isinstance(row.value, BadRow):
                raise row.value
            prompts.append(Prompt(place, row.value, _write_row(row.value, writer)))
        except BadRow as error:
            raise DataError(error.detail, where=place) from error
    if not prompts:
        raise DataError("holds no row", option="prompts", where=name)
    return prompts


def _write_row(row: dict[str, Any], writer: PromptWriter) -> list[int]:
    found = [field for field in ("prompt", "messages") if row.get(field) is not None]
    if len(found) != 1:
        what = "both" if found else "neither"
        raise BadRow("missing field", f"expected `prompt`, a text or messages, or else `messages`, found {what}")
    prompt = row[found[0]]
    if not isinstance(prompt, list) and (found == ["messages"] or not isinstance(prompt, str)):
        expected = "a text or a list of messages" if found == ["prompt"] else "a list of messages"
        raise BadRow("wrong type", f"`{found[0]}` must be {expected}, found {name_type(prompt)}")
    columns: dict[str, Any] = {name: row[name] for name in ("tools", "system", "chat_template_kwargs") if name in row}
    try:
        return writer.write(prompt, columns)
    except BadRow as error:
        raise BadRow(error.reason, error.detail.replace("`messages`", f"`{found[0]}`")) from error
