"""Write conversations with a chat template, and find the assistant's turns in them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..errors import DataError
from .formats import Message
from .sources import BadRow

Span = tuple[int, int]

# What an expression in a template can raise when a conversation does not suit it.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)

# Note [Assistant turns]
# A template with {% generation %} markers marks the assistant's turns itself. TRL has such a version of the best known
# templates, and uses it in their place. With any other template the turns are found by writing the conversation up to
# each of them: the messages before it, with the generation prompt, end where the turn starts; with the turn they end
# where it ends. That holds only if a template writes earlier messages alike whatever follows. Only special tokens and
# white space may differ, which close a conversation or open a thought. Templates that do more, such as dropping the
# thoughts of earlier turns, are refused: a mask would be a guess.


class UnstableTemplateError(Exception):
    """The chat template writes a message differently once others follow, so the assistant's turns cannot be found."""


class ChatWriter:
    """A tokenizer's chat template; `method` says how the assistant's turns are found (see Note [Assistant turns])."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, needs_turns: bool) -> None:
        self.tokenizer = tokenizer
        self.chat_template: str | None = None  # None is the tokenizer's own
        self.method = "none"
        if needs_turns:
            self._choose_method()
        self._added_tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)

    def _choose_method(self) -> None:
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        if not self.tokenizer.is_fast:
            raise DataError(
                "the assistant's turns are found by the position of each token in the text",
                option="assistant_only_loss",
                expected="a fast tokenizer, which knows it",
                found=type(self.tokenizer).__name__,
                fix="set assistant_only_loss: false, or write the rows as prompt and completion",
            )
        if has_generation_markers(self.tokenizer.chat_template):
            self.method = "generation markers"
            return
        try:
            self.chat_template = get_training_chat_template(self.tokenizer)
            self.method = "TRL's training template"
        except _TEMPLATE_ERRORS:  # TRL knows no version of this template with markers
            self.method = "incremental rendering"

    def write(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the conversation as text, special tokens included.

        Raises:
            BadRow: The template refuses the conversation.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except _TEMPLATE_ERRORS as error:
            raise _refuse(error) from error
        return str(text)

    def write_with_turns(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Return the conversation as text, and the assistant's turns in it, as (start, end) in characters.

        Raises:
            BadRow: The template refuses the conversation.
            UnstableTemplateError: The turns cannot be found with this template.
        """
        if self.method == "incremental rendering":
            return self._find_turns(messages, tools, template_kwargs)
        try:
            texts, turns = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(self.chat_template, tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **(template_kwargs or {})},
            )
        except _TEMPLATE_ERRORS as error:
            raise _refuse(error) from error
        return texts[0], [(start, end) for start, end in turns[0]]

    def _find_turns(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> tuple[str, list[Span]]:
        text = self.write(messages, tools, template_kwargs)
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise BadRow(
                    "assistant speaks first",
                    "no message is before the first one, so the start of the assistant's turn cannot be found",
                )
            before = self.write(messages[:index], tools, template_kwargs, add_generation_prompt=True)
            start = self._measure_shared(before, text)
            if start < len(before):
                # What was left out must not be the assistant's header, or that would be supervised too.
                closed = self.write(messages[:index], tools, template_kwargs)
                if start <= self._measure_shared(closed, text):
                    raise UnstableTemplateError(f"message {index + 1}")
            end = self._measure_shared(self.write(messages[: index + 1], tools, template_kwargs), text)
            if end <= start:
                raise UnstableTemplateError(f"message {index + 1}")
            turns.append((start, end))
        return text, turns

    def _measure_shared(self, part: str, text: str) -> int:
        """Return the length of the common start, if the rest of `part` is special tokens and white space alone."""
        while not text.startswith(part):
            token = next((token for token in self._added_tokens if part.endswith(token)), None)
            if token:
                part = part.removesuffix(token)
            elif part[-1].isspace():
                part = part[:-1]
            else:
                return 0
        return len(part)

    def find_stop_ids(self) -> set[int]:
        """Return the tokens that end an assistant's turn: the tokenizer's own, and those that the template writes."""
        stop_ids = {self.tokenizer.eos_token_id} - {None}
        speech = "speech"
        try:
            text = self.write([{"role": "user", "content": "hello"}, {"role": "assistant", "content": speech}])
        except BadRow:
            return stop_ids
        added_ids = set(self.tokenizer.get_added_vocab().values())
        rest = text[text.rfind(speech) + len(speech) :] if speech in text else ""
        for token_id in self.tokenizer(rest, add_special_tokens=False)["input_ids"]:
            if token_id in added_ids:
                stop_ids.add(token_id)
            elif self.tokenizer.decode([token_id]).strip():
                break
        return stop_ids


def mask_turns(offsets: Sequence[Span], turns: Sequence[Span]) -> list[bool]:
    """Mark the tokens that reach into a turn.

    Args:
        offsets: The position of each token in the text, as (start, end) in characters.
        turns: The positions of the turns, likewise.
    """
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    mask = [False] * len(offsets)
    for start, end in turns:
        first, after_last = bisect_right(ends, start), bisect_left(starts, end)
        mask[first:after_last] = [True] * max(0, after_last - first)
    return mask


def _refuse(error: BaseException) -> BadRow:
    return BadRow("refused by the chat template", f"the chat template refuses the row: {error}")
