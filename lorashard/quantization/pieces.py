"""How much of a weight is computed at a time, so that the memory for it stays small whatever the weight's size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# On a CPU what stays in its caches is fastest; on a GPU it is the launches that cost.
_CPU_NUMEL = 2**18
_GPU_NUMEL = 2**22


def cut_pieces(num_blocks: int, block_numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield the blocks [first, last) that are computed at once; at least one whole block.

    Memory: 1 MiB for a float32 copy of them on a CPU, 16 MiB elsewhere.
    """
    step = max(1, (_CPU_NUMEL if device.type == "cpu" else _GPU_NUMEL) // max(1, block_numel))
    for first in range(0, num_blocks, step):
        yield first, min(first + step, num_blocks)
