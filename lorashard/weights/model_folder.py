"""What lies in a model's folder beside the tensors: names, links that lead out of it, JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..runs.links import find_link_out

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TEMPLATES_FOLDER = "additional_chat_templates"


def check_links(folder: Path) -> None:
    """Refuse the folder of a model, tokenizer or adapter in which a link leads to a file outside of it.

    Raises:
        CheckpointError: Naming the link.
    """
    files = (path for path in [*folder.iterdir(), *(folder / TEMPLATES_FOLDER).glob("*")] if path.is_file())
    link = find_link_out(folder, files)
    if link is not None:
        raise CheckpointError(
            f"Expected {folder} to hold its files itself, found a link that leads out of it: {link}. If that is the "
            "file you mean, copy it there; if the folder is another's, do not trust it."
        )


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return what a model's config.json says, as it stands.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise CheckpointError(f"Expected a {CONFIG_NAME} in {folder}, found none. Give the folder of a model.")
    return read_json_object(file)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file that was downloaded or written whole.

    Raises:
        CheckpointError: It cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged: it is not valid JSON ({error}). Restore or download it again."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: expected a JSON object. Restore or download it again.")
    return content


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names of a list, and how many more there are, for a message."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names. Download the file again.")
    for key, name in weight_map.items():
        if not key.isprintable():  # it comes into messages, which a terminal shows
            raise CheckpointError(f"{index} is damaged: no tensor is called {key!r}. Download the file again.")
        if name in ("", "..") or Path(name).name != name or "\0" in name:
            raise CheckpointError(
                f"{index} is not to be trusted: expected names of weight files beside it, found {name!r}. Download the "
                "file again."
            )
    return weight_map
