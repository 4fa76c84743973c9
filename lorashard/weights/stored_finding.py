"""Find which stored tensors of a quantized checkpoint belong to one weight, and check them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointError
from ..quantization.nf4 import Nf4
from ..quantization.nf4_tables import NF4_CODE, make_dynamic_map
from ..quantization.rowwise import Int8
from ..runtime.dtypes import name_of
from .computed_tensors import (
    MXFP4_BLOCK_NUMEL,
    BlockFp8,
    Constant,
    MxFp4Experts,
    NestedScales,
    QuantizedTensor,
    ReadElements,
)
from .safetensors_files import StoredTensor
from .stored_formats import BITSANDBYTES, MXFP4, NF4_COPY, StoredFormat

_STATE = ".quant_state.bitsandbytes__nf4"
_OTHER_STATE = ".quant_state.bitsandbytes__fp4"
_BLOCK_SIZES = [2**power for power in range(5, 13)]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def find_weights(
    stored: StoredFormat, tensors: Mapping[str, StoredTensor], dtype: torch.dtype, read: ReadElements
) -> dict[str, StoredTensor]:
    """Return the tensors of a quantized checkpoint under the keys and shapes of the unquantized weights.

    Args:
        dtype: of the weights that are dequantized.
        read: for the small tensors that describe the others.

    Raises:
        CheckpointError: a tensor that belongs to another is missing, or does not match the format.
    """
    remaining = dict(tensors)
    if stored.method == MXFP4:
        found = [_take_mxfp4(key, remaining, dtype) for key in tensors if _is_mxfp4(tensors[key])]
    elif stored.method != BITSANDBYTES:
        found = [_take_fp8(key, remaining, dtype, stored) for key, tensor in tensors.items() if tensor.dtype in _FLOAT8]
    elif stored.quantization is not None and stored.quantization.format == "int8":
        found = [
            _take_int8(key, remaining, dtype, read) for key, tensor in tensors.items() if tensor.dtype == torch.int8
        ]
    else:
        found = [_take_nf4(key, remaining, dtype, read) for key in tensors if key.endswith((_STATE, _OTHER_STATE))]
    _check_remaining(stored, remaining)
    return remaining | {tensor.key: tensor for tensor in found}


def _is_mxfp4(tensor: StoredTensor) -> bool:
    return tensor.key.endswith("_blocks") and tensor.dtype == torch.uint8


def _take_mxfp4(key: str, remaining: dict[str, StoredTensor], dtype: torch.dtype) -> StoredTensor:
    name = key.removesuffix("_blocks")
    blocks = remaining.pop(key)
    scales = _take(remaining, f"{name}_scales", blocks)
    _check(blocks, (torch.uint8,), None)
    if len(blocks.shape) != 4 or blocks.shape[-1] != MXFP4_BLOCK_NUMEL // 2:
        raise _wrong(blocks, f"[experts, columns, blocks, {MXFP4_BLOCK_NUMEL // 2}]", list(blocks.shape))
    _check(scales, (torch.uint8,), blocks.shape[:-1])
    experts, columns, num_blocks, _ = blocks.shape
    shape = (experts, num_blocks * MXFP4_BLOCK_NUMEL, columns)
    return MxFp4Experts.at(blocks, name, dtype, shape, blocks, scales)


def _take_fp8(key: str, remaining: dict[str, StoredTensor], dtype: torch.dtype, stored: StoredFormat) -> StoredTensor:
    values = remaining.pop(key)
    scales = _take(remaining, f"{key}_scale_inv", values)
    # Of the layer's input, where that is quantized too.
    remaining.pop(f"{key.removesuffix('weight')}activation_scale", None)
    _check(scales, _FLOATS, None)
    shape = values.shape
    if len(shape) < 2:
        raise _wrong(values, "two dimensions or more", list(shape))
    block = stored.block if stored.block and math.prod(scales.shape) > 1 else (shape[-2], shape[-1])
    expected = (*shape[:-2], *(math.ceil(n / b) for n, b in zip(shape[-2:], block, strict=True)))
    if math.prod(scales.shape) != 1 or math.prod(expected) != 1:
        _check(scales, _FLOATS, expected)
    return BlockFp8.at(values, key, dtype, shape, values, scales, block)


def _take_int8(key: str, remaining: dict[str, StoredTensor], dtype: torch.dtype, read: ReadElements) -> StoredTensor:
    base = key.removesuffix("weight")
    values = remaining.pop(key)
    scales = _take(remaining, f"{base}SCB", values)
    if len(values.shape) != 2:
        raise _wrong(values, "two dimensions", list(values.shape))
    _check(scales, (torch.float32,), values.shape[:1])
    layout = remaining.pop(f"{base}weight_format", None)  # of older GPUs' own layouts, of which row-major is 0
    if layout is not None and int(read(layout, 0, 1)[0]) != 0:
        raise _wrong(layout, "rows (0)", int(read(layout, 0, 1)[0]))
    return QuantizedTensor.at(values, key, dtype, values.shape, Int8(), {"": values, "SCB": scales})


def _take_nf4(
    state_key: str, remaining: dict[str, StoredTensor], dtype: torch.dtype, read: ReadElements
) -> StoredTensor:
    if state_key.endswith(_OTHER_STATE):
        raise _wrong(remaining[state_key], "nf4 of bitsandbytes' 4-bit formats", "fp4", NF4_COPY)
    key = state_key.removesuffix(_STATE)
    state_tensor = remaining.pop(state_key)
    state = _read_state(state_tensor, read)
    shape, block = state["shape"], state["blocksize"]
    numel = math.prod(shape)
    num_blocks = math.ceil(numel / block)
    values, absmax = _take(remaining, key, state_tensor), _take(remaining, f"{key}.absmax", state_tensor)
    # They may be stored in any dtype (`bnb_4bit_quant_storage`): the bytes are the same.
    num_bytes = values.num_bytes
    if num_bytes != math.ceil(numel / 2):
        raise _wrong(values, f"{math.ceil(numel / 2)} bytes for shape {list(shape)}", f"{num_bytes}")
    _check_code(_take(remaining, f"{key}.quant_map", state_tensor), torch.tensor(NF4_CODE), read)
    parts: dict[str, StoredTensor] = {"": replace(values, dtype=torch.uint8, shape=(num_bytes,))}
    if "nested_offset" not in state:
        _check(absmax, (torch.float32,), (num_blocks,))
        return QuantizedTensor.at(values, key, dtype, shape, Nf4(False, block), parts | {"absmax": absmax})
    nested = _take(remaining, f"{key}.nested_absmax", state_tensor)
    size, offset, code = state["nested_blocksize"], state["nested_offset"], make_dynamic_map()
    _check(absmax, (torch.uint8,), (num_blocks,))
    _check(nested, (torch.float32,), (math.ceil(num_blocks / size),))
    _check_code(_take(remaining, f"{key}.nested_quant_map", state_tensor), code, read)
    scales = NestedScales.at(absmax, absmax.key, torch.float32, absmax.shape, absmax, nested, code, size, offset)
    plain = QuantizedTensor.at(values, key, dtype, shape, Nf4(False, block), parts | {"absmax": scales})
    constant = Constant.at(state_tensor, f"{key}.nested_offset", torch.float32, (1,), (offset,))
    parts |= {"absmax": absmax, "nested_absmax": nested, "nested_offset": constant}
    return QuantizedTensor.at(values, key, dtype, shape, Nf4(True, block, size), parts, plain)


def _read_state(stored: StoredTensor, read: ReadElements) -> dict[str, Any]:
    """Return the JSON in which bitsandbytes describes a weight, with the values that are used checked."""
    try:
        state = json.loads(bytes(read(stored, 0, math.prod(stored.shape)).tolist()))
        state["shape"] = tuple(state["shape"])
        sizes = [state["blocksize"], *state["shape"]]
        sizes += [state["nested_blocksize"]] if "nested_offset" in state else []
        if not all(isinstance(size, int) and size > 0 for size in sizes) or state["blocksize"] not in _BLOCK_SIZES:
            raise ValueError(f"sizes are {sizes}")
        if state["quant_type"] != "nf4" or state["dtype"] not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"quant_type is {state['quant_type']}, dtype {state['dtype']}")
        if "nested_offset" in state:
            state["nested_offset"] = float(state["nested_offset"])
            if not math.isfinite(state["nested_offset"]) or state["nested_dtype"] != "float32":
                raise ValueError(f"nested_offset is {state['nested_offset']}, nested_dtype {state['nested_dtype']}")
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise CheckpointError(
            f"tensor {stored.key} is damaged: it does not describe an nf4 weight ({what})",
            where=stored.file,
            fix="download the file again",
        ) from error
    return state


def _check_code(stored: StoredTensor, code: torch.Tensor, read: ReadElements) -> None:
    _check(stored, (torch.float32,), tuple(code.shape))
    # bitsandbytes' own tolerance: its versions may differ by an ulp.
    if not torch.allclose(read(stored, 0, len(code)), code, rtol=0, atol=1e-6):
        raise _wrong(stored, "the values of bitsandbytes' own format", "others")


def _check_remaining(stored: StoredFormat, remaining: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that belong to a quantized weight that was not found."""
    companions = {
        MXFP4: ("_blocks", "_scales"),
        BITSANDBYTES: (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format"),
    }.get(stored.method, ("_scale_inv", ".activation_scale"))
    for key, tensor in remaining.items():
        if key.endswith(companions):
            raise CheckpointError(
                f"tensor {key} belongs to a weight in {stored.description} whose other tensors are missing",
                where=tensor.file,
                fix="download the files again",
            )


def _take(remaining: dict[str, StoredTensor], key: str, of: StoredTensor) -> StoredTensor:
    if key not in remaining:
        raise CheckpointError(
            where=of.file, expected=f"a tensor {key} beside {of.key}", found="none", fix="download the files again"
        )
    return remaining.pop(key)


def _check(stored: StoredTensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None) -> None:
    if stored.dtype not in dtypes:
        raise _wrong(stored, " or ".join(map(name_of, dtypes)), stored.dtype)
    if shape is not None and stored.shape != tuple(shape):
        raise _wrong(stored, f"shape {list(shape)}", list(stored.shape))


def _wrong(stored: StoredTensor, expected: str, found: object, fix: str = "download the file again") -> CheckpointError:
    return CheckpointError(f"tensor {stored.key}", where=stored.file, expected=expected, found=found, fix=fix)
