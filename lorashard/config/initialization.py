"""Which of PEFT's initializations rewrite the base, and which of them a derived base can be made for. No torch."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import LoraConfig

_REWRITING = ("pissa", "olora", "corda", "lora_ga")


def is_derived(init_lora_weights: object) -> bool:
    """Tell whether an initialization rewrites the base in a way that `lorashard.load` makes a base of its own for."""
    return re.fullmatch(r"pissa(_niter_\d+)?|olora", str(init_lora_weights)) is not None


def without_rewriting(lora: LoraConfig) -> LoraConfig:
    """Return a config of an adapter of the same form that leaves the base alone; others as they are."""
    if not is_derived(lora.init_lora_weights):
        return lora
    plain = copy.copy(lora)
    plain.init_lora_weights = True
    return plain


def explain_rewriting(
    init_lora_weights: object, quantization: str | None = None, *, is_new: bool = False
) -> str | None:
    """Return why an `init_lora_weights` cannot be had on a base that is read-only, or None where it can.

    Args:
        quantization: the format that the base is quantized to while it is read, if any.
        is_new: the adapter is made with the model, by `load` or `finetune`, which can derive a base for it first.
    """
    wanted = str(init_lora_weights).lower()
    if wanted == "loftq" and quantization != "nf4":
        return (
            "init_lora_weights: 'loftq' makes up for what 4 bits lose, from weights that are not quantized yet: "
            f"expected a new adapter and quantization: nf4 with it, found quantization: {quantization or 'none'}"
        )
    if not wanted.startswith(_REWRITING) or (is_new and is_derived(init_lora_weights)):
        return None
    return (
        f"init_lora_weights: '{wanted}' rewrites the base when PEFT makes or loads the adapter, and lorashard reads "
        "the base as it is: expected true, false, 'gaussian' or 'orthogonal', or 'pissa', 'pissa_niter_N' or 'olora' "
        "for a new adapter of lorashard.load, which derives a base for it; or let PEFT make the adapter in memory and "
        "give it to lorashard.shard; a saved adapter is converted once by PEFT's "
        "save_pretrained(path_initial_model_for_weight_conversion=...)"
    )
