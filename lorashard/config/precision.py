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
        raise ConfigError("bf16 and fp16 are both true", option="bf16", fix="choose one")
    for flag, name in asked.items():
        dtype = options.get("dtype", name)
        if dtype not in (name, "auto"):
            raise ConfigError(
                "contradicts dtype", option=flag, expected=f"dtype: {name} with it", found=f"dtype: {dtype}"
            )
        return {"dtype": name}
    if options.get("dtype") == "float16" and options.get("fp16") is False:
        raise ConfigError(
            "contradicts dtype", option="fp16", expected="true with dtype: float16, for its loss scaling", found="false"
        )
    return {}
