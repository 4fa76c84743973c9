"""Give each unit of a model the home that its placement says, filled from its source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config.placement import ResolvedPlacement, check_num_layers
from ..engine import DeviceHome, FileHome, Home, HostBytes, HostCopies, HostHome, Placeholder
from ..runtime.dist import ShardGroup
from ..runtime.progress import Progress
from ..weights.fingerprint import BaseIdentity
from ..weights.mapped import WeightFiles
from ..weights.weights import BaseWeights
from .converted import FOR_FILE, FOR_RESTARTS, ConvertedUnits, Purpose, hash_content
from .sources import CheckpointSource, MemorySource, fill_shard, plan_unit
from .units import LAYER, WHOLE, FoundUnit, Structure, spread

MakeHome = Callable[[FoundUnit], Home]
# Of a part of a weight: stretches of files (file, first byte, number of bytes), or its bytes.
Place = list[tuple[Path, int, int]] | torch.Tensor

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
        return _use_files(structure, weights, device, resident, quantized, identity, progress)
    is_on_host, source = placement.placement == "host", CheckpointSource(weights)
    return ShardedHomes(is_on_host, group, device, source, resident, HostCopies(device), quantized)


@dataclass(frozen=True)
class ShardedHomes:
    """Makes homes in memory, each filled with this rank's bytes alone.

    Args:
        is_on_host: whether shards rest on the host rather than on the device.
        resident: units that stay unsharded on the device.
        converted: files with units as they are to be kept, which are read instead of `source`.

    Memory: what the homes hold, and on CUDA one weight beside them while it is filled; of converted files one shard.
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


def _use_files(
    structure: Structure,
    weights: BaseWeights,
    device: torch.device,
    resident: Sequence[FoundUnit],
    quantized: ConvertedUnits | None,
    identity: BaseIdentity | None,
    progress: Progress | None,
) -> MakeHome:
    """Return what makes homes in the checkpoint's own files, and in a cache for units that these hold in another form.

    Note [Bits and alignment]
        MKL's products of float32 and float64 matrices add in another order where a matrix is not aligned as torch's
        allocator aligns; those of bfloat16 do not. Files are aligned to 8 bytes at best, so on a CPU a unit with
        wider weights is used in its file only if it is aligned there.

    Memory: none, but for resident units (on a CPU mapped pages are as good), units with weights that are in no file,
        and one unit while the cache is made.
    """
    source, copies = CheckpointSource(weights), HostCopies(device)
    files = WeightFiles(is_mapped=not copies.are_needed)
    in_memory = [*(resident if copies.are_needed else ()), *filter(_has_new, structure.units)]
    make_in_memory = ShardedHomes(False, ShardGroup(), device, source, in_memory, copies, quantized)
    caches = [] if quantized is None else [quantized]
    stored = [unit for unit in structure.units if unit not in in_memory and not (quantized and quantized.find(unit))]
    places = {unit: _find_places(unit, weights, source, copies.are_needed) for unit in stored}
    unsuitable = [unit for unit, found in places.items() if found is None]
    if unsuitable:
        caches.append(ConvertedUnits(unsuitable, source, hash_content(weights.files, identity)))
        caches[-1].make(device, FOR_FILE, progress)

    def make(unit: FoundUnit) -> Home:
        if unit in in_memory:
            return make_in_memory(unit)
        layout = plan_unit(unit, 1)
        pieces: list[list[HostBytes]]
        file = next((file for cache in caches if (file := cache.find(unit))), None)
        if file is not None:
            pieces = [[files.find(file, field.begin_byte, field.num_bytes)] for field in layout.fields]
        else:
            pieces = [
                [place] if isinstance(place, torch.Tensor) else [files.find(*stretch) for stretch in place]
                for place in places[unit] or ()
            ]
        return FileHome(layout, pieces, copies)

    return make


def _find_places(
    unit: FoundUnit, weights: BaseWeights, source: CheckpointSource, are_copied: bool
) -> list[Place] | None:
    """Return where the parts of a unit's weights can be used, or copied, in place; None where one cannot."""
    found: list[Place] = []
    for weight in unit.weights:
        for index, part in enumerate(weight.parts()):
            place: Place | None
            if weight.quantizer is None:
                place = weights.find_stretches(weight.name)
            else:
                place = weights.find_part_stretches(weight.name, index) if source.has_parts(weight) else None
            if place is None:
                return None
            if isinstance(place, list) and not are_copied:
                is_for_mkl = weight.quantizer is None and part.dtype.itemsize > 2
                alignment = _TORCH_ALIGNMENT_BYTES if is_for_mkl else part.dtype.itemsize
                if len(place) != 1 or place[0][1] % alignment:
                    return None
            found.append(place)
    return found
