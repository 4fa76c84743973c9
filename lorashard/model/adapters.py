"""Tell the adapter's tensors from the base's in a PEFT model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from ..engine import Placeholder
from ..errors import ConfigError, ShardError


def inject(model: PreTrainedModel, config: PeftConfig, **options: Any) -> PeftModel:
    """Put a new adapter on `model`, as `get_peft_model` does.

    Raises:
        ConfigError: PEFT cannot: modules that the model has not, a kind of adapter that has no place in it, or one that
            writes into the base.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks for a name that transformers has changed
        try:
            return get_peft_model(model, config, **options)
        except ShardError as error:
            raise ConfigError(f"PEFT rewrites the base to make this adapter, and it is read-only: {error}") from error
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            raise ConfigError(
                f"PEFT cannot put this adapter on {type(model).__name__}: {' '.join(str(error).split())}"
            ) from error


def find_adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return every parameter that PEFT added, of active and inactive adapters, and every one that trains."""
    found = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if isinstance(model, PeftModel):  # what it holds around the base, such as the embeddings of a prompt
        found |= set(model.parameters()) - set(model.get_base_model().parameters())
    for layer in model.modules():
        if isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            for name in layer.adapter_layer_names:
                found |= _parameters_at(layer, name)
    return found


def find_adapter_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers that PEFT added, in the model's order: what must be equal on all ranks."""
    adapter = find_adapter_parameters(model)
    added = set(model.modules())
    if isinstance(model, PeftModel):
        added -= set(model.get_base_model().modules())
    for layer in model.modules():
        if isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            wrapped = [getattr(layer, name, None) for name in ("base_layer", "original_module")]
            base = {module for part in wrapped if isinstance(part, nn.Module) for module in part.modules()}
            added |= set(layer.modules()) - base
    buffers = [buffer for module in model.modules() if module in added for buffer in module.buffers(recurse=False)]
    return [p for p in model.parameters() if p in adapter] + buffers


def _parameters_at(layer: nn.Module, dotted_name: str) -> set[nn.Parameter]:
    value: object = layer
    for part in dotted_name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, nn.Parameter):
        return {value}
    return set(value.parameters()) if isinstance(value, nn.Module) else set()


def base_test(model: nn.Module) -> Callable[[nn.Parameter], bool]:
    """Return a function that tells whether a parameter of `model` belongs to its frozen base."""
    adapter = find_adapter_parameters(model)
    return lambda parameter: isinstance(parameter, Placeholder) or parameter not in adapter
