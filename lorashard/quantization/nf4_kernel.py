"""bitsandbytes' CUDA kernel that unpacks NF4, if it is installed and its values equal those of torch's operations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from .nf4_tables import Tables

_logger = logging.getLogger(__name__)
# The kernel counts in int32.
_CHUNK_NUMEL = 2**26


class Kernel:
    """`bitsandbytes::dequantize_4bit`, into existing memory.

    It reads and writes element by element, so it works on any range of complete blocks.
    """

    def __init__(self, operation: Any) -> None:
        self._operation = operation

    def iterate_chunks(self, num_blocks: int, block_size: int, device: torch.device) -> Iterator[tuple[int, int]]:
        """Yield the blocks [first, last) of each chunk."""
        step = _CHUNK_NUMEL // block_size
        for first in range(0, num_blocks, step):
            yield first, min(first + step, num_blocks)

    def unpack(self, packed: torch.Tensor, scales: torch.Tensor, block_size: int, out: torch.Tensor) -> None:
        """Write the values of flat `packed` to flat `out`, of 16 or 32 bits."""
        self._operation(packed, scales, block_size, "nf4", list(out.shape), out.dtype, out=out)


def find_kernel(tables: Tables, block_size: int, device: torch.device) -> Kernel | None:
    """Return the kernel for a device; None if there is none whose values are exact.

    It is tried once on a few values: bitsandbytes may be installed without its library for this CUDA version.
    """
    if device.type != "cuda" or find_spec("bitsandbytes") is None:
        return None
    try:
        with torch.inference_mode(False):
            import bitsandbytes  # noqa: F401

            kernel = Kernel(torch.ops.bitsandbytes.dequantize_4bit.out)
            if _is_exact(kernel, tables, block_size, device):
                return kernel
        reason = "its values differ"
    except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
        reason = str(error)
    _logger.warning(
        "bitsandbytes' kernel for nf4 cannot be used on %s (%s): Triton's is tried in its place", device, reason
    )
    return None


def _is_exact(kernel: Kernel, tables: Tables, block_size: int, device: torch.device) -> bool:
    packed = torch.arange(4 * block_size, dtype=torch.int32, device=device).remainder(256).to(torch.uint8)
    scales = torch.linspace(0.01, 3, 8, dtype=torch.float32, device=device)
    expected = (tables.look_up(packed).view(8, block_size) * scales.unsqueeze(1)).to(torch.bfloat16).view(-1)
    found = torch.zeros_like(expected)
    kernel.unpack(packed, scales, block_size, found)
    return torch.equal(found, expected)
