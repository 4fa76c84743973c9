"""What `dtype: auto` becomes on a device, and what an explicit bfloat16 costs where no instruction computes in it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Literal

import torch

from ..errors import ConfigError
from . import dist

DtypeOption = torch.dtype | Literal["auto"]

_AMPERE = 8  # the first major compute capability with bfloat16 matmuls
_X86 = ("x86_64", "AMD64")
_NAMES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float64": torch.float64,
}


def read_dtype(asked: torch.dtype | str) -> DtypeOption:
    """Return what a `dtype` of the command line, of a configuration or of a script means.

    Raises:
        ConfigError: no such dtype is known.
    """
    if isinstance(asked, torch.dtype):
        return asked
    if asked == "auto":
        return "auto"
    if asked not in _NAMES:
        raise ConfigError(
            option="dtype", expected=f"auto, a torch.dtype or one of {', '.join(_NAMES)}", found=repr(asked)
        )
    return _NAMES[asked]


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name as options spell it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def settle_name(
    asked: str, device: torch.device, explain: Callable[[torch.device], str | None] | None = None
) -> tuple[str, str | None]:
    """Return what `choose_dtype` does, by name.

    Ranks: collective over all ranks.
    """
    dtype, sentence = choose_dtype(read_dtype(asked), device, explain)
    return name_of(dtype), sentence


def choose_dtype(
    asked: DtypeOption, device: torch.device, explain: Callable[[torch.device], str | None] | None = None
) -> tuple[torch.dtype, str | None]:
    """Return the dtype to compute in, and a sentence about it where there is something to say.

    With `auto` it is bfloat16 where every rank's device has instructions for it, and float32 elsewhere.

    Args:
        asked: an explicit dtype is always obeyed.
        device: of this rank.
        explain: why a device should not compute in bfloat16; the default is `explain_slow_bfloat16`.

    Ranks: collective over all ranks, which ask for the same; one process alone may call it too.
    """
    if asked not in ("auto", torch.bfloat16):
        return asked, None  # type: ignore[return-value]
    problems = dist.gather_objects((explain or explain_slow_bfloat16)(device))
    problem = next((problem for problem in problems if problem is not None), None)
    if asked == "auto" and problem is None:
        where = "these GPUs have" if device.type == "cuda" else "this CPU has"
        return torch.bfloat16, f"dtype: bfloat16, for which {where} instructions"
    if asked == "auto":
        less = "; --dtype float16 takes half of the memory" if device.type == "cuda" else ""
        return torch.float32, f"dtype: float32, since {problem}{less}"
    advice = None if problem is None else f"dtype: bfloat16 as asked, but {problem}; float32, or auto, is faster"
    return torch.bfloat16, advice


def explain_slow_bfloat16(device: torch.device) -> str | None:
    """Return why `device` should not compute in bfloat16, as a clause, or None where its instructions do.

    Ranks: local.
    """
    if device.type == "cuda":
        return _explain_gpu(device)
    # oneDNN's own answer, which also knows what its environment variable hides. Without it torch has its slow loops.
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (
            "this CPU has no bfloat16 instructions: matmuls in bfloat16 take about 65 times as long as in float32 "
            "(measured with AVX2 alone)"
        )
    # It also says yes where plain AVX-512 converts to float32 and back.
    if platform.machine() in _X86 and not torch.cpu._is_avx512_bf16_supported():
        return (
            "this CPU has no bfloat16 instructions: each matmul in bfloat16 converts to float32 and back, which takes "
            "about 1.3 times as long as float32"
        )
    return None


def _explain_gpu(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major >= _AMPERE:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has no bfloat16 instructions (compute capability {major}.{minor}, expected {_AMPERE}.0 or more)"
