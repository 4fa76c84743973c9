"""In what format the base is kept, as a person chooses it. Imports no torch: the command line reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from ..errors import ConfigError

Format = Literal["nf4", "int8", "fp8"]


@dataclass(frozen=True)
class Quantization:
    """A format with nothing left to choose.

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
            raise ConfigError(f"quantization: expected nf4, int8 or fp8, found {self.format!r}")
        if self.double_quant and self.format != "nf4":
            raise ConfigError(f"quantization: double_quant is for nf4, found {self.format}")


class QuantizationOptions(BaseModel):
    """In how few bits the frozen base is kept. Memory, traffic and the base's numbers depend on it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    quantization: Literal["none", "nf4", "int8", "fp8"] = "none"
    """Keep the linear weights of decoder layers, and experts, in 4 bits (`nf4`, as bitsandbytes: 1/3.6 of bfloat16's
    bytes) or 8 (`int8`, or `fp8` e4m3, a scale a row: 1/2); norms, biases, routers, embedding and LM head stay as they
    are."""
    load_in_4bit: bool = False
    """The same as `quantization: nf4`."""
    load_in_8bit: bool = False
    """The same as `quantization: int8`."""
    bnb_4bit_use_double_quant: bool = False
    """With nf4, quantize the scales too: 0.37 bits less for each weight."""
    include_input_output_embeddings: bool = False
    """Quantize the embedding and the LM head as well."""
    cache_quantized: bool = False
    """Keep the quantized base on the disk, in `$HF_HOME/lorashard/converted`, and read it from there the next time; one
    that is there is read in any case."""

    @model_validator(mode="after")
    def _check_quantization(self) -> QuantizationOptions:
        self.resolve_quantization()
        return self

    def resolve_quantization(self) -> Quantization | None:
        """Return what is meant after the aliases have had their say; None for a base that is not quantized."""
        meant = {self.quantization} - {"none"}
        meant |= {"nf4"} if self.load_in_4bit else set()
        meant |= {"int8"} if self.load_in_8bit else set()
        if len(meant) > 1:
            raise ValueError(
                f"quantization, load_in_4bit and load_in_8bit ask for {' and '.join(sorted(meant))}; leave one of them"
            )
        if meant and self.quantization == "none" and "quantization" in self.model_fields_set:
            name = "load_in_4bit" if self.load_in_4bit else "load_in_8bit"
            raise ValueError(
                f"{name} is given together with quantization: none; leave one of them out, or give quantization: "
                f"{meant.pop()} alone"
            )
        if not meant:
            for name in ("bnb_4bit_use_double_quant", "include_input_output_embeddings", "cache_quantized"):
                if getattr(self, name):
                    raise ValueError(f"{name}: expected quantization with it, found quantization: none")
            return None
        chosen = meant.pop()
        if self.bnb_4bit_use_double_quant and chosen != "nf4":
            raise ValueError(f"bnb_4bit_use_double_quant is for quantization: nf4, found {chosen}")
        return Quantization(chosen, self.bnb_4bit_use_double_quant, self.include_input_output_embeddings)  # type: ignore[arg-type]


def read_quantization(quantization: str | Quantization | None) -> Quantization | None:
    """Return what a script asks for.

    Raises:
        ConfigError: there is no such format.
    """
    if quantization is None or isinstance(quantization, Quantization):
        return quantization
    if quantization not in ("none", *get_args(Format)):
        raise ConfigError(f"quantization: expected nf4, int8, fp8 or none, found {quantization!r}")
    return None if quantization == "none" else Quantization(quantization)  # type: ignore[arg-type]


def describe_quantization(quantization: Quantization | None) -> str:
    """Say in a few words what a base is quantized to."""
    if quantization is None:
        return "as it is, not quantized"
    extras = " with double quantization" if quantization.double_quant else ""
    extras += ", embedding and LM head too" if quantization.has_vocabulary else ""
    return f"quantized to {quantization.format}{extras}"


def explain_compiling(quantization: Quantization | None) -> str | None:
    """Return why the layers of a base cannot be compiled, or None where they can."""
    if quantization is None:
        return None
    return (
        f"torch_compile: the weights of a base in {quantization.format} are unpacked inside of each operation, where "
        "torch.compile cannot look: leave torch_compile out, or quantization"
    )
