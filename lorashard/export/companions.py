"""The small files beside a merged model's weights, so that Auto classes load it as it lies there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..runtime.dtypes import name_of
from ..weights.model_folder import INDEX_NAME

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
_TOKENIZER_FOLDER = "additional_chat_templates"
_OTHER_FILES = ("*.json", "*.jinja", "*.py", "*.txt")
_NOT_OF_A_MODEL = ("config.json", INDEX_NAME, "*.index.json", "adapter_config.json")


def write_companions(
    folder: Path,
    model: PreTrainedModel,
    dtype: torch.dtype,
    is_untied: bool,
    base: Path | None,
    tokenizer: Path | None,
    quantization_config: Mapping[str, Any] | None = None,
) -> None:
    """Write the config, generation config, tokenizer, chat template and code of a model into `folder`.

    Args:
        model: the base, without weights.
        is_untied: the merged model's embedding and head are two weights where the base's were one.
        base: the folder of the base; without it the config is the model's.
        tokenizer: a folder whose tokenizer goes before the base's, if it has one.
        quantization_config: what tells how the weights are quantized; None if they are not, whatever the base was.
    """
    has_own = tokenizer is not None and (tokenizer / "tokenizer_config.json").is_file()
    if base is None:
        _save_config(folder, model, dtype, is_untied, quantization_config)
    else:
        _copy_config(folder, model, dtype, is_untied, base, quantization_config)
        for file in sorted(base.iterdir()):
            is_tokenizer = _matches(file, _TOKENIZER_FILES)
            is_wanted = not has_own if is_tokenizer else _matches(file, _OTHER_FILES)
            if file.is_file() and is_wanted and not _matches(file, _NOT_OF_A_MODEL):
                shutil.copyfile(file, folder / file.name)
    source = tokenizer if has_own else base
    if source is None:
        return
    if has_own:
        for file in sorted(source.iterdir()):
            if file.is_file() and _matches(file, _TOKENIZER_FILES):
                shutil.copyfile(file, folder / file.name)
    if (source / _TOKENIZER_FOLDER).is_dir():
        shutil.copytree(source / _TOKENIZER_FOLDER, folder / _TOKENIZER_FOLDER)


def _matches(file: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)


def _copy_config(
    folder: Path,
    model: PreTrainedModel,
    dtype: torch.dtype,
    is_untied: bool,
    base: Path,
    quantization_config: Mapping[str, Any] | None,
) -> None:
    """Write the base's config with what merging has changed; all else stays as it is, known to transformers or not."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = name_of(dtype)
    config["architectures"] = [_class_name(model)]
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


def _save_config(
    folder: Path,
    model: PreTrainedModel,
    dtype: torch.dtype,
    is_untied: bool,
    quantization_config: Mapping[str, Any] | None,
) -> None:
    config = deepcopy(model.config)
    if quantization_config is not None:
        config.quantization_config = dict(quantization_config)
    config.dtype = dtype
    config.architectures = [_class_name(model)]
    if is_untied:
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _class_name(model: PreTrainedModel) -> str:
    return type(model).__name__
