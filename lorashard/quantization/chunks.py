"""How much of a weight is computed at a time, so that its memory stays small for a weight of any size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# A chunk that fits into a CPU's caches is fastest there; on a GPU the cost is in the launches.
_CPU_NUMEL = 2**18
_GPU_NUMEL = 2**22


def iterate_chunks(num_blocks: int, block_numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield the blocks [first, last) of each chunk; at least one block.

    Memory: 1 MiB for a float32 copy of a chunk on a CPU, 16 MiB elsewhere.
    """
    step = max(1, (_CPU_NUMEL if device.type == "cpu" else _GPU_NUMEL) // max(1, block_numel))
    for first in range(0, num_blocks, step):
        yield first, min(first + step, num_blocks)
