"""Load a trained adapter, with its tokenizer, for the commands that use one."""

from __future__ import annotations

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from . import api
from .data.tokenizer import load_tokenizer
from .model.saved import find_adapter, read_config
from .use_options import UseOptions


def load_for_use(
    adapter: str, options: UseOptions, num_cached_tokens: int
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Return the adapter on its base, in eval mode, and the tokenizer that was saved with it, or else the base's.

    Args:
        num_cached_tokens: tokens of all rows for which there is to be room in the key-value cache.

    Raises:
        UserError: as for `load_adapter`, or there is no tokenizer.

    Ranks: collective over all ranks.
    """
    folder = find_adapter(adapter)
    tokenizer = load_saved_tokenizer(adapter, options)
    model = api.load_adapter(
        folder,
        options.base,
        dtype=getattr(torch, options.dtype),
        revision=options.model_revision,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        allow_base_mismatch=options.allow_base_mismatch,
        num_cached_tokens=num_cached_tokens,
        **options.placement_options(),
    )
    return model, tokenizer


def load_saved_tokenizer(adapter: str, options: UseOptions) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was saved with an adapter, or else its base's.

    Raises:
        UserError: there is none.
    """
    folder = find_adapter(adapter)
    has_own = (folder / "tokenizer_config.json").is_file()
    name = str(folder) if has_own else options.base or read_config(folder).base_model_name_or_path
    return load_tokenizer(name, None if has_own else options.model_revision, options.trust_remote_code)
