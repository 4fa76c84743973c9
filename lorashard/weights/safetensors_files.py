"""A checkpoint on disk: its safetensors headers, and its tensors read by byte range.

Nothing here maps a file: reads go straight into memory that the caller owns, so resident memory stays flat.
"""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from ..errors import CheckpointError
from .model_folder import INDEX_NAME, WEIGHTS_NAME, read_weight_map, shorten

# The format's own limit; a larger number means that the first 8 bytes are no header length.
MAX_HEADER_BYTES = 100_000_000
MAX_OPEN_FILES = 4

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
    """Where one tensor lies in a checkpoint; `begin_byte` counts from the start of the file."""

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
        folder: Where the checkpoint lies.
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
            raise CheckpointError(f"Model folder {folder} does not exist. Check the path.")
        weight_map: dict[str, str] = {}
        if (folder / WEIGHTS_NAME).is_file():
            file_names = [WEIGHTS_NAME]
        elif (folder / INDEX_NAME).is_file():
            weight_map = read_weight_map(folder / INDEX_NAME)
            file_names = sorted(set(weight_map.values()))
        else:
            raise CheckpointError(_describe_missing_weights(folder))
        absent = [name for name in file_names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{folder / INDEX_NAME} names weight files that are not there: {shorten(absent)}. "
                "The download or copy is incomplete: download the files again."
            )
        tensors: dict[str, StoredTensor] = {}
        header_bytes = 0
        for name in file_names:
            stored, num_bytes = _read_header(folder / name)
            header_bytes += num_bytes
            for key, tensor in stored.items():
                if key in tensors:
                    raise CheckpointError(
                        f"Tensor {key} is stored twice, in {tensors[key].file.name} and in {name} of {folder}. "
                        "Remove the file that does not belong there, or save the model again."
                    )
                tensors[key] = tensor
        strays = [
            f"{key} ({name})"
            for key, name in weight_map.items()
            if key not in tensors or tensors[key].file != folder / name
        ]
        if strays:
            raise CheckpointError(
                f"{folder / INDEX_NAME} names tensors that are not in their files: {shorten(strays)}. "
                "Index and files are from different checkpoints: download them again."
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
        done = 0
        # One call reads at most 2 GiB on Linux.
        while done < len(view):
            try:
                num_bytes = os.preadv(descriptor, [view[done:]], tensor.begin_byte + begin + done)
            except OSError as error:  # a disk or a network file system that fails
                raise CheckpointError(f"{tensor.file} cannot be read: {error.strerror}.") from error
            if num_bytes == 0:
                raise CheckpointError(
                    f"{tensor.file} ended inside tensor {tensor.key}: it was changed or truncated after it was opened. "
                    "Start again with the whole file."
                )
            done += num_bytes
        self.bytes_read += done

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


def _describe_missing_weights(folder: Path) -> str:
    expected = f"Expected {WEIGHTS_NAME} or {INDEX_NAME} in {folder}, found "
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        return (
            f"{expected}only pickled weights ({shorten(pickled)}), which cannot be read by byte range. Convert them "
            'once: python -c "from transformers import AutoModelForCausalLM as A; '
            f"A.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({str(folder) + '-safetensors'!r})\", "
            "and copy the tokenizer files over."
        )
    others = sorted(path.name for path in folder.iterdir())
    return (
        f"{expected}{shorten(others) if others else 'an empty folder'}. "
        "Give the folder of a whole model. A hub model that has .bin files alone must be converted first: load it with "
        "transformers and call save_pretrained."
    )


def _open_weights(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error


def _read_header(file: Path) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors of one safetensors file and the bytes read to learn of them."""
    with _open_weights(file) as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        if prefix == b"version ":
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.")
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} ({file_bytes} bytes) does not begin with the length of a safetensors header: it is damaged or "
                "not a safetensors file. Download the file again."
            )
        if 8 + header_bytes > file_bytes:
            raise CheckpointError(
                f"{file} is truncated: its header should end at byte {8 + header_bytes}, the file has {file_bytes}. "
                "Download the file again."
            )
        raw = stream.read(header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {file} is damaged ({error}). Download the file again.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"The header of {file} is damaged: expected a JSON object. Download the file again.")
    header.pop("__metadata__", None)
    tensors = {key: _parse_entry(file, 8 + header_bytes, key, entry) for key, entry in header.items()}
    _check_contiguous(file, 8 + header_bytes, file_bytes, tensors.values())
    return tensors, 8 + header_bytes


def _parse_entry(file: Path, data_begin_byte: int, key: str, entry: object) -> StoredTensor:
    if not key.isprintable():  # it comes into messages, which a terminal shows
        raise CheckpointError(f"The header of {file} is damaged: no tensor is called {key!r}. Download the file again.")
    damaged = f"The header of {file} is damaged at tensor {key}"
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{damaged}: no dtype, shape and data_offsets in {entry}. Download it again.") from error
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointError(f"{damaged}: shape and offsets must be whole numbers, found {entry}. Download it again.")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(
            f"Tensor {key} in {file} has dtype {dtype_name}, which is not supported (only {', '.join(DTYPES)}). "
            "Save the model in one of these first."
        )
    dtype = DTYPES[dtype_name]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{damaged}: {dtype_name} of shape {list(shape)} takes {math.prod(shape) * dtype.itemsize} bytes, its "
            f"offsets [{begin}, {end}) say {end - begin}. Download the file again."
        )
    return StoredTensor(key, file, dtype, shape, data_begin_byte + begin, end - begin)


def _check_contiguous(file: Path, data_begin_byte: int, file_bytes: int, tensors: Iterable[StoredTensor]) -> None:
    """Check that the tensors cover the file from header to end, each once, as the format demands."""
    position, before = data_begin_byte, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin_byte, tensor.num_bytes)):
        if tensor.begin_byte != position:
            fault = "overlaps with" if tensor.begin_byte < position else "leaves a gap after"
            raise CheckpointError(
                f"The header of {file} is damaged: tensor {tensor.key} begins at byte {tensor.begin_byte} and {fault} "
                f"{before}, which ends at {position}. Download the file again."
            )
        position, before = tensor.begin_byte + tensor.num_bytes, tensor.key
    if position > file_bytes:
        raise CheckpointError(
            f"{file} is truncated: its tensors should end at byte {position}, the file has {file_bytes} "
            f"(the last one is {before}). Download the file again."
        )
    if position < file_bytes:
        raise CheckpointError(
            f"{file} is damaged: its tensors end at byte {position}, but the file has {file_bytes}. Download it again."
        )
