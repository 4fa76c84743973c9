"""A tokenizer of words for the tiny models."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny import VOCAB_SIZE


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose word `w7` is the token 7 of a tiny model."""
    vocabulary = {"<pad>": 0, "<unk>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", padding_side="right"
    )
