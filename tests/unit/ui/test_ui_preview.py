"""The cards of the first examples, and the figures of a run before its start."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("gradio")

from lorashard.planning.estimate_words import Figure
from lorashard_ui.drawing.preview_cards import describe_examples, draw_examples
from lorashard_ui.pages.estimate_panel import draw_figures


def make_sequence(*runs: tuple[str, bool], name: str = "", num_left_out: int = 0) -> dict:
    tokens = [(character, is_supervised) for text, is_supervised in runs for character in text]
    num_tokens = len(tokens) + num_left_out
    return {
        "name": name, "tokens": tokens, "num_tokens": num_tokens, "num_tokens_before_cut": num_tokens,
        "num_supervised_tokens": sum(is_supervised for _, is_supervised in tokens), "num_left_out": num_left_out,
    }  # fmt: skip


def make_row(*sequences: dict, problem: str | None = None, place: str = "rows.jsonl line 1") -> dict:
    about = {"format": "messages", "mask_method": "assistant turns"}
    return {"place": place, "sequences": list(sequences), "problem": problem} | about


def read_text(html: str) -> str:
    return re.sub("<[^>]*>", "", html)


def test_each_example_is_a_card_under_one_legend():
    """Catches a 'supervised' chip on every span, chosen and rejected that cannot be told apart, and a bad row that is
    left out."""
    answers = {"chosen": "2", "rejected": "3"}
    pair = [make_sequence(("1 + 1 is ", False), (answer, True), name=name) for name, answer in answers.items()]
    rows = [make_row(*pair), make_row(problem="empty field: `prompt` is empty", place="rows.jsonl line 2")]
    cards = draw_examples(rows)
    assert cards.count("<article") == 2 and cards.count('<mark class="supervised">') == 2
    assert "supervised" not in read_text(cards.replace("1 supervised", ""))
    assert describe_examples(rows, "dpo").count("<mark") == 1 and "<mark" not in describe_examples(rows, "grpo")
    other = make_row() | {"format": "text"}
    assert "Format: messages; text. Loss on: assistant turns." in describe_examples([*rows, other], "sft")
    assert "rows.jsonl line 2 cannot be trained on: empty field" in cards
    assert all(re.search(f">{name} .*1 supervised.*>{answer}<", cards) for name, answer in answers.items())


@pytest.mark.parametrize("num_left_out", [0, 326_008])
def test_long_examples_are_cut_in_the_middle(num_left_out):
    """Catches a page of 195,792 pixels, an answer behind a long prompt that is out of sight, and lost text."""
    long = make_sequence(("a" * 5000, False), ("b" * 300, True), num_left_out=num_left_out)
    card = draw_examples([make_row(long)])
    hidden = card[card.index("<details") : card.index("</details>")]
    seen = card.replace(hidden, "")
    assert card.count("a" * 100) > 40 and len(read_text(seen)) < 2000 and "show more" in hidden
    assert ("326,008 tokens are not shown" in hidden) == bool(num_left_out)
    assert "b" * 300 in seen and read_text(card).count("a") - read_text(draw_examples([make_row()])).count("a") >= 5000
    assert "<details" not in draw_examples([make_row(make_sequence(("a" * 500, False)))])


def test_what_cannot_be_seen_is_written_out():
    """Catches a row whose text is turned round by U+202E, a hidden word, and markup that the browser would run."""
    card = draw_examples([make_row(make_sequence(("a\u202eb\u200b<img src=x>", True)))])
    assert "\u202e" not in card and "\u200b" not in card and "<img" not in card
    assert 'title="U+202E RIGHT-TO-LEFT OVERRIDE">U+202E</span>' in card and "U+200B" in card


def test_figures_stand_between_their_names_and_notes():
    """Catches a figure without what has to be known of it, such as the range of a time."""
    drawn = draw_figures([Figure("Expected time", "2 h", ("1 h to 4 h", "<b>"))])
    assert drawn.index("Expected time") < drawn.index('class="value">2 h') < drawn.index("1 h to 4 h")
    assert "&lt;b&gt;" in drawn
