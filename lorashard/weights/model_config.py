"""A model's config as transformers reads it, with one-line errors for a bad config or code that comes with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from ..errors import CheckpointError
from .model_folder import CONFIG_NAME, read_config_json
from .stored_formats import forget_stored_format

_GENERATION_NAME = "generation_config.json"


def read_model_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the config of the model in a folder; it describes plain modules even where the files are quantized.

    Raises:
        CheckpointError: it is missing, damaged, of a kind that transformers does not know, or needs code that comes
            with the model.
    """
    values = read_config_json(folder)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and the validators of each model raise anything
        reason = explain_code(error, folder, values)
        if reason is not None:
            raise CheckpointError(reason) from error
        raise CheckpointError(
            f"describes no model that transformers knows ({describe_error(error)})",
            where=folder / CONFIG_NAME,
            fix="download the file again, or choose a model that this version supports",
        ) from error
    forget_stored_format(config)
    return config


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """Return the generation config of the model in a folder; None if there is none.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not (folder / _GENERATION_NAME).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # as above
        raise CheckpointError(
            f"damaged ({describe_error(error)})",
            where=folder / _GENERATION_NAME,
            fix="download the file again, or remove it",
        ) from error


def explain_code(error: Exception, folder: Path, values: dict[str, Any]) -> str | None:
    """Return what to report where transformers refuses to run code that comes with a model; None for other errors.

    Args:
        folder: of the model or the tokenizer.
        values: the content of its config, whose `auto_map` names the code.
    """
    auto_map = values.get("auto_map")
    if "trust_remote_code" not in str(error) or not isinstance(auto_map, dict):
        return None
    references = {part for value in auto_map.values() for part in (value if isinstance(value, list) else [value])}
    places = []
    for reference in sorted(str(part) for part in references if part):
        repository, _, path = reference.rpartition("--")
        module = path.partition(".")[0]
        places.append(f"{module}.py of the hub's {repository}" if repository else str(folder / f"{module}.py"))
    return (
        f"{folder} needs code of its own ({', '.join(dict.fromkeys(places))}), which is not run by default; read it "
        "and give --trust_remote_code if you trust it"
    )


def describe_error(error: BaseException) -> str:
    """Return the message of a library's error in one line, with its class where the message alone says little."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if isinstance(error, LookupError) or not text else text[:300]
