"""The quantized format of a checkpoint's files, according to its config, and what a base is kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ..config.quantization_options import Quantization
from ..errors import CheckpointError, ConfigError

BITSANDBYTES, MXFP4, FP8 = "bitsandbytes", "mxfp4", "fp8"
NF4_COPY = "use the unquantized model with `quantization: nf4`, or a copy of it that is stored as nf4"


@dataclass(frozen=True)
class StoredFormat:
    """How the files hold quantized weights.

    Attributes:
        method: the `quant_method` of the config's `quantization_config`.
        description: for messages.
        quantization: the form in which the stored bytes are kept; None if they are dequantized while they are read.
        skipped: modules that are stored unquantized, as the config names them; None means the LM head alone.
        block: rows and columns that share a scale, in block-wise fp8.
    """

    method: str
    description: str
    quantization: Quantization | None = None
    skipped: tuple[str, ...] | None = None
    block: tuple[int, int] | None = None

    def skips(self, module_path: str) -> bool:
        """Tell whether a module is stored unquantized, by its path in the model or the end of it."""
        around = f".{module_path}."
        return any(f".{name}." in around for name in self.skipped or ())


def find_stored_format(config: Mapping[str, Any] | PreTrainedConfig, where: str = "the model") -> StoredFormat | None:
    """Return the quantized format of a model's files; None if they are not quantized.

    Args:
        config: the content of config.json, or the config that transformers reads from it.
        where: the model, for messages.

    Raises:
        CheckpointError: the format cannot be read.
    """
    found = _find_quantization_config(config)
    if not found:
        return None
    method = _find_method(found)
    try:
        if method == BITSANDBYTES:
            return _read_bitsandbytes(found, where)
        if method == MXFP4:
            return StoredFormat(MXFP4, "MXFP4", skipped=_read_skipped(found, "modules_to_not_convert"))
        if method == FP8:
            return _read_fp8(found)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"damaged quantization_config ({error})", where=where, fix="download its config.json again"
        ) from error
    raise CheckpointError(
        where=where,
        expected="unquantized weights, or bitsandbytes (nf4, int8), MXFP4 or block-wise fp8",
        found=f"a quantization_config ({method})",
        fix="use the unquantized model; `quantization: nf4` makes it as small while it is read",
    )


def settle_quantization(stored: StoredFormat | None, requested: Quantization | None, where: str) -> Quantization | None:
    """Return the form in which a base is kept: that of its files if they are quantized, or else the requested one.

    Raises:
        ConfigError: the files are quantized already, to another format.
    """
    if stored is None or stored.quantization is None:
        return requested
    if requested is not None and (requested.format != stored.quantization.format or requested.has_vocabulary):
        raise ConfigError(
            option="quantization",
            where=where,
            expected=f"{stored.quantization.format}, its stored format ({stored.description})",
            found=requested.format + (" with embedding and LM head" if requested.has_vocabulary else ""),
            fix="leave the option out, or use the unquantized model",
        )
    return stored.quantization


def forget_stored_format(config: PreTrainedConfig) -> None:
    """Let the config of a quantized checkpoint describe plain modules."""
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config


def _find_quantization_config(config: Mapping[str, Any] | PreTrainedConfig) -> dict[str, Any] | None:
    values = config.to_dict() if isinstance(config, PreTrainedConfig) else config
    for each in (values, values.get("text_config"), values.get("llm_config")):
        if isinstance(each, Mapping) and isinstance(each.get("quantization_config"), Mapping):
            return dict(each["quantization_config"])
    return None


def _find_method(found: Mapping[str, Any]) -> str:
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        return BITSANDBYTES  # the only method before transformers 4.31
    return str(getattr(method, "value", method))


def _read_bitsandbytes(found: Mapping[str, Any], where: str) -> StoredFormat:
    skipped = _read_skipped(found, "llm_int8_skip_modules")
    if found.get("load_in_4bit"):
        kind = found.get("bnb_4bit_quant_type", "fp4")  # bitsandbytes' own default
        if kind != "nf4":
            raise CheckpointError(
                where=where,
                expected="nf4 of bitsandbytes' 4-bit formats",
                found=f"bnb_4bit_quant_type {kind!r}",
                fix=NF4_COPY,
            )
        double_quant = bool(found.get("bnb_4bit_use_double_quant"))
        description = "bitsandbytes' nf4" + (" with double quantization" if double_quant else "")
        return StoredFormat(BITSANDBYTES, description, Quantization("nf4", double_quant), skipped)
    if found.get("load_in_8bit"):
        return StoredFormat(BITSANDBYTES, "bitsandbytes' int8", Quantization("int8"), skipped)
    raise ValueError("neither load_in_4bit nor load_in_8bit is set")


def _read_fp8(found: Mapping[str, Any]) -> StoredFormat:
    size = found.get("weight_block_size")
    skipped = _read_skipped(found, "modules_to_not_convert")
    if size is None:
        return StoredFormat(FP8, "fp8 with a scale for each weight", skipped=skipped)
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise ValueError(f"weight_block_size: expected two positive integers, found {size!r}")
    return StoredFormat(FP8, f"fp8 in blocks of {size[0]}x{size[1]}", skipped=skipped, block=(size[0], size[1]))


def _read_skipped(found: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    names = found.get(key)
    if names is None:
        return None
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key}: expected names of modules, found {names!r}")
    return tuple(names)
