"""What accelerate divides over ranks and gathers from them, for groups of ranks that share each row.

Note [Once a group]
    A loader divides its rows over groups, so the ranks of a group have copies of whatever they make of these. Where
    copies were gathered too, a full batch would count once for each of them, and what `gather_for_metrics` leaves of a
    part-filled one, whose rows it cuts off to those that the dataset has, only once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate import accelerator as accelerate_accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import recursively_apply
from torch import nn

from ..errors import ConfigError


class _RowsByGroup:
    """accelerate's function that divides a loader's rows over ranks, which divides them over groups of ranks."""

    def __init__(self, prepare: Any) -> None:
        self._prepare = prepare
        self.sizes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        size = self.find_size()
        kwargs["num_processes"] //= size
        kwargs["process_index"] //= size
        return self._prepare(*args, **kwargs)

    def find_size(self) -> int:
        """Return the ranks of a group; 1 once no model is left whose rows are shared."""
        sizes = set(self.sizes.values()) or {1}
        if len(sizes) > 1:
            raise ConfigError(
                option="sequence_parallel_size", expected="one size for all models of a process", found=sorted(sizes)
            )
        return sizes.pop()


class _FirstOfGroups:
    """An accelerator that gathers from the first rank of each group."""

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        self._accelerator = accelerator
        self._size = size

    def gather(self, tensors: Any) -> Any:
        return recursively_apply(self._choose, self._accelerator.gather(tensors))

    def _choose(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return [groups * values, ...] of [ranks * values, ...]."""
        return torch.cat(gathered.chunk(self._accelerator.num_processes)[:: self._size])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def give_rows_by_group(model: nn.Module, size: int) -> None:
    """Let loaders that accelerate prepares give groups of `size` ranks the same rows, as long as `model` lives.

    What `gather_for_metrics` gathers is of each group once; see [Once a group].
    """
    rows = accelerate_accelerator.prepare_data_loader
    if not isinstance(rows, _RowsByGroup):
        rows = accelerate_accelerator.prepare_data_loader = _RowsByGroup(rows)
        Accelerator.gather_for_metrics = _gather_once(rows, Accelerator.gather_for_metrics)
    rows.sizes[model] = size


def _gather_once(rows: _RowsByGroup, gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gather_for_metrics(accelerator: Accelerator, input_data: Any, use_gather_object: bool = False) -> Any:
        size = rows.find_size()
        # A dispatcher gives each rank other rows, whoever shares them.
        if size == 1 or isinstance(accelerator.gradient_state.active_dataloader, DataLoaderDispatcher):
            return gather(accelerator, input_data, use_gather_object)
        if use_gather_object or not _is_of_tensors(input_data):
            copies = input_data if accelerator.process_index % size == 0 else input_data[:0]
            return gather(accelerator, copies, True)
        return gather(_FirstOfGroups(accelerator, size), input_data)

    return gather_for_metrics


def _is_of_tensors(data: Any) -> bool:
    """Tell whether accelerate gathers `data` as tensors, and not as objects."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
