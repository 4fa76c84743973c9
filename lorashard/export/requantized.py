"""Merged weights quantized again, stored as bitsandbytes stores them and transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..config.quantization_options import Quantization, read_quantization
from ..errors import ConfigError
from ..model.quantizing import find_quantizers
from ..quantization.format import Quantizer
from ..quantization.nf4 import Nf4
from ..quantization.nf4_tables import NF4_CODE, make_dynamic_map
from ..runtime.dtypes import name_of
from .quantized_base import quantize_weight
from .stored_layout import OriginalLayout, StoredValues

# What is in the files beside values and scales, as JSON: padded, since a tensor's size is fixed before its values.
_STATE_BYTES = 512


@dataclass(frozen=True)
class Requantized:
    """Which weights of a merged model are stored quantized.

    Attributes:
        quantizers: their formats, by name.
        skipped: the linear modules that are not.
    """

    quantization: Quantization
    quantizers: Mapping[str, Quantizer]
    skipped: Sequence[str]

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the `quantization_config` of the model.

        Args:
            dtype: what it computes in.
        """
        config: dict[str, Any] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": self.quantization.format == "nf4",
            "load_in_8bit": self.quantization.format == "int8",
            "llm_int8_skip_modules": list(self.skipped),
        }
        if self.quantization.format == "nf4":
            config |= {
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": self.quantization.double_quant,
                "bnb_4bit_compute_dtype": name_of(dtype),
                "bnb_4bit_quant_storage": "uint8",
            }
        return config


def choose_requantization(trained_on: Quantization | None, asked: str | Quantization | None) -> Quantization | None:
    """Return what merged weights are to be quantized to.

    The name of the format that the adapter was trained in means that format with double quantization as it was then.

    Raises:
        ConfigError: there is no such format.
    """
    if trained_on is not None and asked == trained_on.format:
        return replace(trained_on, has_vocabulary=False)
    return read_quantization(asked)


def find_requantized(skeleton: PreTrainedModel, quantization: Quantization | None) -> Requantized | None:
    """Return which weights of a merged model are quantized.

    Args:
        skeleton: without adapters.

    Raises:
        ConfigError: transformers could not load them so.
    """
    if quantization is None:
        return None
    if quantization.format == "fp8":
        raise ConfigError(
            "transformers loads no fp8 with a scale for each row",
            option="requantize",
            expected="nf4 or int8, as bitsandbytes stores them",
            found="fp8",
            fix="leave requantize out, or give nf4 or int8",
        )
    if quantization.has_vocabulary:
        raise ConfigError(
            "transformers quantizes no embedding with bitsandbytes",
            option="requantize",
            found="has_vocabulary",
            fix="leave has_vocabulary out",
        )
    quantizers = find_quantizers(skeleton, quantization)
    modules = dict(skeleton.named_modules())
    for name in quantizers:
        owner = modules[name.rpartition(".")[0]]
        if type(owner) is not nn.Linear or not name.endswith(".weight"):
            raise ConfigError(
                "transformers loads other weights from bitsandbytes' formats in another shape or not at all",
                option="requantize",
                expected="linear weights alone",
                found=f"'{name}' of a {type(owner).__name__}",
                fix="leave requantize out",
            )
    linears = [path for path, module in modules.items() if isinstance(module, (nn.Linear, Conv1D))]
    return Requantized(quantization, quantizers, [path for path in linears if f"{path}.weight" not in quantizers])


class QuantizedLayout:
    """The layout of the base's files, but that some tensors are stored as what they are quantized to.

    Attributes:
        tensors: as in `OriginalLayout`.
        copied: as in `OriginalLayout`.
    """

    def __init__(self, original: OriginalLayout, requantized: Requantized, tensors: Mapping[str, torch.Tensor]) -> None:
        """Plan the stored tensors.

        Args:
            tensors: the model's, on the meta device, by name.

        Raises:
            ConfigError: a weight is not stored as a tensor of its own.
        """
        self._original = original
        self._metas: dict[str, torch.Tensor] = {}
        self._formats: dict[str, Quantizer] = {}
        for name, quantizer in requantized.quantizers.items():
            key = original.key_of(name)
            if key is None or not key.endswith(".weight"):
                raise ConfigError(
                    f"'{name}' is not stored by itself in this model's files, as bitsandbytes needs it",
                    option="requantize",
                    fix="leave requantize out",
                )
            self._metas[key], self._formats[key] = tensors[name], quantizer
        self.copied = original.copied
        self.tensors: dict[str, torch.Tensor] = {}
        for key, tensor in original.tensors.items():
            if key in self._formats:
                self.tensors |= _describe(key, self._formats[key], self._metas[key])
            else:
                self.tensors[key] = tensor

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        """Return what `OriginalLayout.batches` does."""
        return self._original.batches(names)

    def store(self, values: Mapping[str, torch.Tensor]) -> Iterator[StoredValues]:
        """Yield what the values of one batch fill."""
        for key, begin, value in self._original.store(values):
            if key not in self._formats:
                yield key, begin, value
                continue
            meta, quantizer = self._metas[key], self._formats[key]
            value = value.to(meta.dtype).reshape(meta.shape)
            for stored_key, tensor in _name(key, quantizer, value, quantize_weight(quantizer, value)).items():
                yield stored_key, 0, tensor


def _describe(key: str, quantizer: Quantizer, meta: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a weight on the meta device."""
    parts = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in quantizer.parts(meta.shape)]
    return {
        name: torch.empty_like(tensor, device="meta") for name, tensor in _name(key, quantizer, meta, parts).items()
    }


def _name(
    key: str, quantizer: Quantizer, values: torch.Tensor, parts: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the parts of a weight under bitsandbytes' keys, with what else it stores.

    Follows `QuantState.as_dict(packed=True)` and `Linear8bitLt._save_to_state_dict`.
    """
    named = dict(zip((part.name for part in quantizer.parts(values.shape)), parts, strict=True))
    if not isinstance(quantizer, Nf4):
        module = key.removesuffix("weight")
        by_rows = torch.zeros((), dtype=torch.uint8)
        return {key: named[""], f"{module}SCB": named["SCB"], f"{module}weight_format": by_rows}
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": quantizer.block_size,
        "dtype": name_of(values.dtype),
        "shape": list(values.shape),
    }
    stored = {key: named[""].view(-1, 1), f"{key}.absmax": named["absmax"], f"{key}.quant_map": torch.tensor(NF4_CODE)}
    if quantizer.double_quant:
        stored[f"{key}.nested_absmax"] = named["nested_absmax"]
        stored[f"{key}.nested_quant_map"] = make_dynamic_map()
        offset = named["nested_offset"]
        state |= {
            "nested_blocksize": quantizer.nested_block_size,
            "nested_dtype": "float32",
            "nested_offset": 0.0 if offset.is_meta else offset.item(),
        }
    text = json.dumps(state).encode().ljust(_STATE_BYTES)
    stored[f"{key}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return stored
