"""Give each unit of a model the home that a placement wants, filled from where the base comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..dist import ShardGroup
from ..engine import DeviceHome, FileHome, Home, HostCopies, HostHome, Placeholder
from ..placement import check_num_layers
from .converted import find_converted
from .mapped import MappedFiles
from .sources import CheckpointSource, Source, fill_shard, plan_unit
from .units import LAYER, WHOLE, FoundUnit, FoundWeight, Structure, spread
from .weights import BaseWeights

MakeHome = Callable[[FoundUnit], Home]

# torch's own allocator aligns to this.
_TORCH_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ShardedHomes:
    """Makes homes in memory, each filled with this rank's bytes alone.

    Args:
        is_on_host: whether shards rest on the host rather than on the device.
        resident: units that stay whole on the device.

    Memory: what the homes hold, and on CUDA one weight beside them while it is filled.
    """

    is_on_host: bool
    group: ShardGroup
    device: torch.device
    source: Source
    resident: Sequence[FoundUnit]
    copies: HostCopies

    def __call__(self, unit: FoundUnit) -> Home:
        is_resident = any(unit is other for other in self.resident)
        group = ShardGroup() if is_resident else self.group
        layout = plan_unit(unit, group.size)
        home: DeviceHome | HostHome
        if self.is_on_host and not is_resident:
            home = HostHome(layout, group, self.copies)
        else:
            home = DeviceHome(layout, group, self.device)
        fill_shard(home.shard, layout, unit, self.source, group.rank)
        return home


class FileHomes:
    """Makes homes in the checkpoint's own files, and in a cache for units that these do not hold as they are computed.

    Note [Bits and alignment]
        MKL's products of float32 and float64 matrices add in another order where a matrix is not aligned as torch's
        allocator aligns; those of bfloat16 do not. Files are aligned to 8 bytes at best, so on a CPU a unit with
        wider weights is computed with where it lies only if it lies well.

    Memory: none, but for resident units (on a CPU mapped pages are as good), units with weights that are in no file,
        and one unit while the cache is made.
    """

    def __init__(
        self, structure: Structure, weights: BaseWeights, device: torch.device, resident: Sequence[FoundUnit]
    ) -> None:
        self._weights = weights
        self._device = device
        self._files = MappedFiles()
        self._copies = HostCopies(device)
        source = CheckpointSource(weights)
        # A new head's values are in no file, and those of this run are no other run's.
        made = [unit for unit in structure.units if not all(isinstance(w.parameter, Placeholder) for w in unit.weights)]
        self._in_memory = [*(resident if device.type != "cpu" else ()), *made]
        self._make_in_memory = ShardedHomes(False, ShardGroup(), device, source, self._in_memory, self._copies)
        stored = [unit for unit in structure.units if not any(unit is other for other in self._in_memory)]
        unsuitable = [unit for unit in stored if not all(map(self._is_suitable, unit.weights))]
        self._converted = find_converted(unsuitable, source, weights.files) if unsuitable else {}

    def _is_suitable(self, weight: FoundWeight) -> bool:
        """Tell whether a weight can be used, or copied, from where it lies."""
        stretches = self._weights.find_stretches(weight.name)
        if stretches is None or self._device.type != "cpu":
            return stretches is not None
        item_bytes = weight.parameter.dtype.itemsize
        alignment = _TORCH_ALIGNMENT_BYTES if item_bytes > 2 else item_bytes
        return len(stretches) == 1 and stretches[0][1] % alignment == 0

    def __call__(self, unit: FoundUnit) -> Home:
        if any(unit is other for other in self._in_memory):
            return self._make_in_memory(unit)
        layout = plan_unit(unit, 1)
        if unit.name in self._converted:
            file = self._converted[unit.name]
            pieces = [[self._files.view(file, field.begin_byte, field.num_bytes)] for field in layout.fields]
        else:
            stretches = [self._weights.find_stretches(weight.name) or [] for weight in unit.weights]
            pieces = [[self._files.view(*stretch) for stretch in of_weight] for of_weight in stretches]
        return FileHome(layout, pieces, self._device, self._copies)


def choose_resident(structure: Structure, resident_layers: str | int) -> list[FoundUnit]:
    """Return the units that stay whole: all, or that many decoder layers, spread evenly, and what always does."""
    if resident_layers == "all":
        return structure.units
    layers = [unit for unit in structure.units if unit.kind == LAYER]
    check_num_layers("resident_layers", resident_layers, len(layers))
    return [*(unit for unit in structure.units if unit.kind == WHOLE), *spread(layers, int(resident_layers))]
