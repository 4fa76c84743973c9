"""PEFT's initializations that rewrite the base, and those of them that a derived base can be made for. No torch."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig

_REWRITING = ("pissa", "olora", "corda", "lora_ga")


def is_derived(init_lora_weights: object) -> bool:
    """Return whether `lorashard.load` derives a base for an initialization that rewrites it."""
    return re.fullmatch(r"pissa(_niter_\d+)?|olora", str(init_lora_weights)) is not None


def without_rewriting(lora: LoraConfig) -> LoraConfig:
    """Return the config without an initialization that rewrites the base; others as they are."""
    if not is_derived(lora.init_lora_weights):
        return lora
    plain = copy.copy(lora)
    plain.init_lora_weights = True
    return plain


def check_initialization(init_lora_weights: object, quantization: str | None = None, *, is_new: bool = False) -> None:
    """Refuse an `init_lora_weights` that a read-only base cannot have.

    Args:
        quantization: the format that the base is quantized to while it is read, if any.
        is_new: the adapter is made with the model, by `load` or `finetune`, which can derive a base for it first.

    Raises:
        ConfigError: it needs another base than the one on disk.
    """
    asked = str(init_lora_weights).lower()
    if asked == "loftq" and quantization != "nf4":
        raise ConfigError(
            "loftq makes up for what 4 bits lose, from weights that are not quantized yet",
            option="init_lora_weights",
            expected="a new adapter with quantization: nf4",
            found=f"quantization: {quantization or 'none'}",
        )
    if asked.startswith(_REWRITING) and not (is_new and is_derived(init_lora_weights)):
        raise ConfigError(
            f"'{asked}' rewrites the base when PEFT makes or loads the adapter, and lorashard reads the base as it is",
            option="init_lora_weights",
            expected="true, false, gaussian or orthogonal, or pissa, pissa_niter_N or olora for a new adapter",
            fix="let PEFT make the adapter in memory and give it to lorashard.shard, or convert a saved adapter once "
            "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
