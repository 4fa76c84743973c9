"""Give each unit of a model the home that its placement says, filled from where the base comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config.placement import ResolvedPlacement, check_num_layers
from ..engine import DeviceHome, FileHome, Home, HostCopies, HostHome, Placeholder
from ..runtime.dist import ShardGroup
from ..runtime.progress import Progress
from ..weights.fingerprint import BaseIdentity
from ..weights.mapped import MappedFiles
from ..weights.weights import BaseWeights
from .converted import FOR_FILE, FOR_RESTARTS, ConvertedUnits, Purpose, hash_content
from .sources import CheckpointSource, MemorySource, fill_shard, plan_unit
from .units import LAYER, WHOLE, FoundUnit, FoundWeight, Structure, spread

MakeHome = Callable[[FoundUnit], Home]

# torch's own allocator aligns to this.
_TORCH_ALIGNMENT_BYTES = 64

_logger = logging.getLogger(__name__)


def choose_resident(structure: Structure, resident_layers: str | int) -> list[FoundUnit]:
    """Return the resident units: all, or that many decoder layers, spread evenly, and those that always are."""
    if resident_layers == "all":
        return structure.units
    layers = [unit for unit in structure.units if unit.kind == LAYER]
    check_num_layers("resident_layers", resident_layers, len(layers))
    return [*(unit for unit in structure.units if unit.kind == WHOLE), *spread(layers, int(resident_layers))]


def choose_homes(
    structure: Structure,
    weights: BaseWeights,
    placement: ResolvedPlacement,
    resident: Sequence[FoundUnit],
    group: ShardGroup,
    device: torch.device,
    identity: BaseIdentity | None,
    *,
    cache_quantized: bool = False,
    progress: Progress | None = None,
) -> MakeHome:
    """Return what makes the homes of a checkpoint's units, with the caches that they are read from made.

    Args:
        identity: of the checkpoint's files, if they have been hashed.
        cache_quantized: write units that are quantized while they are read, so that the next start reads those.
        progress: as for `ConvertedUnits.make`.

    Raises:
        CheckpointError: there is no room for a cache.
    """
    is_file = placement.placement == "file"
    purpose = FOR_FILE if is_file else FOR_RESTARTS if cache_quantized else None
    quantized = _find_quantized(structure, weights, identity, device, purpose, progress)
    if is_file:
        return FileHomes(structure, weights, device, resident, quantized, identity, progress)
    is_on_host, source = placement.placement == "host", CheckpointSource(weights)
    return ShardedHomes(is_on_host, group, device, source, resident, HostCopies(device), quantized)


@dataclass(frozen=True)
class ShardedHomes:
    """Makes homes in memory, each filled with this rank's bytes alone.

    Args:
        is_on_host: whether shards rest on the host rather than on the device.
        resident: units that stay unsharded on the device.
        converted: files with units as they are to be kept, which are read instead of `source`.

    Memory: what the homes hold, and on CUDA one weight beside them while it is filled.
    """

    is_on_host: bool
    group: ShardGroup
    device: torch.device
    source: MemorySource
    resident: Sequence[FoundUnit]
    copies: HostCopies
    converted: ConvertedUnits | None = None

    def __call__(self, unit: FoundUnit) -> Home:
        is_resident = unit in self.resident
        group = ShardGroup() if is_resident else self.group
        layout = plan_unit(unit, group.size)
        home: DeviceHome | HostHome
        if self.is_on_host and not is_resident:
            home = HostHome(layout, group, self.copies)
        else:
            home = DeviceHome(layout, group, self.device)
        if self.converted is not None and self.converted.find(unit) is not None:
            self.converted.read_shard(unit, layout, group.rank, home.shard)
        else:
            fill_shard(home.shard, layout, unit, self.source, group.rank, self.device)
        return home


def _find_quantized(
    structure: Structure,
    weights: BaseWeights,
    identity: BaseIdentity | None,
    device: torch.device,
    purpose: Purpose | None,
    progress: Progress | None,
) -> ConvertedUnits | None:
    """Return the units that are quantized while they are read, as files, where these are there or are to be made.

    Args:
        identity: of the checkpoint's files. Without it the files are looked for only if they are to be made: all of
            the checkpoint would have to be hashed.
        purpose: what to make them for; None leaves them unless they are there.

    Ranks: local; whether a rank reads these files or quantizes for itself gives the same bytes.
    """
    source = CheckpointSource(weights)
    units = [
        unit
        for unit in structure.units
        if any(weight.quantizer is not None and not source.has_parts(weight) for weight in unit.weights)
        and not _has_new(unit)
    ]
    if not units or (identity is None and purpose is None):
        return None
    converted = ConvertedUnits(units, source, hash_content(weights.files, identity))
    was_there = converted.is_complete
    if purpose is not None:
        converted.make(device, purpose, progress)
    if not converted.is_complete:
        return None
    _logger.info(
        "the quantized base is read from %s (%.2f GiB%s)",
        converted.folder,
        converted.num_bytes / 2**30,
        "; delete it to quantize again" if was_there else "",
    )
    return converted


def _has_new(unit: FoundUnit) -> bool:
    """Return whether a unit has values that are in no file and differ between runs: those of a new head."""
    return not all(isinstance(weight.parameter, Placeholder) for weight in unit.weights)


class FileHomes:
    """Makes homes in the checkpoint's own files, and in a cache for units that these hold in another dtype or form.

    Note [Bits and alignment]
        MKL's products of float32 and float64 matrices add in another order where a matrix is not aligned as torch's
        allocator aligns; those of bfloat16 do not. Files are aligned to 8 bytes at best, so on a CPU a unit with
        wider weights is used in its file only if it is aligned there.

    Memory: none, but for resident units (on a CPU mapped pages are as good), units with weights that are in no file,
        and one unit while the cache is made.
    """

    def __init__(
        self,
        structure: Structure,
        weights: BaseWeights,
        device: torch.device,
        resident: Sequence[FoundUnit],
        quantized: ConvertedUnits | None,
        identity: BaseIdentity | None,
        progress: Progress | None,
    ) -> None:
        self._weights = weights
        self._device = device
        self._files = MappedFiles()
        self._copies = HostCopies(device)
        self._source = CheckpointSource(weights)
        self._in_memory = [
            *(resident if device.type != "cpu" else ()),
            *(unit for unit in structure.units if _has_new(unit)),
        ]
        self._make_in_memory = ShardedHomes(
            False, ShardGroup(), device, self._source, self._in_memory, self._copies, quantized
        )
        unsuitable = [
            unit
            for unit in structure.units
            if unit not in self._in_memory
            and not (quantized and quantized.find(unit))
            and not all(map(self._is_suitable, unit.weights))
        ]
        self._converted = [quantized] if quantized is not None else []
        if unsuitable:
            converted = ConvertedUnits(unsuitable, self._source, hash_content(weights.files, identity))
            converted.make(device, FOR_FILE, progress)
            self._converted.append(converted)

    def _find_part(self, weight: FoundWeight, part: int) -> list[tuple[Path, int, int]] | torch.Tensor | None:
        """Return the ranges of files that hold a part of a weight, or its bytes; None if they are in no file."""
        if weight.quantizer is None:
            return self._weights.find_stretches(weight.name)
        return self._weights.find_part_stretches(weight.name, part) if self._source.has_parts(weight) else None

    def _is_suitable(self, weight: FoundWeight) -> bool:
        """Return whether a weight can be used, or copied, from its place in the file."""
        return all(
            self._is_aligned(self._find_part(weight, number), _find_alignment(weight, part.dtype))
            for number, part in enumerate(weight.parts())
        )

    def _is_aligned(self, found: list[tuple[Path, int, int]] | torch.Tensor | None, alignment: int) -> bool:
        if not isinstance(found, list) or self._device.type != "cpu":
            return found is not None
        return len(found) == 1 and found[0][1] % alignment == 0

    def _map(self, weight: FoundWeight, part: int) -> list[torch.Tensor]:
        found = self._find_part(weight, part)
        assert found is not None
        return [found] if isinstance(found, torch.Tensor) else [self._files.view(*stretch) for stretch in found]

    def __call__(self, unit: FoundUnit) -> Home:
        if unit in self._in_memory:
            return self._make_in_memory(unit)
        layout = plan_unit(unit, 1)
        file = next((file for converted in self._converted if (file := converted.find(unit))), None)
        if file is not None:
            pieces = [[self._files.view(file, field.begin_byte, field.num_bytes)] for field in layout.fields]
        else:
            pieces = [self._map(weight, number) for weight in unit.weights for number in range(len(weight.parts()))]
        return FileHome(layout, pieces, self._device, self._copies)


def _find_alignment(weight: FoundWeight, dtype: torch.dtype) -> int:
    """Return the alignment that a part of a weight needs to be used in place; quantized ones are not given to MKL."""
    is_computed_with = weight.quantizer is None and dtype.itemsize > 2
    return _TORCH_ALIGNMENT_BYTES if is_computed_with else dtype.itemsize
