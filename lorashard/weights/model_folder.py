"""What a model's folder holds beside the tensors: file names, links that lead out of it, JSON files."""

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
_RESTORE = "restore or download it again"


def check_links(folder: Path) -> None:
    """Refuse the folder of a model, tokenizer or adapter in which a link leads to a file outside of it.

    Raises:
        CheckpointError: Naming the link.
    """
    files = (path for path in [*folder.iterdir(), *(folder / TEMPLATES_FOLDER).glob("*")] if path.is_file())
    link = find_link_out(folder, files)
    if link is not None:
        raise CheckpointError(
            where=folder,
            expected="files of its own",
            found=f"a link that leads out of it: {link}",
            fix="if that is the file you mean, copy it there; if the folder is from someone else, do not trust it",
        )


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the content of a model's config.json, unchanged.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise CheckpointError(where=folder, expected=f"a {CONFIG_NAME}", found="none", fix="give the folder of a model")
    return read_json_object(file)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file that was downloaded or written completely.

    Raises:
        CheckpointError: It cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"damaged: not valid JSON ({error})", where=file, fix=_RESTORE) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=file) from error
    if not isinstance(content, dict):
        raise CheckpointError("damaged: not a JSON object", where=file, fix=_RESTORE)
    return content


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names of a list, and how many more there are, for a message."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def read_weight_map(index: Path) -> dict[str, str]:
    """Return which file holds each tensor, by an index that names files beside it and no others.

    Raises:
        CheckpointError: It is damaged, or names files elsewhere.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError("damaged: no weight_map of tensor names to file names", where=index, fix=_RESTORE)
    for key, name in weight_map.items():
        if not key.isprintable():  # it is part of messages, which a terminal shows
            raise CheckpointError(f"damaged: {key!r} cannot be the name of a tensor", where=index, fix=_RESTORE)
        if name in ("", "..") or Path(name).name != name or "\0" in name:
            raise CheckpointError(
                "not to be trusted",
                where=index,
                expected="names of weight files beside it",
                found=repr(name),
                fix="download the file again",
            )
    return weight_map
