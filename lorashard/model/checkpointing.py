"""Activation checkpointing for some of the decoder layers, where there is memory for the others' activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from peft import PeftModel
from torch import nn

from ..config.placement import check_num_layers
from ..errors import ConfigError
from .patches import wrap_method
from .stacks import find_layers
from .units import spread

_OPTION = "activation_checkpointing_layers"


def checkpoint_some(model: PeftModel, num_layers: int) -> None:
    """Let activation checkpointing, whoever switches it on, recompute `num_layers` decoder layers, spread evenly.

    Trainer switches it on when training begins, so what it calls is wrapped.

    Raises:
        ConfigError: there are fewer decoder layers, or they do not checkpoint themselves as transformers' own do.
    """
    layers = find_layers(model)
    check_num_layers(_OPTION, num_layers, len(layers))
    if any(not hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise ConfigError(
            f"{type(layers[0]).__name__} does not checkpoint itself as transformers' layers do",
            option=_OPTION,
            fix="leave the option out",
        )
    wrap_method(model.get_base_model(), "_set_gradient_checkpointing", partial(_switch, layers, num_layers))


def _switch(
    layers: Sequence[nn.Module],
    num_layers: int,
    original: Callable[..., None],
    enable: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    if enable and kwargs.get("every_n_layers", 1) != 1:
        raise ConfigError(
            f"{num_layers}, and every_n_layers: {kwargs['every_n_layers']}, both say which layers are recomputed",
            option=_OPTION,
            fix="leave every_n_layers out, or give all",
        )
    original(enable, *args, **kwargs)
    if enable:
        chosen = spread(layers, num_layers)
        for layer in layers:
            layer.gradient_checkpointing = layer in chosen  # type: ignore[assignment]
