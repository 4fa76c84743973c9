"""The tensors of a base that is to be merged, and where a unit's values come from: files, or a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from ..engine import Engine, Placeholder
from ..quantization.quantized_weight import QuantizedWeight
from ..runtime import dist
from ..weights.weights import BaseWeights
from .quantized_base import QuantizedBase

Read = Callable[[str], torch.Tensor]


@dataclass
class BaseTensors:
    """The tensors of a base without adapters: on the meta device by name, and names that stand for one tensor."""

    tensors: dict[str, torch.Tensor]
    ties: list[list[str]]


@dataclass
class MergeUnit:
    """What one rank merges and writes at a time: tensors by name, and keys to take over."""

    names: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)


class Values(Protocol):
    """Where a unit's base values come from."""

    def open(self, units: Sequence[MergeUnit]) -> AbstractContextManager[Read]:
        """Give a function that reads tensors of the unit at this rank's place in `units`, into memory of their own.

        Ranks: collective over all ranks if the values are.
        """
        ...


class FileValues:
    """The base's files, but for what the model has in memory with another value, or they have not.

    Weights that were quantized in training have the numbers that they had there.
    """

    def __init__(
        self,
        weights: BaseWeights,
        held: set[str],
        in_model: Mapping[str, torch.Tensor],
        device: torch.device,
        quantized: QuantizedBase,
    ) -> None:
        self._weights, self._held, self._in_model, self._device = weights, held, in_model, device
        self._quantized = quantized

    @contextmanager
    def open(self, units: Sequence[MergeUnit]) -> Iterator[Read]:
        own = own_unit(units)
        with self._weights.unit(own.names if own else []):
            yield self._read

    def _read(self, name: str) -> torch.Tensor:
        if name in self._held or name not in self._weights.names:
            dtype = self._weights.target_dtype(name) if name in self._weights.names else self._in_model[name].dtype
            return self._in_model[name].detach().to(self._device, dtype, copy=True)
        return self._quantized.restore(name, self._weights.read(name).to(self._device))


class EngineValues:
    """A sharded base in memory: units are gathered in order, and each kept by the rank that will merge it.

    What is quantized there is unpacked.
    """

    def __init__(
        self, engine: Engine, in_model: Mapping[str, torch.Tensor], base: BaseTensors, device: torch.device
    ) -> None:
        self._engine, self._in_model, self._base, self._device = engine, in_model, base, device

    @contextmanager
    def open(self, units: Sequence[MergeUnit]) -> Iterator[Read]:
        own = own_unit(units)
        held: dict[int, torch.Tensor] = {}
        with self._engine.readable():
            for unit in units:
                read: set[int] = set()
                for name in unit.names:
                    tensor = self._in_model[name]
                    if isinstance(tensor, Placeholder) and id(tensor) not in read:
                        read.add(id(tensor))
                        value = tensor.detach().clone() if tensor.reader is None else tensor.reader()
                        if unit is own:
                            held[id(tensor)] = value

        def take(name: str) -> torch.Tensor:
            tensor = self._in_model[name]
            value = tensor.unpack() if isinstance(tensor, QuantizedWeight) else held.get(id(tensor), tensor)
            return value.detach().to(self._device, self._base.tensors[name].dtype, copy=True)

        yield take


def describe(skeleton: PreTrainedModel) -> BaseTensors:
    """Return the tensors of a model without adapters, whose weights are tied."""
    found: dict[int, list[str]] = {}
    tensors = {}
    for name, tensor in skeleton.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
        tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return BaseTensors(tensors, [names for names in found.values() if len(names) > 1])


def own_unit(units: Sequence[MergeUnit]) -> MergeUnit | None:
    """Return the unit at this rank's place, if there are so many."""
    return units[dist.get_rank()] if dist.get_rank() < len(units) else None
