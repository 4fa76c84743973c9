"""Where each tensor of a unit sits in the unit's flat byte buffer. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

# Kernels choose their path by alignment: a tensor in a slot must look to them like one that torch allocated itself.
ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Part:
    """One of the tensors that together keep a weight.

    Attributes:
        name: what it is; empty for the values themselves.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Field:
    """One tensor in a unit's buffer: bytes [begin_byte, begin_byte + num_bytes)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin_byte: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end_byte(self) -> int:
        return self.begin_byte + self.num_bytes

    def view_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the unit's buffer (uint8)."""
        return buffer[self.begin_byte : self.end_byte].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Piece:
    """Bytes [begin_byte, end_byte) of the tensor `field`, which sit at `shard_byte` of some rank's shard."""

    field: Field
    begin_byte: int
    end_byte: int
    shard_byte: int


@dataclass(frozen=True)
class Layout:
    """The flat byte buffer of one unit: any mix of dtypes, each tensor aligned, cut into equal shards.

    The buffer is padded so that every shard has the same, aligned size; only the padding depends on the number of
    shards, so a tensor's place does not.
    """

    fields: tuple[Field, ...]
    num_shards: int

    @cached_property
    def used_bytes(self) -> int:
        return self.fields[-1].end_byte if self.fields else 0

    @cached_property
    def shard_bytes(self) -> int:
        return round_up(math.ceil(self.used_bytes / self.num_shards), ALIGNMENT_BYTES)

    @cached_property
    def total_bytes(self) -> int:
        return self.shard_bytes * self.num_shards

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield which bytes of which tensors make up the shard of `rank`."""
        shard_begin, shard_end = rank * self.shard_bytes, (rank + 1) * self.shard_bytes
        for field in self.fields:
            begin, end = max(field.begin_byte, shard_begin), min(field.end_byte, shard_end)
            if begin < end:
                yield Piece(field, begin - field.begin_byte, end - field.begin_byte, begin - shard_begin)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def plan_layout(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], num_shards: int) -> Layout:
    """Place `tensors` (name, dtype, shape) one after another, in the order given."""
    fields: list[Field] = []
    end_byte = 0
    for name, dtype, shape in tensors:
        field = Field(name, dtype, tuple(shape), round_up(end_byte, ALIGNMENT_BYTES))
        fields.append(field)
        end_byte = field.end_byte
    return Layout(tuple(fields), num_shards)
