"""When a run evaluates and saves, as its options say. Imports no library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

_SAVE_STEPS = 500  # transformers' default


def find_eval_steps(trainer: Mapping[str, Any]) -> float:
    """Return the steps between two evaluations with `eval_strategy: steps`; below 1 a share of all steps."""
    return trainer.get("eval_steps") or trainer["logging_steps"]


def check_saves(trainer: Mapping[str, Any]) -> None:
    """Refuse options with which an evaluated adapter has no checkpoint, as transformers does later, in each rank.

    Raises:
        ConfigError: Evaluations and checkpoints are at different steps.
    """
    saves, evaluates = trainer["save_strategy"], trainer["eval_strategy"]
    needed = "load_best_model_at_end needs a checkpoint of each evaluation"
    if saves not in ("best", evaluates):
        raise ConfigError(
            needed,
            option="save_strategy",
            expected=f"{evaluates}, as eval_strategy, or best",
            found=saves,
        )
    save_steps, eval_steps = trainer.get("save_steps", _SAVE_STEPS), find_eval_steps(trainer)
    if saves == "steps" and min(save_steps, eval_steps) >= 1 and save_steps % eval_steps:
        expected = f"a multiple of eval_steps, {eval_steps}"
        raise ConfigError(needed, option="save_steps", expected=expected, found=save_steps)
