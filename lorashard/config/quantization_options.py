"""The options of a quantized base. Imports no torch: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from ..errors import ConfigError

Format = Literal["nf4", "int8", "fp8"]


@dataclass(frozen=True)
class Quantization:
    """A quantization with nothing left to choose.

    Attributes:
        format: of the linear weights of decoder layers, and of experts.
        double_quant: whether the scales of nf4 are quantized too.
        has_vocabulary: whether the embedding and the LM head are quantized as well.
    """

    format: Format
    double_quant: bool = False
    has_vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ConfigError(option="quantization", expected="nf4, int8 or fp8", found=repr(self.format))
        if self.double_quant and self.format != "nf4":
            raise ConfigError(option="quantization", expected="nf4, with double_quant", found=self.format)


class QuantizationOptions(BaseModel):
    """How the frozen base is quantized. Memory, traffic and the base's values depend on it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    quantization: Literal["none", "nf4", "int8", "fp8"] = "none"
    """Quantize the linear weights of decoder layers, and experts, to 4 bits (`nf4`, as bitsandbytes: 1/3.6 of
    bfloat16's bytes) or 8 (`int8`, or `fp8` e4m3, with a scale for each row: 1/2); norms, biases, routers, embedding
    and LM head stay as they are."""
    load_in_4bit: bool = False
    """The same as `quantization: nf4`."""
    load_in_8bit: bool = False
    """The same as `quantization: int8`."""
    bnb_4bit_use_double_quant: bool = False
    """With nf4, quantize the scales too: 0.37 bits less for each weight."""
    include_input_output_embeddings: bool = False
    """Quantize the embedding and the LM head as well."""
    cache_quantized: bool = False
    """Cache the quantized base on disk, in `$HF_HOME/lorashard/converted`; a cached one is always used."""

    @model_validator(mode="after")
    def _check_quantization(self) -> QuantizationOptions:
        self.resolve_quantization()
        return self

    def resolve_quantization(self) -> Quantization | None:
        """Return the quantization that the options and their aliases ask for; None for a base that is not quantized."""
        meant = {self.quantization} - {"none"}
        meant |= {"nf4"} if self.load_in_4bit else set()
        meant |= {"int8"} if self.load_in_8bit else set()
        if len(meant) > 1:
            raise ConfigError(
                option="quantization",
                expected="one format from quantization, load_in_4bit and load_in_8bit",
                found=" and ".join(sorted(meant)),
            )
        if meant and self.quantization == "none" and "quantization" in self.model_fields_set:
            name = "load_in_4bit" if self.load_in_4bit else "load_in_8bit"
            raise ConfigError(
                "contradicts quantization: none", option=name, fix=f"give quantization: {meant.pop()} alone"
            )
        if not meant:
            for name in ("bnb_4bit_use_double_quant", "include_input_output_embeddings", "cache_quantized"):
                if getattr(self, name):
                    raise ConfigError(option=name, expected="a quantization with it", found="quantization: none")
            return None
        chosen = meant.pop()
        if self.bnb_4bit_use_double_quant and chosen != "nf4":
            raise ConfigError(option="bnb_4bit_use_double_quant", expected="quantization: nf4 with it", found=chosen)
        return Quantization(chosen, self.bnb_4bit_use_double_quant, self.include_input_output_embeddings)  # type: ignore[arg-type]


def read_quantization(quantization: str | Quantization | None) -> Quantization | None:
    """Return the quantization that an argument of the Python API asks for.

    Raises:
        ConfigError: there is no such format.
    """
    if quantization is None or isinstance(quantization, Quantization):
        return quantization
    if quantization not in ("none", *get_args(Format)):
        raise ConfigError(option="quantization", expected="nf4, int8, fp8 or none", found=repr(quantization))
    return None if quantization == "none" else Quantization(quantization)  # type: ignore[arg-type]


def describe_quantization(quantization: Quantization | None) -> str:
    """Return in a few words what a base is quantized to."""
    if quantization is None:
        return "as it is, not quantized"
    extras = " with double quantization" if quantization.double_quant else ""
    extras += ", embedding and LM head too" if quantization.has_vocabulary else ""
    return f"quantized to {quantization.format}{extras}"


def check_compiling(quantization: Quantization | None) -> None:
    """Refuse to compile the layers of a quantized base.

    Raises:
        ConfigError: it is quantized.
    """
    if quantization is not None:
        raise ConfigError(
            f"the weights of a base in {quantization.format} are dequantized inside each operation, which "
            "torch.compile cannot trace",
            option="torch_compile",
            fix="leave torch_compile out, or quantization",
        )
