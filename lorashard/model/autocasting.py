"""Warn once that autocast to bfloat16 is slow where the device has no instructions for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from ..runtime import dist

_logger = logging.getLogger(__name__)


def warn_of_autocast(layer: nn.Module) -> Callable[[], None]:
    """Let rank 0 warn if the first forward with gradients on a CPU without bfloat16 is under autocast to it.

    A script that takes float32 from `dtype="auto"` has autocast all the same if it leaves TRL's `bf16=True` in place.

    Args:
        layer: the first decoder layer, inside what accelerate runs under autocast.

    Returns:
        What takes the hook off again.
    """

    def check(_: nn.Module, args: tuple[object, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        is_bfloat16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        is_float32 = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 for arg in args)
        if is_bfloat16 and is_float32 and dist.get_rank() == 0:
            _logger.warning(
                "a float32 base computes under autocast to bfloat16, for which this CPU has no instructions, and keeps "
                "a bfloat16 copy of each weight until the backward: give the trainer's arguments bf16=False, which is "
                "not TRL's default"
            )

    handle = layer.register_forward_pre_hook(check)
    return handle.remove
