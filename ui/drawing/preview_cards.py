"""The first examples of a dataset as cards: what the model sees, and which of it is supervised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from lorashard.data.visible import describe_unseen, split_unseen

from . import markup
from .markup import Markup

_FIRST_CHARACTERS, _LAST_CHARACTERS = 1200, 400  # of a sequence, that are shown at once
# What the colored tokens are. The other methods' losses are not computed on single tokens of an example.
_LEGENDS = {
    "sft": "supervised, the loss is computed on these tokens",
    "dpo": "the completion, its log-probability is compared with that of the other one",
    "kto": "the completion, its log-probability is compared with the reference's",
}
_NO_LEGENDS = {
    "reward": "All tokens are context. The loss compares the scores of the last tokens: chosen above rejected.",
    "grpo": "All tokens are context. The loss is computed on the completions that the model generates.",
}

Runs = Sequence[tuple[str, bool]]


def describe_examples(rows: Sequence[Mapping[str, Any]], method: str) -> Markup:
    """Return the examples' format, and one legend for all of them.

    Args:
        rows: the fields of `lorashard.data.preview.PreviewRow`.
        method: the run's.
    """
    if not rows:
        return markup.note("The dataset is empty.", "error")
    formats, masks = ("; ".join(dict.fromkeys(row[name] for row in rows)) for name in ("format", "mask_method"))
    about = markup.tag("p", f"Format: {formats}. Loss on: {masks}.", class_="subdued")
    if method not in _LEGENDS:
        return markup.join([about, markup.tag("p", _NO_LEGENDS[method])])
    mark = markup.tag("mark", "Colored", class_="supervised")
    return markup.join([about, markup.tag("p", mark, f": {_LEGENDS[method]}. The other tokens are context.")])


def draw_examples(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw a card for each example."""
    return markup.join(map(_draw_card, rows))


def _draw_card(row: Mapping[str, Any]) -> Markup:
    if row["problem"]:
        problem = markup.note(f"{row['place']} cannot be trained on: {row['problem']}", "error")
        return markup.tag("article", problem, class_="example")
    parts = []
    for sequence in row["sequences"]:
        name = markup.tag("b", sequence["name"], " ") if sequence["name"] else ""
        counts = markup.tag("span", _count_tokens(sequence), class_="subdued")
        parts += [markup.tag("p", name, counts, class_="counts"), _draw_text(sequence)]
    return markup.tag("article", markup.tag("h3", row["place"]), *parts, class_="example")


def _count_tokens(sequence: Mapping[str, Any]) -> str:
    parts = [f"{sequence['num_tokens']:,} tokens"]
    if sequence["num_tokens"] < sequence["num_tokens_before_cut"]:
        parts.append(f"truncated from {sequence['num_tokens_before_cut']:,}")
    if sequence["num_supervised_tokens"]:
        parts.append(f"{sequence['num_supervised_tokens']:,} supervised")
    return ", ".join(parts)


def _draw_text(sequence: Mapping[str, Any]) -> Markup:
    """Draw a sequence, of a long one the beginning and the end, with what is between them on request."""
    tokens, num_left_out = sequence["tokens"], sequence["num_left_out"]
    half = len(tokens) // 2 if num_left_out else len(tokens)
    first, last = _join_runs(tokens[:half]), _join_runs(tokens[half:])
    if not num_left_out and sum(len(text) for text, _ in first) <= _FIRST_CHARACTERS + _LAST_CHARACTERS:
        return markup.tag("div", *_draw_runs(first), class_="seen")
    first, rest = _split_runs(first, _FIRST_CHARACTERS)
    if not num_left_out:
        num_characters = sum(len(text) for text, _ in rest)
        rest, last = _split_runs(rest, num_characters - _LAST_CHARACTERS)
        hidden = [*_draw_runs(rest)]
    else:
        more, last = _split_runs(last, sum(len(text) for text, _ in last) - _LAST_CHARACTERS)
        gap = markup.tag("p", f"{num_left_out:,} tokens are not shown", class_="subdued")
        hidden = [*_draw_runs(rest), gap, *_draw_runs(more)]
    details = markup.tag("details", markup.tag("summary", "show more"), *hidden)
    return markup.tag("div", *_draw_runs(first), details, *_draw_runs(last), class_="seen")


def _join_runs(tokens: Runs) -> Runs:
    groups = groupby(tokens, key=lambda token: token[1])
    return [("".join(text for text, _ in group), is_supervised) for is_supervised, group in groups]


def _split_runs(runs: Runs, num_characters: int) -> tuple[Runs, Runs]:
    """Return the runs of the first characters, and those of the others."""
    before: list[tuple[str, bool]] = []
    after: list[tuple[str, bool]] = []
    for text, is_supervised in runs:
        number = max(0, min(len(text), num_characters))
        before += [(text[:number], is_supervised)] if number else []
        after += [(text[number:], is_supervised)] if number < len(text) else []
        num_characters -= number
    return before, after


def _draw_runs(runs: Runs) -> list[Markup]:
    names = {True: "mark", False: "span"}
    return [
        markup.tag(names[is_supervised], *_draw_characters(text), class_="supervised" if is_supervised else "context")
        for text, is_supervised in runs
    ]


def _draw_characters(text: str) -> list[str]:
    """Return a text with what cannot be seen, or turns the direction of writing, written out."""
    return [
        part if name is None else markup.tag("span", name, class_="unseen", title=describe_unseen(part))
        for part, name in split_unseen(text)
    ]
