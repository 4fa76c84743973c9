"""Units that no file holds in the form they are kept in, converted once into files that can be mapped or read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from ..engine import Layout
from ..errors import CheckpointError
from ..runtime.progress import Progress, told_progress
from ..weights.build_once import make_once
from ..weights.fingerprint import BaseIdentity, find_cache_dir, hash_file
from .sources import MemorySource, fill_shard, plan_unit
from .units import FoundUnit

# Increment it when the same files give other bytes than before, such as by a change in quantizing.
_RECIPE_VERSION = 1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Purpose:
    """The option that needs converted units, and what to do where they cannot be written."""

    asked_by: str
    instead: str


FOR_FILE = Purpose("placement 'file'", "choose placement 'host'")
FOR_RESTARTS = Purpose("cache_quantized", "leave cache_quantized out")


def hash_content(files: Sequence[Path], identity: BaseIdentity | None) -> list[str]:
    """Return the hashes of a checkpoint's files and of its config, which conversions read.

    Args:
        identity: of these files, if they have been hashed.
    """
    hashes = identity.files.values() if identity is not None else map(hash_file, files)
    return sorted([*hashes, hash_file(files[0].parent / "config.json")])


class ConvertedUnits:
    """A folder with a file for each of some units: its buffer, unsharded.

    Its name is a hash of all that the bytes depend on: the checkpoint's content, the place of each tensor, the formats
    and the dtype of what is quantized, and the version of transformers, for its conversions. It gets its name when it
    is complete. A tensor's place in a buffer does not depend on the number of shards, so a shard is a range of a file.
    """

    def __init__(self, units: Sequence[FoundUnit], source: MemorySource, content: Sequence[str]) -> None:
        """Name the units; nothing is read or written.

        Args:
            content: as `hash_content` returns it.
        """
        identity = {
            "recipe": _RECIPE_VERSION,
            "transformers": transformers.__version__,
            "files": content,
            "units": {unit.name: _describe(unit) for unit in units},
        }
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = find_cache_dir() / "converted" / key
        self.num_bytes = sum(plan_unit(unit, 1).total_bytes for unit in units)
        self._units = {unit.name: unit for unit in units}
        self._source = source

    @property
    def is_complete(self) -> bool:
        return self.folder.is_dir()

    def find(self, unit: FoundUnit) -> Path | None:
        """Return the file with a unit's buffer; None for one that is not among these."""
        return self.folder / unit.name if unit.name in self._units else None

    def read_shard(self, unit: FoundUnit, layout: Layout, rank: int, shard: torch.Tensor) -> None:
        """Fill the shard of `rank` from a unit's file.

        Raises:
            CheckpointError: the file is damaged.

        Memory: on CUDA the shard on the host.
        """
        file = self.folder / unit.name
        total_bytes = plan_unit(unit, 1).total_bytes
        begin = rank * layout.shard_bytes
        count = max(0, min(total_bytes - begin, layout.shard_bytes))
        staging = shard[:count] if shard.device.type == "cpu" else torch.empty(count, dtype=torch.uint8)
        try:
            with file.open("rb") as stream:
                stream.seek(begin)
                num_read = stream.readinto(memoryview(staging.numpy()))  # type: ignore[arg-type]
                is_complete = num_read == count and os.fstat(stream.fileno()).st_size == total_bytes
        except OSError as error:
            raise self._damaged(file, error.strerror or error) from error
        if not is_complete:
            raise self._damaged(file, "of another size")
        if staging.device != shard.device:
            shard[:count].copy_(staging)

    def _damaged(self, file: Path, reason: object) -> CheckpointError:
        return CheckpointError(
            f"it is damaged ({reason})", where=file, fix=f"delete the folder {self.folder}, and it is made again"
        )

    def make(self, device: torch.device, purpose: Purpose, progress: Progress | None = None) -> None:
        """Write the files, if they are not there.

        Args:
            device: where weights are quantized.
            progress: called with how many "units converted" there are, whichever process converts; by default that
                process shows it on stderr.

        Raises:
            CheckpointError: there is no room for them.

        Ranks: local. Of the processes on a machine the first to come converts, the others wait for it.
        Memory: one unit, while converting.
        """
        parent = self.folder.parent

        def check_room(free_bytes: int) -> None:
            if free_bytes < self.num_bytes:
                raise CheckpointError(
                    f"{purpose.asked_by} has to keep converted weights",
                    expected=f"room for {self.num_bytes / 2**30:.1f} GiB",
                    found=f"{free_bytes / 2**30:.1f} GiB",
                    where=parent,
                    fix=_remedy(purpose),
                )
            _logger.warning("converting %.1f GiB of weights once, into %s", self.num_bytes / 2**30, self.folder)

        def fill(partial: Path) -> None:
            with told_progress("converting weights", given=progress) as report:
                for count, unit in enumerate(self._units.values(), start=1):
                    _write(unit, self._source, partial / unit.name, device)
                    report(count, len(self._units), "units converted")

        def look(partials: list[Path]) -> None:
            if progress is not None:
                num_files = max((len(list(partial.glob("*"))) for partial in partials), default=0)
                progress(num_files, len(self._units), "units converted")

        try:
            make_once(self.folder, check_room, fill, look)
        except OSError as error:
            raise CheckpointError(
                f"the converted weights could not be written ({error.strerror or error})",
                where=parent,
                fix=_remedy(purpose),
            ) from error


def _describe(unit: FoundUnit) -> list[str]:
    """Return all that a unit's bytes depend on beside the checkpoint's."""
    formats = [f"{w.name}: {w.quantizer} of {w.parameter.dtype}" for w in unit.weights if w.quantizer is not None]
    return [repr(field) for field in plan_unit(unit, 1).fields] + formats


def _remedy(purpose: Purpose) -> str:
    return f"make room, set HF_HOME to a folder that you may write to, or {purpose.instead}"


def _write(unit: FoundUnit, source: MemorySource, file: Path, device: torch.device) -> None:
    layout = plan_unit(unit, 1)
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fill_shard(buffer, layout, unit, source, 0, device)
    with file.open("wb") as stream:
        stream.write(memoryview(buffer.numpy()))  # type: ignore[arg-type]
