"""Compute PEFT's LoRA layers with fewer passes over large tensors, and the same bits.

Note [Exact LoRA]
    PEFT's `lora.Linear` computes `result + B(A(dropout(x.to(A.weight.dtype)))) * scaling`. Two steps can be spared:

    - The cast. Under autocast to bfloat16 a bfloat16 `x` becomes float32 for a float32 adapter, and autocast makes the
      same bfloat16 of it for the product, in a copy that each layer keeps for backward. A bfloat16 is a float32, so
      both casts are the identity, and those of the gradient too. Active dropout is between the two, and keeps them.
    - The scale multiplies A's output, `r` wide, instead of B's. A power of two changes exponents alone, so every
      product and rounding that follows is that of PEFT, scaled, in forward and backward. This holds where nothing
      leaves the normal range, 2^-126 to 2^128 for float32 and bfloat16; float16's is too narrow to count on.

    What is not one vanilla adapter alone runs PEFT's forward: variants such as DoRA, `lora_bias`, several active
    adapters (PEFT sums up the gradients of their one cast in float32), adapters that are merged or disabled, batches of
    several adapters, and layers while they are compiled, since the compiler fuses both steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners import lora
from torch import nn

from .patches import extend_classes

_WIDE_RANGE = (torch.float32, torch.bfloat16)


def spare_lora_steps(model: nn.Module) -> None:
    """Let each `lora.Linear` of `model` spare what cannot change its bits; see [Exact LoRA].

    Layers that have it already stay as they are, so this may be called again when adapters were added.

    Memory: under autocast the layers of one input, such as q, k and v, keep that for backward instead of a copy each.
    """
    extend_classes((m for m in model.modules() if type(m) is lora.Linear), lambda _: {"forward": _forward})


def _forward(self: lora.Linear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    name = None if args or kwargs or torch.compiler.is_compiling() else _find_only_adapter(self)
    if name is None:
        return lora.Linear.forward(self, x, *args, **kwargs)
    lora_A, lora_B, dropout, scaling = (of[name] for of in (self.lora_A, self.lora_B, self.lora_dropout, self.scaling))
    result = self.base_layer(x)
    if not (_is_inactive(dropout) and _would_cast_back(x, lora_A.weight.dtype)):
        x = self._cast_input_dtype(x, lora_A.weight.dtype)
    low = lora_A(dropout(x))  # [..., r]
    is_exact = low.dtype in _WIDE_RANGE and math.frexp(scaling)[0] == 0.5  # a power of two
    update = lora_B(low * scaling) if is_exact else lora_B(low) * scaling
    return (result + update).to(result.dtype)


def _find_only_adapter(layer: lora.Linear) -> str | None:
    """Return the one adapter that `layer` computes with, or None unless it is vanilla LoRA."""
    if layer.disable_adapters or layer.merged:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or names[0] in layer.lora_variant or layer.lora_B[names[0]].bias is not None:
        return None
    return str(names[0])


def _is_inactive(dropout: nn.Module) -> bool:
    return isinstance(dropout, nn.Identity) or not dropout.training


def _would_cast_back(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether autocast undoes a cast of `x` to `dtype`.

    The copy of a slice would be contiguous, for which a product may take another kernel.
    """
    kind = x.device.type
    return (
        dtype == torch.float32
        and x.is_contiguous()
        and torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and x.dtype == torch.get_autocast_dtype(kind)
    )
