"""The small files beside a merged model's weights, so that Auto classes load it from its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..runtime.dtypes import name_of
from ..weights.model_folder import INDEX_NAME, TEMPLATES_FOLDER

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.tiktoken",
    "*.model",
)
_OTHER_FILES = ("*.json", "*.jinja", "*.py", "*.txt")
_NOT_COPIED = ("config.json", INDEX_NAME, "*.index.json", "adapter_config.json")


def write_companions(
    folder: Path,
    model: PreTrainedModel,
    dtype: torch.dtype,
    is_untied: bool,
    base: Path,
    tokenizer: Path | None,
    quantization_config: Mapping[str, Any] | None = None,
) -> None:
    """Write the config, generation config, tokenizer, chat template and code of a model into `folder`.

    Args:
        model: the base, without weights.
        is_untied: the merged model's embedding and head are two weights where the base's were one.
        base: the folder of the base.
        tokenizer: a folder whose tokenizer is taken instead of the base's, if it has one.
        quantization_config: how the weights are quantized; None if they are not, whatever the base was.
    """
    _write_config(folder, model, dtype, is_untied, base, quantization_config)
    has_own = tokenizer is not None and (tokenizer / "tokenizer_config.json").is_file()
    source = tokenizer if tokenizer is not None and has_own else base
    copied = [file for file in base.iterdir() if _matches(file, _OTHER_FILES) and not _matches(file, _TOKENIZER_FILES)]
    copied += [file for file in source.iterdir() if _matches(file, _TOKENIZER_FILES)]
    for file in copied:
        if file.is_file() and not _matches(file, _NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    if (source / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATES_FOLDER, folder / TEMPLATES_FOLDER)


def _matches(file: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)


def _write_config(
    folder: Path,
    model: PreTrainedModel,
    dtype: torch.dtype,
    is_untied: bool,
    base: Path,
    quantization_config: Mapping[str, Any] | None,
) -> None:
    """Write the base's config with what merging has changed; all else stays, whether transformers knows it or not."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = name_of(dtype)
    config["architectures"] = [type(model).__name__]
    parts = [config] + [part for part in config.values() if isinstance(part, dict) and "model_type" in part]
    for part in parts:
        part.pop("quantization_config", None)
    if quantization_config is not None:
        config["quantization_config"] = dict(quantization_config)
    for part in parts[1:]:
        if part.pop("torch_dtype", None) or "dtype" in part:
            part["dtype"] = config["dtype"]
    if getattr(model, "num_labels", None) is not None:  # a head that is not the base's
        config["id2label"], config["label2id"] = model.config.id2label, model.config.label2id
    if is_untied:
        for part in parts:
            if part is config or "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
