"""Which of a run's options were chosen: those that differ from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lorashard.config.methods import METHODS
from lorashard.config.run_config import RunConfig


def find_chosen(options: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the options that differ from the defaults of their method, each with its value and the default.

    An option of TRL's that a run was given counts as chosen, whatever TRL's own default is, which is None here. So do
    those of a run that another release has written and this one has not.
    """
    defaults = _read_defaults(str(options.get("method") or "sft"))
    return [(name, value, defaults.get(name)) for name, value in options.items() if value != defaults.get(name)]


def _read_defaults(method: str) -> dict[str, Any]:
    """Return what a run of a method writes in its config.yaml that is given nothing."""
    config = RunConfig.model_construct(method=method if method in METHODS else "sft", trainer={})
    return dict(yaml.safe_load(config.to_yaml()))
