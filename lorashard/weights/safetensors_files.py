"""A checkpoint on disk: its folder, its safetensors headers, and its tensors read by byte range.

Nothing here maps a file: reads go straight into memory that the caller owns, so resident memory stays flat.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from ..errors import CheckpointError
from ..runs.links import find_link_out

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

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

# Everything but weights: configuration, tokenizer, chat template, custom code.
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
_FOREIGN_FILES = ["original/*", "onnx/*", "openvino/*", "gguf/*"]
_TEMPLATES_FOLDER = "additional_chat_templates"


def resolve_folder(
    model_name_or_path: str | Path,
    revision: str | None = None,
    *,
    allow_download: bool = True,
    may_link: bool = False,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> Path:
    """Return the local folder of a model, downloading it from the hub where it is not on disk yet.

    Only `model.safetensors`, or the files that its index names, and the small files beside them are downloaded:
    never `.bin`, `.gguf`, `consolidated.safetensors` or other copies of the weights.

    Args:
        model_name_or_path: A folder, or a hub id such as `org/model`. A folder that exists wins.
        revision: Branch, tag or commit of a hub id; has no meaning for a folder.
        allow_download: False takes only what is in the hub's cache.
        may_link: Files of a folder may be links to anywhere: lorashard has made it itself.
        progress: Told, while weights are downloaded, how many bytes are there, of how many, and "bytes"; from threads,
            one at a time. What it raises ends the download.

    Raises:
        CheckpointError: The folder is missing or has links that lead out of it, or the hub has no such model, or it
            cannot be reached.
    """
    name = str(model_name_or_path)
    if "://" in name:  # it may hold a password, so it is not repeated
        raise CheckpointError("Expected a model folder or a hub id such as org/model, found an address with '://'.")
    path = Path(name).expanduser()
    if path.is_dir():
        if not may_link:
            check_links(path)
        return path
    if path.exists():
        raise CheckpointError(f"Expected a model folder or a hub id, found a file: {path}. Give the folder it lies in.")
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise CheckpointError(
            f"Model folder {path} does not exist (seen from {Path.cwd()}). "
            "Check the path, or give a hub id such as org/model."
        )
    is_online = allow_download and not constants.HF_HUB_OFFLINE
    with explain_hub_errors(name, revision):
        folder = _download(name, revision, _SMALL_FILES, is_online)
        index = folder / INDEX_NAME
        weights = sorted(set(_read_weight_map(index).values())) if index.is_file() else [WEIGHTS_NAME]
        bar = None if progress is None else _make_bar(progress, _find_missing_bytes(folder, index, weights))
        # The same commit again, should the branch move between the two calls.
        folder = _download(name, folder.name, weights, is_online, bar)
        # The cache may hold the tokenizer alone, which others downloaded: the hub's client does not notice.
        if not is_online and not all((folder / weight).is_file() for weight in weights):
            raise LocalEntryNotFoundError("the weights are missing")
    return folder


def check_links(folder: Path) -> None:
    """Refuse the folder of a model, tokenizer or adapter in which a link leads to a file outside of it.

    Raises:
        CheckpointError: Naming the link.
    """
    files = (path for path in [*folder.iterdir(), *(folder / _TEMPLATES_FOLDER).glob("*")] if path.is_file())
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


def _find_missing_bytes(folder: Path, index: Path, weights: Sequence[str]) -> int:
    """Return how many bytes of weights are not there yet, as far as the index tells; 0 where it does not."""
    if not index.is_file():
        return 0
    total = (read_json_object(index).get("metadata") or {}).get("total_size")
    there = sum((folder / name).stat().st_size for name in weights if (folder / name).is_file())
    return max(0, total - there) if isinstance(total, int) else 0


def _make_bar(progress: Callable[[int, int | None, str], None], least_bytes: int) -> type[tqdm]:
    """Return a progress bar for the hub's client, which is shown as ever and also tells `progress`.

    Args:
        least_bytes: of all files; the client counts only those that it has begun with.
    """
    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            # Beside the files' bytes the client counts files, and bytes on the network.
            self._counts = kwargs.get("unit") == "B" and not (name or "").endswith(".transfer")
            self._done_bytes = 0
            super().__init__(*args, name=name, **kwargs)

        def refresh(self, *args: Any, **kwargs: Any) -> bool | None:
            self._tell(0)  # a file is begun
            return super().refresh(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            self._tell(int(n or 0))
            return super().update(n)

        def _tell(self, num_bytes: int) -> None:
            if self._counts and self.total:
                with lock:
                    self._done_bytes += num_bytes
                    progress(self._done_bytes, max(int(self.total), least_bytes, self._done_bytes), "bytes")

    return Bar


def _download(
    repo_id: str, revision: str | None, patterns: list[str], is_online: bool, bar: type[tqdm] | None = None
) -> Path:
    folder = snapshot_download(
        repo_id,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=_FOREIGN_FILES,
        local_files_only=not is_online,
        tqdm_class=bar,
    )
    return Path(folder)


@contextmanager
def explain_hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's client raises about a model into one line that says what to do.

    Raises:
        CheckpointError: The hub has no such model, or does not give it, or it cannot be reached.
    """
    where = f"{repo_id} (revision {revision or 'main'})"
    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(
            f"Model {repo_id!r} is neither a folder here nor a hub id of the form org/model. Check the spelling."
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"The hub does not let you read {where}: it is gated. Ask for access at https://huggingface.co/{repo_id}, "
            "then log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(_explain_unseen(repo_id)) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"The hub's {repo_id} has no revision {revision!r}. Give a branch, tag or commit that it has."
        ) from error
    except LocalEntryNotFoundError as error:
        reason = _in_one_line(error.__cause__) if error.__cause__ else "offline, or downloads are switched off"
        raise CheckpointError(
            f"There is no folder {repo_id!r} here, and {where} is not whole in the hub's cache while the hub cannot be "
            f"asked ({reason}). Check the path, or go online once and download it."
        ) from error
    except (HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise CheckpointError(_explain_unseen(repo_id)) from error
        raise CheckpointError(
            f"{where} could not be downloaded from the hub: {_in_one_line(error)}. Try again (files that arrived whole "
            "are kept), or give a local folder."
        ) from error


def _explain_unseen(repo_id: str) -> str:
    return (
        f"There is no folder {repo_id!r} here and no model {repo_id} on the hub that you may see. "
        "Check the spelling; for a private model log in with `hf auth login` or set HF_TOKEN."
    )


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


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
            weight_map = _read_weight_map(folder / INDEX_NAME)
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


def _read_weight_map(index: Path) -> dict[str, str]:
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


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names of a list, and how many more there are, for a message."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
