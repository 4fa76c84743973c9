"""`save_pretrained` of a sharded model: PEFT's own, with what it leaves out written into the same files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, peft_model
from safetensors.torch import save_file

from ..errors import ConfigError
from ..weights.derived_from import Origin
from .embeddings import Embeddings
from .patches import wrap_method

# Given the `path_initial_model_for_weight_conversion` of `save_pretrained`: what the metadata of a saved adapter says
# of its base, and the original base if PEFT converts the adapter for that.
DescribeBase = Callable[[str | None], tuple[Mapping[str, str], Origin | None]]


def follow_saving(model: PeftModel, embeddings: Embeddings, describe: DescribeBase) -> None:
    """Let `save_pretrained` write the embeddings where PEFT would, and what the adapter was trained on.

    PEFT's default also writes an embedding that an adapter targets; a frozen one is in the base's own files.

    Ranks: saving is collective with `save_embedding_layers=True` alone, where the base is sharded over ranks and has
        no embeddings of its own. See [Who reads the embeddings].
    """
    signature = inspect.signature(model.save_pretrained)

    def save(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        is_wanted = given["save_embedding_layers"]
        is_wanted = embeddings.are_own if is_wanted == "auto" else bool(is_wanted)
        if is_wanted and not given["safe_serialization"]:
            raise ConfigError(
                option="safe_serialization",
                expected="True where embeddings are saved with the adapter",
                found=given["safe_serialization"],
                fix="leave it out",
            )
        values = embeddings.read() if is_wanted else {}
        given["save_embedding_layers"] = False
        metadata, origin = describe(given["path_initial_model_for_weight_conversion"])
        with _added_to_files(values, metadata):
            original(*bound.args, **bound.kwargs)
        if origin is not None and given["is_main_process"]:
            names = model.peft_config if given["selected_adapters"] is None else given["selected_adapters"]
            for name in names:
                origin.name_in(Path(given["save_directory"], "" if name == "default" else name))

    wrap_method(model, "save_pretrained", save)


@contextmanager
def _added_to_files(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[None]:
    """Let PEFT write more tensors and metadata with an adapter's file; `save_pretrained` has no argument for them.

    The function that PEFT writes with is replaced for the whole process: not for several threads at once.
    """
    original = peft_model.safe_save_file

    def write(own: dict[str, torch.Tensor], file: str, **arguments: Any) -> None:
        save_file({**own, **tensors}, file, {**arguments["metadata"], **metadata})

    peft_model.safe_save_file = write
    try:
        yield
    finally:
        peft_model.safe_save_file = original
