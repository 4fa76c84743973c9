"""Put an adapter on a model, and find its tensors among the base's."""

from __future__ import annotations

import difflib
import re
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
from .loftq import without_loftq
from .stacks import find_layers

# What PEFT itself adds to modules_to_save of a classifier, whatever the model calls its head.
_CLASSIFIER_HEADS = ("classifier", "score")


def inject(model: PreTrainedModel, config: PeftConfig, **options: Any) -> PeftModel:
    """Put a new adapter on `model`, as `get_peft_model` does.

    Raises:
        ConfigError: PEFT cannot: the model lacks the modules or layers, the kind of adapter does not fit it, or it
            writes into the base.
    """
    _check_layers(model, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that transformers has changed
        try:
            return get_peft_model(model, without_loftq(config), **options)
        except ShardError as error:
            raise ConfigError(
                f"PEFT rewrites the base to make this adapter, and it is read-only: {error.problem}",
                where=error.where,
                expected=error.expected,
                fix=error.fix,
            ) from error
        except (ValueError, TypeError, AttributeError, RuntimeError, ImportError, re.error) as error:
            raise ConfigError(
                f"PEFT cannot put this adapter on {type(model).__name__}: {' '.join(str(error).split())}"
            ) from error


def _check_layers(model: PreTrainedModel, config: PeftConfig) -> None:
    wanted = getattr(config, "layers_to_transform", None)
    if wanted is None:
        return
    num_layers = len(find_layers(model))
    for index in [wanted] if isinstance(wanted, int) else wanted:
        if not 0 <= index < num_layers:
            raise ConfigError(
                option="layers_to_transform",
                expected=f"decoder layers of {type(model).__name__}, from 0 to {num_layers - 1}",
                found=index,
            )


def check_coverage(model: PeftModel, config: PeftConfig) -> None:
    """Refuse a new adapter that names modules which the model lacks: PEFT would adapt the others alone.

    Args:
        config: as it was before the adapter was made.

    Raises:
        ConfigError: with the name, and the nearest that the model has.
    """
    paths = [name for name, _ in model.get_base_model().named_modules() if name]
    modules = {name.rpartition(".")[2] for name in paths}
    parameters = {name.rpartition(".")[2] for name, _ in model.get_base_model().named_parameters()}
    saved = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    parts = (
        ("target_modules", getattr(model.base_model, "targeted_module_names", None), modules),
        ("target_parameters", getattr(model.base_model, "targeted_parameter_names", None), parameters),
        ("modules_to_save", saved, modules),
    )
    for option, covered, known in parts:
        wanted = getattr(config, option, None) or []
        if covered is None or isinstance(wanted, str):
            continue
        for name in sorted(wanted):
            is_covered = any(path == name or path.endswith(f".{name}") for path in covered)
            if is_covered or (option == "modules_to_save" and name in _CLASSIFIER_HEADS):
                continue
            nearest = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
            hint = f"did you mean '{nearest[0]}'?" if nearest and nearest[0] != name else "leave it out"
            raise ConfigError(
                f"found nothing to adapt under the name '{name}' in {type(model.get_base_model()).__name__}",
                option=option,
                fix=hint,
            )


def find_adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return every parameter that PEFT added, of active and inactive adapters, and every one that trains."""
    found = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if isinstance(model, PeftModel):  # outside the base, such as the embeddings of a prompt
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
    """Return a function: whether a parameter of `model` belongs to its frozen base."""
    adapter = find_adapter_parameters(model)
    return lambda parameter: isinstance(parameter, Placeholder) or parameter not in adapter
