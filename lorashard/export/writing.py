"""Safetensors files in which every tensor has its place before the first is written, so that ranks share the work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from ..errors import ConfigError
from ..runtime.disk import sync
from ..weights.model_folder import INDEX_NAME
from ..weights.safetensors_files import DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FILENAME_PATTERN = "model{suffix}.safetensors"
# What a tensor on a GPU takes of host memory on its way to a file.
_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Place:
    """Where a tensor lies; `begin_byte` counts from the start of the file."""

    file_name: str
    begin_byte: int
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class FilePlan:
    """The files of a checkpoint, byte for byte but for the tensors' values.

    Attributes:
        headers: what each file begins with.
        file_bytes: the size of each file.
        places: where each tensor lies, by key.
        index: the index's content; None where one file holds all.
    """

    headers: Mapping[str, bytes]
    file_bytes: Mapping[str, int]
    places: Mapping[str, Place]
    index: dict[str, object] | None

    @property
    def total_bytes(self) -> int:
        return sum(self.file_bytes.values())


def plan_files(tensors: Mapping[str, torch.Tensor], max_shard_size: int | str) -> FilePlan:
    """Lay out tensors in files, named and split as transformers' `save_pretrained` does.

    Args:
        tensors: on the meta device, by key; their order decides which share a file.
        max_shard_size: bytes, or such as "5GB".

    Raises:
        ConfigError: `max_shard_size` is no size.
    """
    try:
        split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda tensor: tensor.numel() * tensor.itemsize,
            filename_pattern=_FILENAME_PATTERN,
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise ConfigError(
            option="max_shard_size",
            expected="a number of bytes, or a size such as '5GB'",
            found=repr(max_shard_size),
            fix="give one of these",
        ) from error
    headers, file_bytes, places = {}, {}, {}
    for file_name, keys in split.filename_to_tensors.items():
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        offsets = {}
        # Widest items first, as safetensors itself does: then each tensor is aligned to its items.
        for key in sorted(keys, key=lambda key: (-tensors[key].itemsize, key)):
            tensor = tensors[key]
            offsets[key], end = end, end + tensor.numel() * tensor.itemsize
            header[key] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offsets[key], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
        headers[file_name] = len(text).to_bytes(8, "little") + text
        file_bytes[file_name] = len(headers[file_name]) + end
        for key, offset in offsets.items():
            begin = len(headers[file_name]) + offset
            places[key] = Place(file_name, begin, tensors[key].dtype, tensors[key].numel())
    index: dict[str, object] | None = None
    if split.is_sharded:
        numel = sum(tensor.numel() for tensor in tensors.values())
        metadata = {"total_parameters": numel, **split.metadata}
        weight_map = {key: split.tensor_to_filename[key] for key in sorted(tensors)}
        index = {"metadata": metadata, "weight_map": weight_map}
    return FilePlan(headers, file_bytes, places, index)


@dataclass(frozen=True)
class TensorWriter:
    """Writes tensors, or parts of them, at their places in files that `create` has made.

    Several processes may write to the same files, each its own tensors.
    """

    folder: Path
    plan: FilePlan

    def create(self) -> None:
        """Make every file in its full size, with its header, and the index.

        Ranks: one process does this, before any writes.
        """
        for name, header in self.plan.headers.items():
            with (self.folder / name).open("xb") as stream:
                stream.write(header)
                stream.truncate(self.plan.file_bytes[name])
        if self.plan.index is not None:
            text = json.dumps(self.plan.index, indent=2, sort_keys=True) + "\n"
            (self.folder / INDEX_NAME).write_text(text, encoding="utf-8")

    def write(self, key: str, begin: int, values: torch.Tensor) -> None:
        """Write `values` as the elements of tensor `key` from element `begin` on, cast to its dtype.

        Memory: on a GPU a piece of 64 MiB on the host; a cast or non-contiguous tensor's copy.
        """
        place = self.plan.places[key]
        flat = values.detach().to(place.dtype).contiguous().view(-1)
        if begin + flat.numel() > place.numel:
            raise ValueError(f"elements [{begin}, {begin + flat.numel()}) of {key}, which has {place.numel}")
        with (self.folder / place.file_name).open("r+b") as stream:
            stream.seek(place.begin_byte + begin * flat.itemsize)
            for piece in flat.view(torch.uint8).split(_PIECE_BYTES):
                stream.write(memoryview(piece.cpu().numpy()))

    def flush(self) -> None:
        """Return when what this process has written is on the disk."""
        for name in self.plan.headers:
            sync(self.folder / name)
