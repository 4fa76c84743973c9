"""Tokenizers of words for the tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny import VOCAB_SIZE

WORDS = ("<pad>", "<unk>", "</s>", *(f"w{i}" for i in range(3, VOCAB_SIZE)))
_SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def make_tokenizer(
    words: Sequence[str] = WORDS, template: str | None = None, **special: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with spaces between them, each of which is the token of its place in `words`.

    Of the words of a tiny model `w7` is the token 7.

    Args:
        template: the chat template.
        special: special tokens of other names than `<pad>`, `<unk>`, `<s>` and `</s>`, or more of them.
    """
    special = {name: token for name, token in _SPECIAL.items() if token in words} | special
    vocabulary = {word: token for token, word in enumerate(words)}
    level = Tokenizer(models.WordLevel(vocabulary, unk_token=special.get("unk_token", words[0])))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=level, padding_side="right", **special)
    tokenizer.chat_template = template
    return tokenizer
