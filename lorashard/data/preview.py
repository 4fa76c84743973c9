"""Show the first examples as the model will see them, and which tokens are supervised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import datasets
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from ..config.data_options import DataOptions
from ..config.methods import METHODS, Method
from ..config.run_config import RunConfig
from ..config.sweep import list_data, named_in_errors
from .encode import IGNORED_LABEL, Encoding, encode_source
from .sources import BadRow, open_source
from .tokenizer import load_tokenizer
from .trl_rows import open_rows, tabulate
from .trl_tokens import SUPERVISED, TrlSequence, fill_trainer_options, tokenize_rows
from .visible import show_unseen

_SUPERVISED_COLOR, _CONTEXT_COLOR, _NO_COLOR = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_UNFINISHED_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class PreviewSequence:
    """A sequence that passes the model.

    Attributes:
        name: what it is of its example: `chosen`, `rejected`, `desirable`, `undesirable`, `prompt`, or empty.
        tokens: each as (text, whether it is supervised).
        num_left_out: how many more are in the middle of `tokens`, between its two halves.
    """

    name: str
    tokens: list[tuple[str, bool]]
    num_tokens: int
    num_supervised_tokens: int
    num_tokens_before_cut: int
    num_left_out: int = 0


@dataclass(frozen=True)
class PreviewRow:
    """One row: its sequences, or the problem for which it is skipped."""

    place: str
    format: str
    mask_method: str
    sequences: list[PreviewSequence]
    problem: str | None


def preview_run(config: RunConfig, num_rows: int = 3, max_tokens: int | None = None) -> list[PreviewRow]:
    """Tokenize the first rows of a run's dataset; of a sweep's datasets, some of each, told of which job.

    Args:
        num_rows: of all datasets together: the last ones are left out where there are more than that.
        max_tokens: as for `preview`.

    Raises:
        DataError, ConfigError: as for `preview` and `list_data`; of a sweep, with the job's name.
    """
    runs = dict(islice(list_data(config).items(), num_rows))
    tokenizer, options = load_tokenizer(**config.tokenizer_options()), fill_trainer_options(config)
    shown: list[PreviewRow] = []
    for number, (job, run) in enumerate(runs.items()):
        num_here = num_rows // len(runs) + (number < num_rows % len(runs))
        with named_in_errors(job):
            rows = preview(run.data_options(), tokenizer, num_here, run.trl_method, options, max_tokens)
        shown += [replace(row, place=f"{row.place}, job {job}") for row in rows] if len(runs) > 1 else rows
    return shown


def preview(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int = 3,
    method: Method = METHODS["sft"],
    trainer_options: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[PreviewRow]:
    """Tokenize the first rows of the training dataset as a run does, before packing, bad rows included.

    Args:
        trainer_options: from `fill_trainer_options`, for methods whose trainer tokenizes the rows.
        max_tokens: of a sequence, beyond which the tokens in its middle are left out.

    Raises:
        DataError: The dataset is missing, or its columns are not recognized.
        ConfigError: The options do not suit the dataset or the tokenizer.
    """
    source = open_source(options.dataset, options.dataset_split, options.dataset_config, options.dataset_revision)
    if method.is_prepared_here:
        encoder, results = encode_source(source, options, tokenizer, options.packing, num_rows)
        name, supervised = encoder.format.name, encoder.mask_method
        found: Iterator[tuple[str, list[TrlSequence] | BadRow]]
        found = ((place, _as_sequences(result)) for place, result in results)
    else:
        trl_format, rows = open_rows(source, method, tokenizer.chat_template is not None, options.max_train_samples)
        name, supervised = trl_format.name, SUPERVISED[method.name]
        found = _tokenize_each(list(islice(rows, num_rows)), source.name, method, tokenizer, trainer_options or {})
    shown = []
    for place, sequences in found:
        if isinstance(sequences, BadRow):
            shown.append(PreviewRow(place, name, supervised, [], f"{sequences.reason}: {sequences.detail}"))
        else:
            texts = [_show_sequence(sequence, tokenizer, max_tokens) for sequence in sequences]
            shown.append(PreviewRow(place, name, supervised, texts, None))
    return shown


def _as_sequences(result: Encoding | BadRow) -> list[TrlSequence] | BadRow:
    if isinstance(result, BadRow):
        return result
    supervised = [label != IGNORED_LABEL for label in result.labels]
    return [TrlSequence("", result.input_ids, supervised, result.num_tokens_before_cut)]


def _tokenize_each(
    rows: Sequence[tuple[str, dict[str, Any] | BadRow]],
    name: str,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    trainer_options: Mapping[str, Any],
) -> Iterator[tuple[str, list[TrlSequence] | BadRow]]:
    """Yield each row's place and sequences. One table holds all, since it gives messages the keys of all others."""
    table = datasets.Dataset(InMemoryTable(tabulate([row for _, row in rows if not isinstance(row, BadRow)], name)))
    position = 0
    for place, row in rows:
        if isinstance(row, BadRow):
            yield place, row
            continue
        try:
            sequences = list(tokenize_rows(table.select([position]), method, tokenizer, trainer_options))
        except Exception as error:  # the chat template's own, of any kind
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield place, BadRow("not tokenized", f"TRL's {method.trainer_class} raises {reason}")
        else:
            found = [sequence for example in sequences for sequence in example]
            limit = trainer_options.get("max_length")
            yield place, found or BadRow("too long", f"TRL leaves it out, since max_length is {limit}")
        position += 1


