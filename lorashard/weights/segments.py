"""A tensor described as segments of stored tensors, so that any part of it can be found in the files."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .safetensors_files import StoredTensor


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a stored tensor, from element `begin` on."""

    stored: StoredTensor
    begin: int
    numel: int


class SegmentedTensor:
    """A tensor whose elements, in row-major order, are segments of stored tensors."""

    def __init__(self, shape: Sequence[int], segments: Iterable[Segment]) -> None:
        self.shape = tuple(shape)
        self.segments = list(segments)
        self._ends = list(accumulate(segment.numel for segment in self.segments))
        self.numel = math.prod(self.shape)
        if (self._ends[-1] if self._ends else 0) != self.numel:
            raise ValueError(f"segments of {self._ends[-1:]} elements cannot be a tensor of shape {self.shape}")

    @classmethod
    def of(cls, stored: StoredTensor) -> SegmentedTensor:
        """Return a stored tensor as one segment."""
        return cls(stored.shape, [Segment(stored, 0, math.prod(stored.shape))])

    @classmethod
    def stack(cls, tensors: Sequence[SegmentedTensor]) -> SegmentedTensor:
        """Return what `torch.stack(tensors, dim=0)` would; all have one shape."""
        segments = [segment for tensor in tensors for segment in tensor.segments]
        return cls((len(tensors), *tensors[0].shape), segments)

    @classmethod
    def cat(cls, tensors: Sequence[SegmentedTensor], dim: int) -> SegmentedTensor:
        """Return what `torch.cat(tensors, dim)` would; the shapes differ in `dim` alone."""
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        segments = []
        for row in range(math.prod(shape[:dim])):
            for tensor in tensors:
                row_numel = math.prod(tensor.shape[dim:])
                segments += tensor.slice(row * row_numel, (row + 1) * row_numel)
        return cls(shape, segments)

    def split(self, sizes: Sequence[int]) -> list[SegmentedTensor]:
        """Return what `torch.split(self, sizes, dim=0)` would."""
        row_numel = math.prod(self.shape[1:])
        ends = list(accumulate(sizes))
        return [
            SegmentedTensor((size, *self.shape[1:]), self.slice((end - size) * row_numel, end * row_numel))
            for size, end in zip(sizes, ends, strict=True)
        ]

    def slice(self, begin: int, end: int) -> list[Segment]:
        """Return the segments that hold elements [begin, end)."""
        found = []
        index = bisect_right(self._ends, begin)
        while begin < end:
            segment = self.segments[index]
            offset = begin - (self._ends[index] - segment.numel)
            numel = min(segment.numel - offset, end - begin)
            found.append(Segment(segment.stored, segment.begin + offset, numel))
            begin += numel
            index += 1
        return found
