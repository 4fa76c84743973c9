"""Where a unit's bytes rest while no slot holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..errors import ShardError
from ..runtime.dist import ShardGroup, Work
from .copies import HostCopies
from .file_range import HostBytes
from .layout import Field, Layout


class Home(Protocol):
    """Where one unit rests on this rank, and how it is unsharded.

    Attributes:
        layout: where each tensor sits in the unit's buffer.
        device_bytes: what rests on the device.
        host_bytes: what rests in host memory that nobody shares.
        num_copies: how often bytes were copied from the host into a slot.
        copied_bytes: how many.
    """

    layout: Layout
    device_bytes: int
    host_bytes: int
    num_copies: int
    copied_bytes: int

    def views(self) -> list[torch.Tensor] | None:
        """Return the unit's tensors if they rest unsharded where they are computed with, else None.

        Such a unit needs no slot: its modules hold these tensors for the whole run.

        Ranks: local.
        """

    def unshard_into(self, buffer: torch.Tensor) -> Work:
        """Start filling `buffer` (uint8, [>= layout.total_bytes]) with the unsharded unit.

        Ranks: as the home says: every rank of the shard group in the same order, or local.
        Memory: none beside `buffer`.
        """
        ...

    def write(self, field: Field, data: torch.Tensor) -> None:
        """Take other bytes (uint8, [field.num_bytes], on the host) for a tensor; this rank keeps its part of them.

        Ranks: local.
        """
        ...


class _ShardHome:
    """1/size of the unit, in memory of this rank's own."""

    device_bytes = 0
    host_bytes = 0

    def __init__(self, layout: Layout, group: ShardGroup, shard: torch.Tensor) -> None:
        self.layout = layout
        self.shard = shard  # uint8, [layout.shard_bytes]
        self.num_copies = 0
        self.copied_bytes = 0
        self._group = group

    def write(self, field: Field, data: torch.Tensor) -> None:
        for piece in self.layout.pieces(self._group.rank):
            if piece.field == field:
                part = data[piece.begin_byte : piece.end_byte]
                self.shard[piece.shard_byte : piece.shard_byte + part.numel()].copy_(part)


class DeviceHome(_ShardHome):
    """1/size of the unit on this rank's device; unsharding is one all-gather.

    In a group of one the shard is the unsharded unit: nothing is ever gathered or copied.

    Memory: `layout.shard_bytes` on the device.
    """

    def __init__(self, layout: Layout, group: ShardGroup, device: torch.device) -> None:
        super().__init__(layout, group, torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=device))
        self.device_bytes = layout.shard_bytes

    def views(self) -> list[torch.Tensor] | None:
        return None if self._group.size > 1 else [field.view_in(self.shard) for field in self.layout.fields]

    def unshard_into(self, buffer: torch.Tensor) -> Work:
        """Start filling `buffer` with the unsharded unit.

        Ranks: collective over the shard group.
        """
        return self._group.all_gather(_slice(buffer, 0, self.layout.total_bytes), self.shard)


class HostHome(_ShardHome):
    """1/size of the unit in this rank's host memory, pinned on CUDA.

    Unsharding copies the shard to its place in the slot, and gathers the rest there from the other ranks; in a group
    of one the copy is all.

    Memory: `layout.shard_bytes` on the host.
    """

    def __init__(self, layout: Layout, group: ShardGroup, copies: HostCopies) -> None:
        super().__init__(layout, group, copies.allocate(self, layout.shard_bytes))
        self.host_bytes = layout.shard_bytes
        self._copies = copies

    def views(self) -> list[torch.Tensor] | None:
        return None

    def unshard_into(self, buffer: torch.Tensor) -> Work:
        """Start filling `buffer` with the unsharded unit.

        Ranks: collective over the shard group; local in a group of one.
        """
        shard_bytes, rank = self.layout.shard_bytes, self._group.rank
        own_part = _slice(buffer, rank * shard_bytes, (rank + 1) * shard_bytes)
        self.num_copies += 1
        self.copied_bytes += shard_bytes
        copied = self._copies.start([(own_part, self.shard)])
        if self._group.size == 1:
            return copied
        unsharded = _slice(buffer, 0, self.layout.total_bytes)
        copied.wait()  # on the side stream: the gather must not send what is not there yet
        return self._group.all_gather(unsharded, own_part)

    def write(self, field: Field, data: torch.Tensor) -> None:
        self._copies.finish()  # the host is ahead of the device, which may still have to read the shard
        super().write(field, data)


class FileHome:
    """No memory of its own: the unit's bytes are in files, whose pages in memory all ranks of a node share.

    On a CPU the files are mapped, and the modules read the mapped pages themselves; elsewhere unsharding reads the
    unit. Either way no rank waits for another.

    Memory: none; the kernel's page cache, which it may evict.
    """

    device_bytes = 0
    host_bytes = 0

    def __init__(self, layout: Layout, pieces: Sequence[Sequence[HostBytes]], copies: HostCopies) -> None:
        """Make a home of bytes in files.

        Args:
            layout: of one shard.
            pieces: for each field of `layout` what together are its bytes; on a CPU one uint8 tensor each, over mapped
                memory.
        """
        self.layout = layout
        self._pieces = pieces
        self._copies = copies
        self.num_copies = 0
        self.copied_bytes = 0

    def views(self) -> list[torch.Tensor] | None:
        if self._copies.are_needed:
            return None
        views = []
        for field, (piece,) in zip(self.layout.fields, self._pieces, strict=True):
            assert isinstance(piece, torch.Tensor)
            views.append(piece.view(field.dtype).view(field.shape))
        return views

    def unshard_into(self, buffer: torch.Tensor) -> Work:
        """Start filling `buffer` with the unsharded unit.

        Ranks: local.
        """
        pairs = []
        for field, pieces in zip(self.layout.fields, self._pieces, strict=True):
            begin = field.begin_byte
            for piece in pieces:
                pairs.append((buffer[begin : begin + len(piece)], piece))
                begin += len(piece)
        self.num_copies += 1
        self.copied_bytes += sum(len(piece) for _, piece in pairs)
        return self._copies.start(pairs)

    def write(self, field: Field, data: torch.Tensor) -> None:
        raise ShardError(
            "it was written, but it is read from the checkpoint's own files", where=f"base weight '{field.name}'"
        )


def _slice(buffer: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return buffer[begin:end]; most units are as large as their slot, and a view takes longer than to see that."""
    return buffer if begin == 0 and end == buffer.numel() else buffer[begin:end]
