"""Activation checkpointing for some of the decoder layers, where memory is left for the others to keep their own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..config.placement import check_num_layers
from ..errors import ConfigError
from .stacks import find_layers
from .units import spread


def checkpoint_some(model: PeftModel, num_layers: int) -> None:
    """Let activation checkpointing, whoever switches it on, recompute `num_layers` decoder layers, spread evenly.

    Trainer switches it on when training begins, so what it calls is wrapped.

    Raises:
        ConfigError: there are fewer decoder layers, or they do not checkpoint themselves as transformers' own do.
    """
    stack = find_layers(model)
    check_num_layers("activation_checkpointing_layers", num_layers, len(stack))
    if any(not hasattr(layer, "gradient_checkpointing") for layer in stack):
        raise ConfigError(
            f"activation_checkpointing_layers: {type(stack[0]).__name__} does not checkpoint itself as transformers' "
            "layers do; leave the option out"
        )
    base: Any = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    base._set_gradient_checkpointing = _narrow(base._set_gradient_checkpointing, stack, num_layers)


def _narrow(original: Any, stack: Sequence[nn.Module], num_layers: int) -> Any:
    @functools.wraps(original)
    def switch(enable: bool = True, *args: Any, **kwargs: Any) -> None:
        if enable and kwargs.get("every_n_layers", 1) != 1:
            raise ConfigError(
                f"activation_checkpointing_layers: {num_layers} and every_n_layers: {kwargs['every_n_layers']} both "
                "say which layers are recomputed; leave one of them out"
            )
        original(enable, *args, **kwargs)
        if enable:
            chosen = spread(stack, num_layers)
            for layer in stack:
                layer.gradient_checkpointing = any(layer is one for one in chosen)  # type: ignore[assignment]

    return switch
