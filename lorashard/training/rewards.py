"""The rewards of GRPO: functions named as TRL's own `trl grpo` names them, and a reward model."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..weights.hub import resolve_folder
from ..weights.model_config import read_model_config
from ..weights.safetensors_files import Checkpoint

# What `trl grpo` takes by name; the rest are import paths.
_NAMED = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
_NEED_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")
_OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}  # as `trl grpo` has them

Reward = str | Callable[..., Any]


def check_reward_model(model_name_or_path: str, trust_remote_code: bool = False) -> None:
    """Check a reward model, which the trainer would also load from pickles, and whose faults it reports late.

    Args:
        trust_remote_code: Run code that comes with it.

    Raises:
        CheckpointError: It is missing, damaged, or needs code of its own.
    """
    folder = resolve_folder(model_name_or_path)
    with Checkpoint.open(folder):
        read_model_config(folder, trust_remote_code)


def load_rewards(names: list[str], model_name_or_path: str | None) -> list[Reward]:
    """Return what GRPOTrainer takes as `reward_funcs`: a reward model's name, which it loads unsharded, and functions.

    Raises:
        ConfigError: A function is not found, or needs a package that is not there.
    """
    model: list[Reward] = [model_name_or_path] if model_name_or_path else []
    return model + [_load_function(name) for name in names]


def _load_function(name: str) -> Callable[..., Any]:
    if name in _NEED_MATH_VERIFY and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            f"{name} needs a package that is not installed", option="reward_funcs", fix="pip install math_verify"
        )
    if name in _NAMED:
        function = getattr(importlib.import_module("trl.rewards"), name)
        return function(**_OVERLONG) if name == "get_soft_overlong_punishment" else function
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise ConfigError(
            option="reward_funcs",
            expected=f"one of {', '.join(_NAMED)}, or an import path such as my_rewards.is_right",
            found=repr(name),
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:  # the module is the user's, and its import may do anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{module_name!r} cannot be imported: {reason}", option="reward_funcs") from error
    if not callable(function):
        found = "nothing" if function is None else type(function).__name__
        raise ConfigError(option="reward_funcs", expected=f"a function {attribute!r} in {module_name!r}", found=found)
    return function
