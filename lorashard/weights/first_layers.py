"""The first decoder layers of a checkpoint as a model of its own: another config, the same files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..errors import CheckpointError
from .model_config import read_model_config
from .model_folder import CONFIG_NAME, read_config_json

# Lists that may happen to have as many items as there are layers.
_OTHER_LISTS = ("architectures", "eos_token_id", "bos_token_id", "pad_token_id")


@contextmanager
def first_layers(folder: Path, num_layers: int, trust_remote_code: bool = False) -> Iterator[Path]:
    """Yield a temporary folder with the first `num_layers` decoder layers of the checkpoint in `folder`.

    The weight files are links, which also hold the tensors of other layers: the loader must allow them.

    Raises:
        CheckpointError: the config does not say how many layers there are.
    """
    config = read_model_config(folder, trust_remote_code)
    values = cut_config(read_config_json(folder), config, num_layers)
    with tempfile.TemporaryDirectory(prefix="lorashard-first-layers-") as name:
        for path in folder.iterdir():
            if path.is_file() and path.name != CONFIG_NAME:
                Path(name, path.name).symlink_to(path.resolve())
        Path(name, CONFIG_NAME).write_text(json.dumps(values, indent=1), encoding="utf-8")
        yield Path(name)


def cut_config(values: dict[str, Any], config: PreTrainedConfig, num_layers: int) -> dict[str, Any]:
    """Return the content of a config.json for the first layers; lists of one item per layer are cut.

    Args:
        values: the content of config.json.
        config: the same, as transformers reads it.

    Raises:
        CheckpointError: it does not say how many layers there are.
    """
    text = config.get_text_config()
    part = next(
        (name for name in values if isinstance(values[name], dict) and getattr(config, name, None) is text), None
    )
    own = values if part is None else values[part]
    count_name = text.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    num_all_layers = getattr(text, count_name, None)
    if not isinstance(num_all_layers, int):
        raise CheckpointError(
            "the first layers alone cannot be loaded",
            where=config.name_or_path,
            expected=f"{count_name} in {CONFIG_NAME}",
            found="none",
        )
    cut = {
        name: value[:num_layers]
        for name, value in own.items()
        if isinstance(value, list) and len(value) == num_all_layers and name not in _OTHER_LISTS
    }
    own = own | cut | {count_name: num_layers}
    return own if part is None else values | {part: own}
