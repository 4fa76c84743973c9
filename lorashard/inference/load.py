"""Load a trained adapter, with its tokenizer, for the commands that use one."""

from __future__ import annotations

from pathlib import Path

from peft import PeftConfig, PeftModel, TaskType
from transformers import PreTrainedTokenizerBase

from .. import api
from ..config.use_options import UseOptions
from ..data.tokenizer import load_tokenizer
from ..errors import ConfigError
from ..model.saved import find_adapter, find_base, read_config
from ..runtime.dtypes import read_dtype


def load_for_use(adapter: str, options: UseOptions, num_cached_tokens: int) -> PeftModel:
    """Return the adapter on its base, in eval mode.

    Args:
        num_cached_tokens: tokens, of all rows together, that the key-value cache must have room for.

    Raises:
        UserError: as for `load_adapter`, or the adapter is not one of a causal language model.

    Ranks: collective over all ranks.
    """
    folder = find_adapter(adapter)
    check_is_causal(folder, read_config(folder))
    return api.load_adapter(
        folder,
        options.base,
        dtype=read_dtype(options.dtype),
        revision=options.model_revision,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        quantization=options.quantization,
        allow_base_mismatch=options.allow_base_mismatch,
        num_cached_tokens=num_cached_tokens,
        placement=options,
    )


def check_is_causal(folder: Path, config: PeftConfig) -> None:
    """Refuse an adapter that generates no text.

    Raises:
        ConfigError: it is for another task.
    """
    if config.task_type not in (None, TaskType.CAUSAL_LM):
        found = f"task_type {config.task_type}"
        raise ConfigError(where=folder, expected="an adapter of a causal language model", found=found)


def load_saved_tokenizer(adapter: str, options: UseOptions) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was saved with an adapter, or else its base's.

    Raises:
        UserError: neither has one.
    """
    folder = find_adapter(adapter)
    if (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(str(folder), None, options.trust_remote_code)
    base, revision = find_base(folder, read_config(folder), options.base, options.model_revision)
    return load_tokenizer(base, revision, options.trust_remote_code)
