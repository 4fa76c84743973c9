"""What lorashard has put on a base is taken off where PEFT gives the base back as a plain model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..engine import Engine

_ATTRIBUTE = "_lorashard_undo"


def is_whole(engine: Engine) -> bool:
    """Tell whether the modules hold the whole base as plain tensors, between passes too."""
    is_quantized = any(weight.format is not None for unit in engine.units for weight in unit.weights)
    return not is_quantized and all(unit.is_resident for unit in engine.units)


def on_release(base: nn.Module, undo: Callable[[], None]) -> None:
    """Let `release` call `undo`; what was put on last is taken off first."""
    base.__dict__.setdefault(_ATTRIBUTE, []).append(undo)


def release(base: nn.Module) -> None:
    """Make `base` what it was before it was sharded, so that it may be cast, trained, copied and pickled."""
    for undo in reversed(base.__dict__.pop(_ATTRIBUTE, [])):
        undo()
