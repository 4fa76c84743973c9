"""What a model is, how large, and where, in a line: from its config and the headers of its files, without weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_safetensors_metadata, model_info
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

from ..errors import CheckpointError
from ..planning.wording import show_parameters
from ..runtime.disk import show_bytes
from ..runtime.dtypes import name_of
from ..weights.hub import explain_hub_errors, resolve_folder
from ..weights.model_folder import read_config_json
from ..weights.safetensors_files import DTYPES, Checkpoint, StoredTensor

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def describe_model(name: str, revision: str | None) -> str:
    """Return what a model is, how large, and where, from its config and its files' headers.

    Raises:
        CheckpointError: its files are missing or damaged, or the hub refuses them.
    """
    try:
        folder = resolve_folder(name, revision, allow_download=False)
    except CheckpointError:
        if Path(name).exists() or constants.HF_HUB_OFFLINE:
            raise
        return _describe_hub_model(name, revision)
    with Checkpoint.open(folder) as checkpoint:
        tensors = [*checkpoint.tensors.values()]
    config = read_config_json(folder)
    return f"{', '.join([*_describe_config(config), *_describe_tensors(tensors)])} in {folder}"


def _describe_config(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a model's class and its number of layers, as far as a config says them; it may say anything."""
    names = config.get("architectures")
    if isinstance(names, list) and names:
        yield str(names[0])
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        numbers = [part.get(name) for name in _NUM_LAYERS]
        if found := [number for number in numbers if isinstance(number, int)]:
            yield f"{found[0]} layers"
            return


def _describe_tensors(tensors: Sequence[StoredTensor]) -> Iterator[str]:
    """Yield how many parameters there are, their dtype, and their bytes; of packed ones only tensors can be counted."""
    bytes_by_dtype: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        bytes_by_dtype[tensor.dtype] += tensor.num_bytes
    if all(dtype.is_floating_point for dtype in bytes_by_dtype):
        yield show_parameters(sum(math.prod(tensor.shape) for tensor in tensors))
    else:
        yield f"{len(tensors)} tensors"
    yield from (name_of(dtype) for dtype, _ in bytes_by_dtype.most_common(1))
    yield show_bytes(bytes_by_dtype.total())


def _describe_hub_model(name: str, revision: str | None) -> str:
    """Read the headers of a model that is not on this machine."""
    with explain_hub_errors(name, revision):
        # First, since get_safetensors_metadata reports a missing repo or revision as one without weights.
        commit = model_info(name, revision=revision).sha
        try:
            metadata = get_safetensors_metadata(name, revision=commit)
        except NotASafetensorsRepoError as error:
            fix = "choose another model, or convert it: load it with transformers and call save_pretrained"
            raise CheckpointError("the hub has no safetensors weights of it", where=name, fix=fix) from error
        except SafetensorsParsingError as error:
            fix = "choose another revision"
            raise CheckpointError("damaged weights on the hub", where=name, found=error, fix=fix) from error
    tensors = [
        StoredTensor(key, Path(name), DTYPES[info.dtype], tuple(info.shape), begin, end - begin)
        for name, file in metadata.files_metadata.items()
        for key, info in file.tensors.items()
        for begin, end in [info.data_offsets]
        if info.dtype in DTYPES  # finetune refuses others, once it has them
    ]
    return f"{', '.join(_describe_tensors(tensors))} on the hub; finetune will download them"
