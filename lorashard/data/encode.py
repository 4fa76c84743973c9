"""Turn rows into tokens and labels, as TRL's SFTTrainer would: token for token and label for label.

This differs where TRL would pass over a problem in silence:

- a row without supervised tokens, also after truncation, is a bad row; TRL drops it, or keeps it if rows are packed;
- if a template's {% generation %} markers leave out the token that ends the assistant's turn, it is supervised anyway,
  so that the model learns to stop; TRL warns;
- assistant turns are also found with templates of which TRL knows no version with markers, and refuses (see `chat`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from ..config.data_options import DataOptions
from ..errors import ConfigError, DataError
from .chat import ChatWriter, Span, UnstableTemplateError, mask_turns
from .formats import DataFormat, Example, detect_format
from .sources import BadRow, Row, RowReader, read_rows

IGNORED_LABEL = -100  # PyTorch's cross entropy and TRL's trainers ignore such tokens

_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class Encoding:
    """A row as the model sees it, truncated to `max_length`; labels of unsupervised tokens are `IGNORED_LABEL`."""

    input_ids: list[int]
    labels: list[int]
    num_tokens_before_cut: int
    has_prompt_drift: bool = False
    """The tokens of the prompt alone are not the first tokens of prompt and completion together."""
    has_unended_turn: bool = False
    """An assistant's turn lacks a token that ends it."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A row as text; `turns` are the assistant's, if they were asked for."""

    text: str
    prompt: str | None = None
    turns: list[Span] | None = None


class RowEncoder:
    """Encodes rows of one format with one tokenizer; `mask_method` says what is supervised."""

    def __init__(
        self, data_format: DataFormat, options: DataOptions, tokenizer: PreTrainedTokenizerBase, packing: bool
    ) -> None:
        self.format = data_format
        self.max_length = options.max_length
        self._tokenizer = tokenizer
        self._completion_only = _decide_completion(data_format, options)
        self._assistant_only = _decide_assistant(data_format, options)
        self._chat = ChatWriter(tokenizer, self._assistant_only) if data_format.is_chat else None
        self._stop_ids = self._chat.find_stop_ids() if self._chat else set()
        self._blank_ids: dict[int, bool] = {}
        if self._chat is None and tokenizer.eos_token is None:
            raise ConfigError(
                f"{data_format.name} rows end with an end-of-sequence token, and the tokenizer has none",
                option="eos_token",
                fix="set it to a token of the vocabulary",
            )
        cuts = options.max_length is not None and (not packing or options.packing_strategy == "bfd")
        start = options.truncation_mode == "keep_start"
        self._kept = slice(None)
        if cuts and options.max_length:
            self._kept = slice(options.max_length) if start else slice(-options.max_length, None)
        # No token predicts the first one of a sequence; wrapped packing does not begin a sequence with each row.
        self._first_supervised = 0 if packing and options.packing_strategy == "wrapped" else 1

    @property
    def mask_method(self) -> str:
        """Which tokens of a row are supervised, and how they are found."""
        supervised = ["completion"] if self._completion_only else []
        if self._chat and self._assistant_only:
            supervised.append(f"assistant turns ({self._chat.method})")
        return " and ".join(supervised) or "every token"

    def encode(self, rows: Sequence[Row]) -> list[Encoding | BadRow]:
        """Encode a batch of rows, as fast tokenizers need it; a row that cannot be trained on becomes a BadRow.

        Raises:
            DataError: The chat template does not let the assistant's turns be found.
        """
        written = [self._write(row) for row in rows]
        good = [item for item in written if isinstance(item, _Written)]
        if not good:
            return [item for item in written if isinstance(item, BadRow)]
        full = self._tokenizer(
            [item.text for item in good],
            add_special_tokens=self._chat is None,  # a chat template writes them itself
            return_offsets_mapping=self._assistant_only,
            return_attention_mask=False,
            verbose=False,
        )
        prompts: list[list[int]] = []
        if self.format.has_prompt:
            texts = [item.prompt or "" for item in good]
            prompts = self._tokenizer(
                texts, add_special_tokens=self._chat is None, return_attention_mask=False, verbose=False
            )["input_ids"]

        results: list[Encoding | BadRow] = []
        position = 0
        for item in written:
            if isinstance(item, BadRow):
                results.append(item)
                continue
            offsets = full["offset_mapping"][position] if self._assistant_only else None
            prompt_ids = prompts[position] if prompts else None
            results.append(self._label(item, full["input_ids"][position], offsets, prompt_ids))
            position += 1
        return results

    def _write(self, row: Row) -> _Written | BadRow:
        if isinstance(row.value, BadRow):
            return row.value
        try:
            example = self.format.convert(row.value)
            return self._write_chat(example) if self._chat else self._write_text(example)
        except BadRow as problem:
            return problem
        except UnstableTemplateError as error:
            raise DataError(
                "the chat template writes it differently when the conversation continues, so the assistant's turns "
                "cannot be found",
                where=f"{row.place}, {error}",
                fix="set chat_template_path to a template with {% generation %} markers, give the rows as prompt and "
                "completion, or set assistant_only_loss: false to supervise all tokens",
            ) from error

    def _write_text(self, example: Example) -> _Written:
        assert isinstance(example.body, str) and not isinstance(example.prompt, list)
        eos_token = self._tokenizer.eos_token
        body = example.body if example.body.endswith(eos_token) else example.body + eos_token
        return _Written((example.prompt or "") + body, example.prompt)

    def _write_chat(self, example: Example) -> _Written:
        assert self._chat and isinstance(example.body, list) and not isinstance(example.prompt, str)
        messages = (example.prompt or []) + example.body
        context = (example.tools, example.chat_template_kwargs)
        prompt = self._chat.write(example.prompt, *context, add_generation_prompt=True) if example.prompt else None
        if self._assistant_only:
            text, turns = self._chat.write_with_turns(messages, *context)
            return _Written(text, prompt, turns)
        return _Written(self._chat.write(messages, *context), prompt)

    def _label(
        self, item: _Written, input_ids: list[int], offsets: list[Span] | None, prompt_ids: list[int] | None
    ) -> Encoding | BadRow:
        mask = [True] * len(input_ids)
        has_unended_turn = False
        if item.turns is not None and offsets is not None:
            mask = mask_turns(offsets, item.turns)
            has_unended_turn = self._include_stops(input_ids, mask)
        elif self._chat and self.format.has_prompt:
            has_unended_turn = not self._is_ended(input_ids, 0, len(input_ids))
        has_prompt_drift = False
        if prompt_ids is not None:
            prompt_length = _count_shared(prompt_ids, input_ids)
            has_prompt_drift = prompt_length < len(prompt_ids)
            if self._completion_only:
                mask[:prompt_length] = [False] * prompt_length
        labels = [token_id if is_loss else IGNORED_LABEL for token_id, is_loss in zip(input_ids, mask, strict=True)]

        kept_labels = labels[self._kept]
        if all(label == IGNORED_LABEL for label in kept_labels[self._first_supervised :]):
            return self._refuse_unsupervised(labels)
        return Encoding(input_ids[self._kept], kept_labels, len(input_ids), has_prompt_drift, has_unended_turn)

    def _refuse_unsupervised(self, labels: list[int]) -> BadRow:
        num_supervised = sum(label != IGNORED_LABEL for label in labels[self._first_supervised :])
        detail = f"none of its {len(labels)} tokens is supervised ({self.mask_method})"
        if num_supervised:
            detail = f"max_length {self.max_length} cuts off all {num_supervised} supervised tokens of {len(labels)}"
        return BadRow("nothing supervised", detail, tokens_before_cut=len(labels) if num_supervised else None)

    def _include_stops(self, input_ids: list[int], mask: list[bool]) -> bool:
        """Supervise the token that ends a turn if the mask ends before it; return whether a turn has none."""
        has_unended_turn = False
        position = 0
        while position < len(mask):
            if not mask[position]:
                position += 1
                continue
            start = position
            while position < len(mask) and mask[position]:
                position += 1
            if self._is_ended(input_ids, start, position):
                continue
            stop = position
            while stop < len(mask) and self._is_blank(input_ids[stop]):
                stop += 1
            if stop < len(mask) and input_ids[stop] in self._stop_ids:
                mask[position : stop + 1] = [True] * (stop + 1 - position)
                position = stop + 1
            else:
                has_unended_turn = True
        return has_unended_turn

    def _is_ended(self, input_ids: list[int], start: int, end: int) -> bool:
        while end > start and self._is_blank(input_ids[end - 1]):
            end -= 1
        return end > start and input_ids[end - 1] in self._stop_ids

    def _is_blank(self, token_id: int) -> bool:
        if token_id not in self._blank_ids:
            self._blank_ids[token_id] = not self._tokenizer.decode([token_id]).strip()
        return self._blank_ids[token_id]


def encode_source(
    source: RowReader,
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    packing: bool,
    max_samples: int | None = None,
) -> tuple[RowEncoder, Iterator[tuple[str, Encoding | BadRow]]]:
    """Recognize a source's format, and encode its rows one batch after the other.

    Returns:
        The encoder, and an iterator over every row's place and its encoding, in the source's order.

    Raises:
        DataError: No row, no readable row among the first, or columns that no format has.
    """
    first, rows = read_rows(source, max_samples)
    data_format = detect_format(first, tokenizer.chat_template is not None, options.dataset_text_field, source.name)
    encoder = RowEncoder(data_format, options, tokenizer, packing)
    return encoder, _encode_rows(encoder, rows)


def _encode_rows(encoder: RowEncoder, rows: Iterator[Row]) -> Iterator[tuple[str, Encoding | BadRow]]:
    while batch := list(islice(rows, _BATCH_ROWS)):
        for row, result in zip(batch, encoder.encode(batch), strict=True):
            yield row.place, result


def _decide_completion(data_format: DataFormat, options: DataOptions) -> bool:
    if data_format.has_prompt:
        return options.completion_only_loss is not False
    if options.completion_only_loss:
        raise ConfigError(
            option="completion_only_loss", expected="rows with a prompt and a completion", found=data_format.name
        )
    return False


def _decide_assistant(data_format: DataFormat, options: DataOptions) -> bool:
    if options.assistant_only_loss is None:
        return data_format.is_chat and not data_format.has_prompt
    if options.assistant_only_loss and not data_format.is_chat:
        raise ConfigError(
            option="assistant_only_loss",
            expected="conversations",
            found=f"{data_format.name} rows that are not chats",
            fix="set it to false, or give the tokenizer a chat template",
        )
    return options.assistant_only_loss


def _count_shared(ids: list[int], other_ids: list[int]) -> int:
    pairs = zip(ids, other_ids, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(other_ids)))
