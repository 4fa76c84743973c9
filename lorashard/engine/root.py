"""The modules whose call is one pass of the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError


def make_root(module: nn.Module, running: Callable[[], AbstractContextManager[None]]) -> None:
    """Surround every call of `module` with `running()`, by a subclass that is otherwise the same class.

    A forward hook would not run after KeyboardInterrupt, and `forward` itself is replaced by others.
    """
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # an error that the compiler meets while it traces would make it skip this call
            raise ConfigError(
                "torch.compile was given the whole model (a trainer's torch_compile=True does that), the sharding with "
                "it",
                option="torch_compile",
                fix="leave it out there and give torch_compile to lorashard.load or lorashard.shard, which compile the "
                "decoder layers",
            )
        with running():
            return original.__call__(self, *args, **kwargs)

    namespace = {"__call__": call, "__module__": original.__module__, "__qualname__": original.__qualname__}
    module.__class__ = type(original.__name__, (original,), namespace)
