"""The tensors of a base that is merged, and their values: those of its files, as training computed with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..weights.weights import BaseWeights
from .quantized_base import QuantizedBase


@dataclass
class BaseTensors:
    """The tensors of a base without adapters: on the meta device by name, and names that stand for one tensor."""

    tensors: dict[str, torch.Tensor]
    ties: list[list[str]]


@dataclass
class BaseValues:
    """The values that a base has in training.

    Attributes:
        held: tensors that the model has in memory with other values than the files: biases, a saved embedding.
        in_model: the model's tensors, by the name in the base.
        quantized: weights that were quantized in training have the values that they had there.
    """

    weights: BaseWeights
    held: set[str]
    in_model: Mapping[str, torch.Tensor]
    device: torch.device
    quantized: QuantizedBase

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, in memory that nobody else uses; call it inside of `weights.unit` with the name."""
        if name in self.held or name not in self.weights.names:
            dtype = self.weights.target_dtype(name) if name in self.weights.names else self.in_model[name].dtype
            return self.in_model[name].detach().to(self.device, dtype, copy=True)
        return self.quantized.restore(name, self.weights.read(name).to(self.device))


def describe(skeleton: PreTrainedModel) -> BaseTensors:
    """Return the tensors of a model without adapters, whose weights are tied."""
    found: dict[int, list[str]] = {}
    tensors = {}
    for name, tensor in skeleton.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
        tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return BaseTensors(tensors, [names for names in found.values() if len(names) > 1])
