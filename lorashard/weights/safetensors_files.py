"""A checkpoint on disk: its safetensors headers, and its tensors read by byte range.

Nothing here keeps a file mapped: reads go straight into memory that the caller owns, so resident memory stays flat.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..engine.file_range import read_at
from ..errors import CheckpointError
from .model_folder import INDEX_NAME, WEIGHTS_NAME, read_weight_map, shorten

MAX_OPEN_FILES = 4
_DOWNLOAD = "download the file again"

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor in a checkpoint; `begin_byte` counts from the start of the file."""

    key: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin_byte: int
    num_bytes: int


class Checkpoint:
    """The tensors of a safetensors checkpoint, found from its headers and read by byte range.

    Not for several threads at once: file descriptors are opened, reused and closed as reads come.

    Attributes:
        folder: The checkpoint's folder.
        tensors: Every stored tensor by its key in the files.
        header_bytes: Bytes of headers that opening read.
        bytes_read: Bytes of tensors read so far.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor], header_bytes: int) -> None:
        self.folder = folder
        self.tensors = tensors
        self.header_bytes = header_bytes
        self.bytes_read = 0
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read and check the headers of all weight files in `folder`; no tensor is read.

        As in transformers, `model.safetensors` wins over an index, and every tensor in a file that the index names
        belongs to the checkpoint.

        Raises:
            CheckpointError: There are no safetensors weights, a file is missing, truncated or damaged, or the index
                does not match the files.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError("the model folder does not exist", where=folder, fix="check the path")
        index = folder / INDEX_NAME
        weight_map: dict[str, str] = {}
        if (folder / WEIGHTS_NAME).is_file():
            file_names = [WEIGHTS_NAME]
        elif index.is_file():
            weight_map = read_weight_map(index)
            file_names = sorted(set(weight_map.values()))
        else:
            raise _explain_missing_weights(folder)
        absent = [name for name in file_names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                f"names weight files that are missing: {shorten(absent)}",
                where=index,
                fix="the download or copy is incomplete: download the files again",
            )
        tensors: dict[str, StoredTensor] = {}
        header_bytes = 0
        for name in file_names:
            stored, num_bytes = _read_header(folder / name)
            header_bytes += num_bytes
            for key, tensor in stored.items():
                if key in tensors:
                    raise CheckpointError(
                        f"tensor {key} is stored twice, in {tensors[key].file.name} and in {name}",
                        where=folder,
                        fix="remove the file that does not belong there, or save the model again",
                    )
                tensors[key] = tensor
        misplaced = [
            f"{key} ({name})"
            for key, name in weight_map.items()
            if key not in tensors or tensors[key].file != folder / name
        ]
        if misplaced:
            raise CheckpointError(
                f"names tensors that are not in their files: {shorten(misplaced)}",
                where=index,
                fix="index and files are from different checkpoints: download them again",
            )
        return cls(folder, tensors, header_bytes)

    def read_bytes(self, tensor: StoredTensor, begin: int, end: int, out: torch.Tensor) -> None:
        """Read bytes [begin, end) of a stored tensor into `out`, without any copy in between.

        Args:
            out: uint8 CPU tensor of `end - begin` consecutive bytes.

        Raises:
            CheckpointError: The file ended before the bytes did.
        """
        if not 0 <= begin <= end <= tensor.num_bytes:
            raise ValueError(f"bytes [{begin}, {end}) are not inside {tensor.key} of {tensor.num_bytes} bytes")
        if out.dtype != torch.uint8 or out.dim() != 1 or out.numel() != end - begin or not out.is_contiguous():
            raise ValueError(f"expected {end - begin} consecutive uint8, found {out.dtype} of shape {tuple(out.shape)}")
        if begin == end:
            return
        descriptor = self._descriptor(tensor.file)
        view = memoryview(out.numpy())  # type: ignore[arg-type]
        if read_at(descriptor, tensor.file, tensor.begin_byte + begin, view) < len(view):
            raise CheckpointError(
                f"ended inside tensor {tensor.key}: changed or truncated after it was opened",
                where=tensor.file,
                fix="start again with the complete file",
            )
        self.bytes_read += len(view)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            while len(self._descriptors) >= MAX_OPEN_FILES:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        self._descriptors.move_to_end(file)
        return self._descriptors[file]


def _explain_missing_weights(folder: Path) -> CheckpointError:
    expected = f"{WEIGHTS_NAME} or {INDEX_NAME}"
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        return CheckpointError(
            where=folder,
            expected=expected,
            found=f"only pickled weights ({shorten(pickled)}), which cannot be read by byte range",
            fix='convert them once: python -c "from transformers import AutoModelForCausalLM as A; '
            f"A.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({str(folder) + '-safetensors'!r})\", "
            "and copy the tokenizer files there",
        )
    others = sorted(path.name for path in folder.iterdir())
    return CheckpointError(
        where=folder,
        expected=expected,
        found=shorten(others) if others else "an empty folder",
        fix="give the folder of a complete model; load a hub model that has only .bin files with transformers, and "
        "call save_pretrained",
    )


def _read_header(file: Path) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors of one safetensors file, and how many bytes were read to find them.

    The library checks the header, and that the tensors cover the file, each byte once.
    """
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if prefix == b"version ":
                raise CheckpointError(
                    "a Git LFS pointer, not the weights", where=file, fix="run `git lfs pull` in its folder"
                )
            with safe_open(file, framework="numpy"):
                header_bytes = int.from_bytes(prefix, "little")
            header = json.loads(stream.read(header_bytes))
    except SafetensorError as error:
        raise CheckpointError(
            f"damaged, truncated or not a safetensors file ({error})", where=file, fix=_DOWNLOAD
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror or error})", where=file) from error
    header.pop("__metadata__", None)
    data_begin_byte = 8 + header_bytes
    return {key: _parse_entry(file, data_begin_byte, key, entry) for key, entry in header.items()}, data_begin_byte


def _parse_entry(file: Path, data_begin_byte: int, key: str, entry: dict[str, Any]) -> StoredTensor:
    if not key.isprintable():  # it is part of messages, which a terminal shows
        raise CheckpointError(f"damaged: {key!r} cannot be the name of a tensor", where=file, fix=_DOWNLOAD)
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"tensor {key} has a dtype that is not supported",
            where=file,
            expected=f"one of {', '.join(DTYPES)}",
            found=entry["dtype"],
            fix="save the model in one of these first",
        )
    begin, end = entry["data_offsets"]
    return StoredTensor(key, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), data_begin_byte + begin, end - begin)
