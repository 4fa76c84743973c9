"""Which of Triton's kernels a format may use: those whose values, tried first, are those of torch's operations."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

_logger = logging.getLogger(__name__)
Unpack = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
# Ties of bfloat16 and of float16, a usual one, one below float32's normal range, and what overflows or is not finite.
SAMPLE_SCALES = (1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 0.0123, 1e-40, 0.0, 3e38, math.inf, math.nan)


class HasKernel(Protocol):
    """A format that Triton can unpack."""

    name: str

    def load_kernel(self, device: torch.device) -> Unpack:
        """Import Triton, and return what unpacks a weight as `unpack_in_chunks` does."""
        ...

    def unpack_in_chunks(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values to `out`, by torch's own operations."""
        ...

    def make_sample(self, device: torch.device) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        """Return the parts of a small weight with every code, a tail, and `SAMPLE_SCALES`; and its shape."""
        ...


class Kernels:
    """The kernels of one format that were tried so far."""

    def __init__(self) -> None:
        self._tried: dict[tuple[torch.device, torch.dtype], Unpack | None] = {}

    def find(self, quantizer: HasKernel, device: torch.device, dtype: torch.dtype) -> Unpack | None:
        """Return the kernel for outputs of `dtype`; None if torch's own operations must be used."""
        if device.type != "cuda":
            return None
        if (device, dtype) not in self._tried:
            self._tried[device, dtype] = try_kernel(quantizer, device, dtype)
        return self._tried[device, dtype]


def try_kernel(quantizer: HasKernel, device: torch.device, dtype: torch.dtype) -> Unpack | None:
    """Return Triton's kernel if its values equal torch's, bit for bit; otherwise None, and a warning says why.

    Memory: of a weight of some thousand values.
    """
    try:
        kernel = quantizer.load_kernel(device)
        parts, shape = quantizer.make_sample(device)
        # A rounding that is missing may show in float32 alone.
        if all(_is_exact(quantizer, kernel, parts, shape, kind) for kind in {torch.float32, dtype}):
            return kernel
        reason = "its values differ"
    except Exception as error:  # those of compilers, drivers and caches have no base of their own
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    _logger.warning(
        "Triton's kernel for %s in %s cannot be used on %s (%s): torch's own operations unpack the base, to the same "
        "values but slower, in several kernels for each 4 Mi values instead of one for a weight",
        *(quantizer.name, str(dtype).removeprefix("torch."), device, reason),
    )
    return None


def _is_exact(
    quantizer: HasKernel, kernel: Unpack, parts: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> bool:
    expected, found = (torch.full(shape, 7, dtype=dtype, device=parts[0].device) for _ in range(2))
    quantizer.unpack_in_chunks(parts, expected)
    kernel(parts, found)
    return torch.equal(_get_bits(found), _get_bits(expected))


def _get_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of flat values, with one NaN for all."""
    return torch.where(values.isnan(), math.nan, values).view(torch.uint8)
