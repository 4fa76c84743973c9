"""The identity of a base: the hashes of its files, computed once and remembered, since weights are large."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from filelock import FileLock
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from ..config.quantization_options import Format, Quantization, describe_quantization
from ..errors import CheckpointError, ConfigError
from ..runtime import dist
from ..runtime.disk import replace_text
from ..runtime.dtypes import name_of
from ..runtime.progress import Progress, told_progress
from .model_folder import shorten

ADAPTER_NAME = "adapter_model.safetensors"
_METADATA_KEY = "lorashard.base"
_QUANTIZATION_KEY = "lorashard.quantization"
_DTYPES = ("bfloat16", "float16", "float32")
_COARSEST_CLOCK_S = 2  # of a file system's times: FAT's
_SAVE_AGAIN = "save or download the adapter again"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseIdentity:
    """A base, by the sha256 of each of its weight files."""

    files: Mapping[str, str]

    @classmethod
    def of(cls, files: Sequence[Path], progress: Progress | None = None) -> BaseIdentity:
        """Hash the files of a base, each on one rank.

        Args:
            progress: called with the bytes of this rank's files that are hashed; by default it is shown on stderr.

        Ranks: collective over all ranks, which must see the same files. They meet after each file, since a collective
            may not wait for hours.
        """
        files = sorted(files)
        num_ranks = dist.get_world_size()
        total_bytes = sum(file.stat().st_size for file in files[dist.get_rank() :: num_ranks])
        done_bytes = 0

        def advance(num_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += num_bytes
            tell(done_bytes, total_bytes, "bytes hashed")

        hashes: dict[str, str] = {}
        with told_progress("hashing the base's files, once", dist.get_rank() == 0, progress) as tell:
            for begin in range(0, len(files), num_ranks):
                mine = files[begin : begin + num_ranks][dist.get_rank() : dist.get_rank() + 1]
                for part in dist.gather_objects({file.name: hash_file(file, advance) for file in mine}):
                    hashes |= part
        return cls(hashes)

    def digest(self) -> bytes:
        """Return one hash of all files, independent of their names."""
        return hashlib.sha256("".join(sorted(self.files.values())).encode()).digest()

    @classmethod
    def read(cls, adapter: Path) -> BaseIdentity | None:
        """Return the base that the adapter in a folder was trained on; None if its file does not say.

        Raises:
            CheckpointError: the adapter's file is damaged.
        """
        text = _read_metadata(adapter, _METADATA_KEY)
        return cls(_parse_hashes(text, adapter / ADAPTER_NAME)) if text else None

    def check(self, adapter: Path, base: str, allow_base_mismatch: bool = False) -> None:
        """Refuse an adapter that was trained on another base; one whose file does not say passes.

        Args:
            base: the base's name, for the message.

        Raises:
            ConfigError: the files differ, unless `allow_base_mismatch`.
        """
        trained_on = BaseIdentity.read(adapter)
        if trained_on is None or trained_on.digest() == self.digest():
            return
        differing = sorted(name for name, sha256 in self.files.items() if trained_on.files.get(name) != sha256)
        mismatch = ConfigError(
            f"trained on another base than {base}",
            where=adapter,
            expected="weight files with the hashes that the adapter carries",
            found=f"other hashes of {shorten(differing, 1)}" if differing else "fewer files",
            fix="give its own base, or --allow_base_mismatch to continue regardless",
        )
        _refuse(mismatch, allow_base_mismatch)


def describe_base(
    identity: BaseIdentity | None, quantization: Quantization | None = None, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """Return what the metadata of an adapter's file says of the base that the adapter was trained on.

    Args:
        identity: None where the base's files are not known.
        quantization: what the base was quantized to.
        dtype: of a quantized base before it was quantized, and of what it is dequantized to: its values depend on it.
    """
    metadata = {}
    if identity is not None:
        metadata[_METADATA_KEY] = json.dumps(identity.files, sort_keys=True)
    if quantization is not None:
        values = asdict(quantization) | ({"dtype": name_of(dtype)} if dtype is not None else {})
        metadata[_QUANTIZATION_KEY] = json.dumps(values, sort_keys=True)
    return metadata


def read_quantization_of(adapter: Path) -> Quantization | None:
    """Return what the base of the adapter in a folder was quantized to in training; None if it was not quantized.

    Raises:
        CheckpointError: the adapter's file is damaged, or from a version that knows other formats.
    """
    return read_quantized_form(adapter)[0]


def read_quantized_form(adapter: Path) -> tuple[Quantization | None, torch.dtype | None]:
    """Return what `read_quantization_of` does, and the dtype of the base's values if the adapter's file says.

    Raises:
        CheckpointError: as for `read_quantization_of`.
    """
    text = _read_metadata(adapter, _QUANTIZATION_KEY)
    if not text:
        return None, None
    try:
        values = json.loads(text)
        dtype = values.pop("dtype", None)
        found = Quantization(**values)
        is_known = found.format in get_args(Format) and dtype in (None, *_DTYPES)
        is_known = is_known and {type(found.double_quant), type(found.has_vocabulary)} == {bool}
    except (ConfigError, ValueError, TypeError, AttributeError, RecursionError):
        is_known = False
    if not is_known:
        raise CheckpointError(
            f"unknown {_QUANTIZATION_KEY} in its metadata",
            where=adapter / ADAPTER_NAME,
            expected="nf4, int8 or fp8 and its options",
            found=repr(text[:80]),
            fix=f"another version of lorashard may have written it; otherwise {_SAVE_AGAIN}",
        )
    return found, getattr(torch, dtype) if dtype else None


def check_quantization(
    adapter: Path, quantization: Quantization | None, base: str, allow_base_mismatch: bool = False
) -> None:
    """Refuse to resume the training of an adapter whose base was quantized differently.

    Args:
        quantization: what the base is quantized to now.
        base: the base's name, for the message.

    Raises:
        ConfigError: the two differ, unless `allow_base_mismatch`.
    """
    trained_on = read_quantization_of(adapter)
    if trained_on == quantization:
        return
    mismatch = ConfigError(
        f"trained on another form of {base}",
        option="quantization",
        where=adapter,
        expected=describe_quantization(trained_on),
        found=describe_quantization(quantization),
        fix="give what it was trained on, or --allow_base_mismatch to continue regardless",
    )
    _refuse(mismatch, allow_base_mismatch)


def _refuse(mismatch: ConfigError, is_allowed: bool) -> None:
    if not is_allowed:
        raise mismatch
    _logger.warning("%s (ignored, as allow_base_mismatch is set)", mismatch)


def _read_metadata(adapter: Path, key: str) -> str | None:
    if not (adapter / ADAPTER_NAME).is_file():
        return None
    with open_adapter(adapter) as opened:
        return (opened.metadata() or {}).get(key)


def _parse_hashes(text: str, file: Path) -> dict[str, str]:
    try:
        hashes = json.loads(text)
    except (ValueError, RecursionError):
        hashes = None
    if not isinstance(hashes, dict) or not all(isinstance(sha256, str) for sha256 in hashes.values()):
        raise CheckpointError(
            f"damaged {_METADATA_KEY} in its metadata",
            where=file,
            expected="names and hashes of the base's files",
            found=repr(text[:40]),
            fix=_SAVE_AGAIN,
        )
    return hashes


@contextmanager
def open_adapter(folder: Path) -> Iterator[safe_open]:
    """Open the file of an adapter's tensors.

    Raises:
        CheckpointError: it is damaged.
    """
    file = folder / ADAPTER_NAME
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"damaged ({error})", where=file, fix=_SAVE_AGAIN) from error
    with opened:
        yield opened


def find_cache_dir() -> Path:
    """Return the folder for what lorashard derives from models, beside the hub's own cache."""
    return Path(constants.HF_HOME) / "lorashard"


