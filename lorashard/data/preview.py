"""Show the first rows as the model will see them, and which tokens are supervised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from ..config.data_options import DataOptions
from .encode import IGNORED_LABEL, Encoding, encode_source
from .sources import open_source

_SUPERVISED_COLOR, _CONTEXT_COLOR, _NO_COLOR = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_UNFINISHED_CHARACTER = "�"
# Text from a dataset must not control the terminal: control characters are shown as their pictures.
_CONTROL_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "␡"}


@dataclass(frozen=True)
class PreviewRow:
    """One row: its tokens as (text, whether it is supervised), or the problem for which it is skipped."""

    place: str
    format: str
    mask_method: str
    tokens: list[tuple[str, bool]]
    num_tokens: int
    num_supervised_tokens: int
    num_tokens_before_cut: int
    problem: str | None


def preview(options: DataOptions, tokenizer: PreTrainedTokenizerBase, num_rows: int = 3) -> list[PreviewRow]:
    """Encode the first rows of the training dataset as `prepare` would, before packing, bad rows included.

    Raises:
        DataError: The dataset is missing, or its columns are not recognized.
        ConfigError: The options do not suit the dataset or the tokenizer.
    """
    source = open_source(options.dataset, options.dataset_split, options.dataset_config, options.dataset_revision)
    encoder, results = encode_source(source, options, tokenizer, options.packing, num_rows)
    rows = []
    for place, result in results:
        context = (place, encoder.format.name, encoder.mask_method)
        if isinstance(result, Encoding):
            supervised = [label != IGNORED_LABEL for label in result.labels]
            tokens = list(zip(split_text(result.input_ids, tokenizer), supervised, strict=True))
            rows.append(PreviewRow(*context, tokens, len(tokens), sum(supervised), result.num_tokens_before_cut, None))
        else:
            rows.append(PreviewRow(*context, [], 0, 0, 0, f"{result.reason}: {result.detail}"))
    return rows


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
    title = f"{row.place} · {row.format} · "
    if row.problem is not None:
        return _defuse(f"{title}cannot be trained on: {row.problem}")
    cut = f", truncated from {row.num_tokens_before_cut}" if row.num_tokens < row.num_tokens_before_cut else ""
    title += f"{row.num_tokens} tokens{cut}, {row.num_supervised_tokens} supervised: {row.mask_method}"
    body = ""
    for is_supervised, tokens in groupby(row.tokens, key=lambda token: token[1]):
        text = _defuse("".join(piece for piece, _ in tokens))
        if color:
            body += f"{_SUPERVISED_COLOR if is_supervised else _CONTEXT_COLOR}{text}{_NO_COLOR}"
        else:
            body += f"⟦{text}⟧" if is_supervised else text
    return f"{_defuse(title)}\n{body}"


def _defuse(text: str) -> str:
    return text.translate(_CONTROL_PICTURES)
