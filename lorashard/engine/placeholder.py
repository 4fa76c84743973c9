"""What stands in a module for a base weight while it is sharded: everything but the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ShardError

# Bookkeeping that copies no numbers: `.data`, `.detach()`, `.to()` the same device and dtype.
_HARMLESS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class NoStorageError(ShardError, RuntimeError):
    """What torch raises for a tensor without storage: who asks and can do without one, as TRL's offloading, does."""


class Placeholder(torch.Tensor):
    """A parameter's name, shape, dtype and device, without storage; reading its numbers raises ShardError.

    So counts, `.to(device)`, `state_dict()` and the bookkeeping of PEFT and Trainer stay right, and nothing can
    mistake a sharded weight for zeros, NaN or stale bytes.

    While `reader` is set, reading gets the numbers from there, one tensor at a time: some adapters are initialised
    from the base's weights before those are sharded.

    Memory: none.
    """

    full_name: str
    reader: Callable[[], torch.Tensor] | None
    _is_param = True  # nn.Module and isinstance(x, nn.Parameter) take it for a Parameter

    @staticmethod
    def __new__(cls, full_name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Placeholder:
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, requires_grad=False)
        self.full_name = full_name
        self.reader = None
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, Placeholder):
            if func in _HARMLESS:
                return first.twin()
            if func is torch.ops.aten._to_copy.default and first._stays(kwargs or {}):
                return first.twin()
        written = [
            args[i] if i < len(args) else (kwargs or {}).get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for value in torch.utils._pytree.tree_leaves(written):
            if isinstance(value, Placeholder):
                raise _refusal(value, f"written by {func}")
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        read_args, read_kwargs = torch.utils._pytree.tree_unflatten([_read(leaf, func) for leaf in leaves], spec)
        return func(*read_args, **read_kwargs)

    def twin(self) -> Placeholder:
        """Return another placeholder of the same weight."""
        twin = Placeholder(self.full_name, self.shape, self.dtype, self.device)
        twin.reader = self.reader
        return twin

    def _stays(self, to: dict[str, Any]) -> bool:
        if to.get("dtype") not in (None, self.dtype):
            return False
        device = to.get("device") or self.device  # "cpu:0" is the CPU too
        return device.type == self.device.type and (device.type == "cpu" or device.index in (None, self.device.index))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return torch.nn.Parameter(_read(self, "copy.deepcopy"), requires_grad=False)

    # These do not pass through the dispatcher.

    @property
    def data(self) -> torch.Tensor:
        return self.twin()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, Placeholder):  # nn.Module.to() assigns what it got, which is a twin
            raise _refusal(self, "assigned to")

    def numpy(self, *, force: bool = False) -> Any:
        return _read(self, "numpy").numpy(force=force)

    def tolist(self) -> Any:
        return _read(self, "tolist").tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        if self.reader is None:
            raise NoStorageError(str(_refusal(self, "asked for its storage")))
        return self.reader().untyped_storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return _read(self, "__dlpack__").__dlpack__(*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _refusal(self, "written by __setitem__")

    def apply_(self, function: Any) -> torch.Tensor:
        raise _refusal(self, "written by apply_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, "pickled")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({self.full_name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _read(value: Any, func: object) -> Any:
    if not isinstance(value, Placeholder):
        return value
    if value.reader is None:
        raise _refusal(value, f"used by {func}")
    return value.reader()


def _refusal(placeholder: Placeholder, what: str) -> ShardError:
    return ShardError(
        f"base weight '{placeholder.full_name}' is sharded and was {what}: its numbers are whole only inside the "
        "model's own forward and backward. Save adapters with save_pretrained; load with placement='replicate' to keep "
        "the whole base readable on every rank"
    )
