"""A tensor written as runs of stored elements, so that any part of it can be found in the files."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .safetensors_files import StoredTensor


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a stored tensor, from element `begin` on."""

    stored: StoredTensor
    begin: int
    numel: int


class Runs:
    """A tensor's elements in row-major order, as runs of stored elements."""

    def __init__(self, shape: Sequence[int], runs: Iterable[Run]) -> None:
        self.shape = tuple(shape)
        self.runs = list(runs)
        self._ends = list(accumulate(run.numel for run in self.runs))
        self.numel = math.prod(self.shape)
        if (self._ends[-1] if self._ends else 0) != self.numel:
            raise ValueError(f"runs of {self._ends[-1:]} elements cannot be a tensor of shape {self.shape}")

    @classmethod
    def of(cls, stored: StoredTensor) -> Runs:
        """Return a stored tensor as it is."""
        return cls(stored.shape, [Run(stored, 0, math.prod(stored.shape))])

    @classmethod
    def stack(cls, parts: Sequence[Runs]) -> Runs:
        """Return what `torch.stack(parts, dim=0)` would; all parts have one shape."""
        return cls((len(parts), *parts[0].shape), [run for part in parts for run in part.runs])

    @classmethod
    def cat(cls, parts: Sequence[Runs], dim: int) -> Runs:
        """Return what `torch.cat(parts, dim)` would; the parts' shapes differ in `dim` alone."""
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        runs = []
        for row in range(math.prod(shape[:dim])):
            for part in parts:
                row_numel = math.prod(part.shape[dim:])
                runs += part.cut(row * row_numel, (row + 1) * row_numel)
        return cls(shape, runs)

    def split(self, sizes: Sequence[int]) -> list[Runs]:
        """Return what `torch.split(self, sizes, dim=0)` would."""
        row_numel = math.prod(self.shape[1:])
        ends = list(accumulate(sizes))
        return [
            Runs((size, *self.shape[1:]), self.cut((end - size) * row_numel, end * row_numel))
            for size, end in zip(sizes, ends, strict=True)
        ]

    def cut(self, begin: int, end: int) -> list[Run]:
        """Return the runs that make elements [begin, end)."""
        pieces = []
        index = bisect_right(self._ends, begin)
        while begin < end:
            run = self.runs[index]
            offset = begin - (self._ends[index] - run.numel)
            numel = min(run.numel - offset, end - begin)
            pieces.append(Run(run.stored, run.begin + offset, numel))
            begin += numel
            index += 1
        return pieces
