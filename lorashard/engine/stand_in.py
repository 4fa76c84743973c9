"""What a module holds for a frozen weight instead of a Parameter: all that bookkeeping asks for, and no storage."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ..errors import ShardError

# Bookkeeping that copies no numbers: `.data`, `.detach()`, `.to()` the same device and dtype.
_HARMLESS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class NoStorageError(ShardError, RuntimeError):
    """What torch raises for a tensor without storage: who asks and can do without one, as TRL's offloading, does."""


class StandIn(torch.Tensor):
    """A frozen parameter without a storage of its own, which cannot be written.

    Memory: none.
    """

    _is_param = True  # nn.Module and isinstance(x, nn.Parameter) take it for a Parameter

    @abstractmethod
    def twin(self) -> StandIn:
        """Return another tensor that stands for the same numbers."""

    @abstractmethod
    def is_same(self, other: object) -> bool:
        """Tell whether another tensor stands for the same numbers."""

    @abstractmethod
    def read(self, what: str) -> torch.Tensor:
        """Return the numbers, in memory of their own, for `what`."""

    @abstractmethod
    def refusal(self, what: str) -> ShardError:
        """Return the error for `what` was done with it."""

    def answer(self, func: Any, kwargs: dict[str, Any]) -> StandIn | None:
        """Return a twin, if that is all that an operation asks for."""
        is_harmless = func in _HARMLESS or (func is torch.ops.aten._to_copy.default and self._stays(kwargs))
        return self.twin() if is_harmless else None

    def _stays(self, to: dict[str, Any]) -> bool:
        if to.get("dtype") not in (None, self.dtype):
            return False
        device = to.get("device") or self.device  # "cpu:0" is the CPU too
        return device.type == self.device.type and (device.type == "cpu" or device.index in (None, self.device.index))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return torch.nn.Parameter(self.read("copy.deepcopy"), requires_grad=False)

    # These do not pass through the dispatcher.

    @property
    def data(self) -> torch.Tensor:
        return self.twin()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not self.is_same(value):  # nn.Module.to() assigns what it got, which is a twin
            raise self.refusal("assigned to")

    def numpy(self, *, force: bool = False) -> Any:
        return self.read("numpy").numpy(force=force)

    def tolist(self) -> Any:
        return self.read("tolist").tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        raise NoStorageError(str(self.refusal("asked for its storage")))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.read("__dlpack__").__dlpack__(*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self.refusal("written by __setitem__")

    def apply_(self, function: Any) -> torch.Tensor:
        raise self.refusal("written by apply_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal("pickled")


def refuse_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ShardError if an operation would write a `StandIn`, or let another tensor share its memory."""
    if not func._schema.is_mutable:
        return
    written = args
    if func.overloadpacket is not torch.ops.aten.set_:
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    for value in torch.utils._pytree.tree_leaves(written):
        if isinstance(value, StandIn):
            raise value.refusal(f"written by {func}")