def _show_sequence(
    sequence: TrlSequence, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> PreviewSequence:
    ids, supervised = sequence.input_ids, sequence.is_supervised
    num_tokens, num_supervised, num_left_out = len(ids), sum(supervised), 0
    if max_tokens is not None and num_tokens > max_tokens:
        half = max_tokens // 2
        num_left_out = num_tokens - 2 * half
        texts = split_text(ids[:half], tokenizer) + split_text(ids[-half:], tokenizer)
        supervised = supervised[:half] + supervised[-half:]
    else:
        texts = split_text(ids, tokenizer)
    tokens = list(zip(texts, supervised, strict=True))
    return PreviewSequence(
        sequence.name, tokens, num_tokens, num_supervised, sequence.num_tokens_before_cut, num_left_out
    )


def split_text(input_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds to the tokens before it; together they are the decoded row.

    A character of several tokens belongs to the last of them.
    """
    pieces = []
    # The text of a token depends on the one before (a text's first space is dropped), so each is decoded behind the
    # tokens from `context` on, whose text is `shown`. `start` is where the tokens of the next character start.
    context, start, shown = 0, 0, ""
    for end in range(1, len(input_ids) + 1):
        text = tokenizer.decode(input_ids[context:end], skip_special_tokens=False)
        if text.endswith(_UNFINISHED_CHARACTER) and end < len(input_ids):
            pieces.append("")
            continue
        pieces.append(text[len(shown) :])
        context, start = start, end
        shown = tokenizer.decode(input_ids[context:end], skip_special_tokens=False)
    return pieces


def render_preview(rows: Iterable[PreviewRow], color: bool = False) -> str:
    """Return previewed rows as text for a terminal.

    Args:
        rows: From `preview`.
        color: Show supervised tokens in green and the rest dimmed; otherwise supervised tokens are between ⟦ and ⟧.
    """
    return "\n\n".join(_render_row(row, color) for row in rows)


def _render_row(row: PreviewRow, color: bool) -> str:
    title = show_unseen(f"{row.place} \u00b7 {row.format} \u00b7 ")
    if row.problem is not None:
        return f"{title}cannot be trained on: {show_unseen(row.problem)}"
    parts = []
    for sequence in row.sequences:
        name = f"{sequence.name}: " if sequence.name else ""
        parts.append(f"{title}{name}{_count_tokens(sequence)}: {row.mask_method}\n{_render_tokens(sequence, color)}")
    return "\n\n".join(parts)


def _count_tokens(sequence: PreviewSequence) -> str:
    """Return how many tokens a sequence has, how many it had before truncation, and how many are supervised."""
    cut = ""
    if sequence.num_tokens < sequence.num_tokens_before_cut:
        cut = f", truncated from {sequence.num_tokens_before_cut}"
    return f"{sequence.num_tokens} tokens{cut}, {sequence.num_supervised_tokens} supervised"


def _render_tokens(sequence: PreviewSequence, color: bool) -> str:
    body = ""
    for is_supervised, tokens in groupby(sequence.tokens, key=lambda token: token[1]):
        text = show_unseen("".join(piece for piece, _ in tokens))
        if color:
            body += f"{_SUPERVISED_COLOR if is_supervised else _CONTEXT_COLOR}{text}{_NO_COLOR}"
        else:
            body += f"\u27e6{text}\u27e7" if is_supervised else text
    return body
