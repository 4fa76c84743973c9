"""Units that no file holds as they are computed with, converted once and kept as files that can be mapped."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
import transformers
from filelock import FileLock

from ..errors import CheckpointError
from .identity import find_cache_dir, hash_file
from .sources import Source, fill_shard, plan_unit
from .units import FoundUnit

# Count up when the same files give other bytes than before.
_RECIPE_VERSION = 1

_REMEDY = "make room, set HF_HOME to a folder that you may write to, or choose placement 'host'"

_logger = logging.getLogger(__name__)


def find_converted(units: Sequence[FoundUnit], source: Source, files: Sequence[Path]) -> dict[str, Path]:
    """Return, by the name of each unit, the file that is its buffer; they are written first if they are not there.

    Args:
        files: the checkpoint's, whose content names the cache.

    Raises:
        CheckpointError: there is no room for the cache.

    Ranks: local. Of the processes on a machine the first to come converts, the others wait for it.
    Memory: one unit, while converting.
    """
    config = files[0].parent / "config.json"  # conversions read it
    identity = {
        "recipe": _RECIPE_VERSION,
        "transformers": transformers.__version__,  # its conversions decide
        "files": sorted(hash_file(file) for file in (*files, config)),
        "units": {unit.name: [repr(field) for field in plan_unit(unit, 1).fields] for unit in units},
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    folder = find_cache_dir() / "converted" / key
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):
                if not folder.is_dir():
                    _convert(units, source, folder)
    except OSError as error:
        raise CheckpointError(
            f"the converted weights could not be written to {folder.parent} ({error.strerror or error}): {_REMEDY}"
        ) from error
    return {unit.name: folder / unit.name for unit in units}


def _convert(units: Sequence[FoundUnit], source: Source, folder: Path) -> None:
    num_bytes = sum(plan_unit(unit, 1).total_bytes for unit in units)
    _remove_left_over(folder)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < num_bytes:
        raise CheckpointError(
            f"placement 'file' has to keep {num_bytes / 2**30:.1f} GiB of converted weights in {folder.parent}, where "
            f"{free_bytes / 2**30:.1f} GiB are free: {_REMEDY}"
        )
    _logger.warning("converting %.1f GiB of weights once, into %s", num_bytes / 2**30, folder)
    # A name of its own: file locks do not reach other machines on every network file system.
    partial = folder.with_name(f"{folder.name}.partial-{socket.gethostname()}-{os.getpid()}")
    try:
        partial.mkdir()
        for unit in units:
            _write(unit, source, partial / unit.name)
        if not folder.is_dir():
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_left_over(folder: Path) -> None:
    """Remove what processes of this machine left that were killed while they converted."""
    for partial in folder.parent.glob(f"{folder.name}.partial-{socket.gethostname()}-*"):
        if not psutil.pid_exists(int(partial.name.rpartition("-")[2])):
            shutil.rmtree(partial)


def _write(unit: FoundUnit, source: Source, file: Path) -> None:
    layout = plan_unit(unit, 1)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fill_shard(buffer, layout, unit, source, 0)
    with file.open("wb") as stream:
        stream.write(memoryview(buffer.numpy()))  # type: ignore[arg-type]
        stream.flush()
        os.fsync(stream.fileno())
