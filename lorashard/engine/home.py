"""Where a unit's bytes rest between visits."""

from __future__ import annotations

import torch

from ..dist import ShardGroup, Work
from .layout import Layout


class DeviceHome:
    """1/size of the unit on this rank's device; unsharding is one all-gather.

    In a group of one the shard is the whole unit: `is_whole` is true, nothing is ever gathered or copied, and the
    unit's weights are views of the shard for the whole run.

    Memory: `layout.shard_bytes` on the device.
    """

    def __init__(self, layout: Layout, group: ShardGroup, device: torch.device) -> None:
        self.layout = layout
        self._group = group
        self.shard = torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=device)

    @property
    def is_whole(self) -> bool:
        return self._group.size == 1

    @property
    def bytes_at_rest(self) -> int:
        return self.shard.numel()

    def unshard_into(self, buffer: torch.Tensor) -> Work:
        """Start filling `buffer` (uint8, [>= layout.total_bytes]) with the whole unit.

        Ranks: collective over the shard group.
        """
        return self._group.all_gather(buffer[: self.layout.total_bytes], self.shard)
