"""`save_pretrained` of a sharded model: PEFT's own, and what has to be in the files beside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from peft import PeftModel

from ..errors import ConfigError
from ..weights.fingerprint import add_tensors
from .embeddings import Embeddings

# Told the folder of each adapter that this rank has written, and the arguments of `save_pretrained`, by name.
AfterSaving = Callable[[Path, Mapping[str, Any]], None]

_STEPS_ATTRIBUTE = "_lorashard_after_saving"


def follow_saving(model: PeftModel, embeddings: Embeddings) -> None:
    """Let `save_pretrained` write the embeddings where PEFT would, and then take the steps of `after_saving`.

    PEFT's default also writes an embedding that an adapter targets; a frozen one is in the base's own files.

    Ranks: saving is collective with `save_embedding_layers=True` alone, where the base is sharded over ranks and has
        no embeddings of its own. See [Who reads the embeddings].
    """
    original = model.save_pretrained
    signature = inspect.signature(original)
    steps: list[AfterSaving] = []
    setattr(model, _STEPS_ATTRIBUTE, steps)

    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        is_wanted = given["save_embedding_layers"]
        is_wanted = embeddings.are_own if is_wanted == "auto" else bool(is_wanted)
        if is_wanted and not given["safe_serialization"]:
            raise ConfigError(
                "safe_serialization: expected True where embeddings are saved with the adapter, found False"
            )
        values = embeddings.read() if is_wanted else {}
        given["save_embedding_layers"] = False
        original(*bound.args, **bound.kwargs)
        if not (given["is_main_process"] and given["safe_serialization"]):
            return
        names = model.peft_config if given["selected_adapters"] is None else given["selected_adapters"]
        for folder in (Path(given["save_directory"], "" if name == "default" else name) for name in names):
            if values:
                add_tensors(folder, values)
            for step in steps:
                step(folder, given)

    model.save_pretrained = save


def after_saving(model: PeftModel, step: AfterSaving) -> None:
    """Let `step` be taken after those that are there already, for each adapter that `model` saves."""
    getattr(model, _STEPS_ATTRIBUTE).append(step)