def hash_file(file: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the sha256 of a file's content, in hex.

    Args:
        advance: called with each number of bytes done: as they are read, or all at once where the hash is known.

    The hub's cache names weight files by their hash. Others are read once, and again if size, times, inode or device
    change: size and time of modification alone are the same for many checkpoints. A file that was changed a moment ago
    is read each time: clocks are coarse, and another change in the same tick would leave the same times.
    """
    resolved = file.resolve()
    key = _make_key(resolved)
    known_file = find_cache_dir() / "hashes.json"
    if resolved.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", resolved.name):
        known: str | None = resolved.name
    else:
        known = _read_known(known_file).get(key)  # replaced as a whole, so read without the lock
    if known is not None:
        if advance is not None:
            advance(resolved.stat().st_size)
        return known
    is_settled = time.time() - resolved.stat().st_ctime > _COARSEST_CLOCK_S
    sha256 = _hash(resolved, advance)
    if not is_settled or _make_key(resolved) != key:
        return sha256
    try:
        known_file.parent.mkdir(parents=True, exist_ok=True)
        _remember(known_file, key, sha256)
    except OSError as error:
        _logger.warning("%s cannot be written (%s), so %s is hashed each time", known_file, error.strerror, resolved)
    return sha256


def _make_key(file: Path) -> str:
    status = file.stat()
    return ":".join(
        map(str, (file, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev))
    )


def _hash(file: Path, advance: Callable[[int], None] | None) -> str:
    with _CountedFile(file, advance) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _CountedFile(io.FileIO):
    """A file that reports the bytes that are read of it."""

    def __init__(self, file: Path, advance: Callable[[int], None] | None) -> None:
        super().__init__(file, "rb")
        self._advance = advance

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer) or 0
        if self._advance is not None and num_bytes:
            self._advance(num_bytes)
        return num_bytes


def _read_known(known_file: Path) -> dict[str, str]:
    try:
        return json.loads(known_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there yet, or damaged: it is only a cache
        return {}


def _remember(known_file: Path, key: str, sha256: str) -> None:
    with FileLock(known_file.with_suffix(".lock")):
        replace_text(known_file, json.dumps(_read_known(known_file) | {key: sha256}, indent=1))
