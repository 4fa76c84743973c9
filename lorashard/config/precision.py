"""The dtype that `bf16`, `fp16` and `dtype` ask for together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


def choose_precision(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtype that `bf16` or `fp16` ask for, after checking that all three agree.

    The base is cast to the dtype of the computation once, when it is loaded: under autocast to another one, every
    layer's weights would be copied in each step.
    """
    asked = {flag: name for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")) if options.get(flag)}
    if len(asked) == 2:
        raise ConfigError("bf16 and fp16 are both true: choose one")
    for flag, name in asked.items():
        dtype = options.get("dtype", name)
        if dtype not in (name, "auto"):
            raise ConfigError(f"{flag}: true and dtype: {dtype} contradict each other: the base computes in its dtype")
        return {"dtype": name}
    if options.get("dtype") == "float16" and options.get("fp16") is False:
        raise ConfigError("fp16: false and dtype: float16 contradict each other: float16 needs fp16's loss scaling")
    return {}
