"""Base weights that are read outside of passes: to save them, or to make an adapter from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from .unit import Unit


class BaseReader:
    """Returns copies of base weights, unit by unit, and lets placeholders do so."""

    def __init__(
        self,
        units: Sequence[Unit],
        read: Callable[[Unit, int], torch.Tensor],
        outside_of_passes: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        """Take what gathers.

        Args:
            read: returns a copy of the weight of a unit that has an index there.
            outside_of_passes: surrounds reads; is told whether ranks are to compare that they read.
        """
        self._units = units
        self._read = read
        self._outside_of_passes = outside_of_passes

    @contextmanager
    def readable(self) -> Iterator[None]:
        """While the body runs, reading a base weight outside of a pass gathers its unit and returns a copy.

        Ranks: every rank must read the same weights in the same order.
        Memory: a copy of each weight that is read, for as long as the reader keeps it.
        """
        sharded = [
            (weight.placeholder, partial(self._read, unit, index))
            for unit in self._units
            if not unit.is_resident
            for index, weight in enumerate(unit.weights)
        ]
        if not sharded:
            yield
            return
        readers = [placeholder.reader for placeholder, _ in sharded]  # set where this is called inside of itself
        with self._outside_of_passes(False):
            for placeholder, reader in sharded:
                placeholder.reader = reader
            try:
                yield
            finally:
                for (placeholder, _), previous in zip(sharded, readers, strict=True):
                    placeholder.reader = previous

    def read(self, wanted: Sequence[tuple[Unit, int]]) -> list[torch.Tensor]:
        """Return copies of base weights, each given by its unit and its index there, outside of a pass.

        Ranks: collective over the shard group where one of their units is sharded: every rank must read the same.
        Memory: the copies, and one slot at a time.
        """
        if all(unit.is_resident for unit, _ in wanted):
            return [self._read(unit, index) for unit, index in wanted]
        with self._outside_of_passes(True):
            return [self._read(unit, index) for unit, index in wanted]
