"""LoftQ: a LoRA that is initialized with the best low-rank approximation of the base's quantization error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Set
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.loftq_utils import _low_rank_decomposition

from ..engine import Placeholder
from ..errors import ConfigError
from ..weights.weights import BaseWeights

LOFTQ: Literal["loftq"] = "loftq"


def is_loftq(config: PeftConfig) -> bool:
    """Return whether an adapter is to be initialized by LoftQ."""
    return getattr(config, "init_lora_weights", None) == LOFTQ


def make_lora(options: Mapping[str, Any]) -> LoraConfig:
    """Return PEFT's config of these options: for LoftQ its constructor requires scipy, which nothing then uses."""
    config = LoraConfig(**{name: value for name, value in options.items() if value != LOFTQ})
    if options.get("init_lora_weights") == LOFTQ:
        config.init_lora_weights = LOFTQ
    return config


def without_loftq(config: PeftConfig) -> PeftConfig:
    """Return a config for PEFT to make the adapter from, before `initialize_loftq`; others as they are.

    PEFT's own way, `init_lora_weights="loftq"`, writes the quantized weights into the base, as floats, and does so
    again when the adapter is loaded. Its way for a base that is quantized, `replace_lora_weights_loftq`, leaves the
    base alone, and the adapter is saved as any other.
    """
    if not is_loftq(config):
        return config
    plain = copy.copy(config)
    plain.init_lora_weights, plain.loftq_config = True, {}
    return plain


def check_loftq(config: PeftConfig, is_stored_quantized: bool) -> None:
    """Refuse what LoftQ cannot do.

    Args:
        is_stored_quantized: the files hold no weights but quantized ones.

    Raises:
        ConfigError: naming the option.
    """
    if not is_loftq(config):
        return
    assert isinstance(config, LoraConfig)
    given = config.loftq_config if isinstance(config.loftq_config, dict) else vars(config.loftq_config)
    for option, only, reason in (
        ("loftq_bits", 4, "the base has the 4 bits of nf4"),
        ("loftq_iter", 1, "more rounds quantize another base than the one in the files"),
    ):
        if given.get(option, only) != only:
            raise ConfigError(reason, option="loftq_config", expected=f"{option}={only}", found=given[option])
    if is_stored_quantized:
        raise ConfigError(
            "'loftq' compares weights before and after quantization, and this checkpoint is stored quantized",
            option="init_lora_weights",
            fix="use the unquantized model, or init_lora_weights: true",
        )
    for option in ("use_dora", "target_parameters"):
        if getattr(config, option, None):
            raise ConfigError(
                "LoftQ initializes plain LoRA of linear layers alone", option=option, fix="leave one of them out"
            )


@torch.no_grad()
def initialize_loftq(model: PeftModel, weights: BaseWeights, quantized: Set[str], device: torch.device) -> None:
    """Give the LoRA of each quantized linear weight the A and B that PEFT's `replace_lora_weights_loftq` computes.

    Args:
        model: with placeholders for the base, whose readers return the dequantized values.
        weights: the base before it is quantized, in its compute dtype.
        quantized: the names of the weights that are quantized.
        device: where to compute.

    Raises:
        ConfigError: no quantized weight has a LoRA, or a rank is larger than its weight.

    Memory: one weight, a few times in float32.
    """
    count = 0
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or "default" not in layer.lora_A:
            continue
        weight = layer.get_base_layer().weight
        if not isinstance(weight, Placeholder) or weight.full_name not in quantized:
            continue
        rank = layer.r["default"]
        if rank > min(weight.shape):
            raise ConfigError(
                f"'loftq' on {path}",
                option="init_lora_weights",
                expected=f"a rank of at most {min(weight.shape)}",
                found=rank,
            )
        assert weight.reader is not None
        error = weights.read(weight.full_name).to(device, torch.float32) - weight.reader()
        found = _low_rank_decomposition(
            error.T if getattr(layer, "fan_in_fan_out", False) else error, reduced_rank=rank
        )
        layer.lora_A["default"].weight.copy_(found["R"])
        layer.lora_B["default"].weight.copy_(found["L"])
        count += 1
        if layer.scaling["default"] != 1 and count == 1:
            warnings.warn(
                f"init_lora_weights: 'loftq' corrects the quantization error where lora_alpha equals r; here {path} "
                f"scales it by {layer.scaling['default']:g}, as in PEFT",
                stacklevel=2,
            )
    if not count:
        raise ConfigError(
            "'loftq' found no quantized weight with a LoRA",
            option="init_lora_weights",
            expected="linear layers of the decoder in target_modules",
        )
