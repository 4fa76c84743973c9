"""Loaders that give the ranks of a group the same rows: accelerate divides a loader's rows over all ranks."""

from __future__ import annotations

import weakref
from typing import Any

from accelerate import accelerator as accelerate_accelerator
from torch import nn

from ..errors import ConfigError


class _RowsByGroup:
    """accelerate's function that divides a loader's rows over ranks, which divides them over groups of ranks."""

    def __init__(self, prepare: Any) -> None:
        self._prepare = prepare
        self.sizes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sizes = set(self.sizes.values())
        if len(sizes) > 1:
            raise ConfigError(
                option="sequence_parallel_size", expected="one size for all models of a process", found=sorted(sizes)
            )
        for size in sizes:
            kwargs["num_processes"] //= size
            kwargs["process_index"] //= size
        return self._prepare(*args, **kwargs)


def give_rows_by_group(model: nn.Module, size: int) -> None:
    """Let loaders that accelerate prepares give groups of `size` ranks the same rows, as long as `model` lives."""
    prepare = accelerate_accelerator.prepare_data_loader
    if not isinstance(prepare, _RowsByGroup):
        prepare = accelerate_accelerator.prepare_data_loader = _RowsByGroup(prepare)
    prepare.sizes[model] = size
