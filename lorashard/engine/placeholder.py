"""What a module holds for a frozen weight instead of a Parameter: all that bookkeeping asks for, and no storage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ShardError

# Bookkeeping that copies no values: `.data`, `.detach()`, `.to()` the same device and dtype.
_HARMLESS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class NoStorageError(ShardError, RuntimeError):
    """What torch raises for a tensor without storage: who asks and can do without one, as TRL's offloading, does."""


class FrozenWeight(torch.Tensor):
    """A frozen parameter without a storage of its own, which cannot be written.

    Attributes:
        place: of a weight in a slot, its unit and its index there. Autograd saves these instead of the tensor.
        views: the views that were taken of the weight.
        reuses_memory: whether what `lend` returns is overwritten by the next operation.

    Memory: none.
    """

    _is_param = True  # nn.Module and isinstance(x, nn.Parameter) take it for a Parameter
    place: tuple[Any, int] | None = None
    views: tuple[Any, ...] = ()
    reuses_memory = False

    @abstractmethod
    def twin(self) -> FrozenWeight:
        """Return another tensor with the same values."""

    @abstractmethod
    def is_same(self, other: object) -> bool:
        """Tell whether another tensor has the same values."""

    @abstractmethod
    def lend(self, function: Any, index: int) -> torch.Tensor:
        """Return the values for the time of one operation, `function`, which was lent `index` weights before."""

    @abstractmethod
    def read(self, what: str) -> torch.Tensor:
        """Return the values, in memory of their own, for `what`."""

    @abstractmethod
    def refuse(self, what: str, kind: type[ShardError] = ShardError) -> ShardError:
        """Return the error that it was used as `what` says."""

    def viewed(self, views: tuple[Any, ...]) -> FrozenWeight:
        """Return `views` of this."""
        assert not views
        return self

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation on this that needs no values; None if it needs them."""
        is_harmless = func in _HARMLESS or (func is torch.ops.aten._to_copy.default and self._stays(kwargs))
        return self.twin() if is_harmless else None

    def _stays(self, to: dict[str, Any]) -> bool:
        if to.get("dtype") not in (None, self.dtype):
            return False
        device = to.get("device") or self.device  # "cpu:0" is the CPU too
        return device.type == self.device.type and (
            None in (device.index, self.device.index) or device.index == self.device.index
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, FrozenWeight) and (answer := first.answer(func, args, kwargs)) is not None:
            return answer
        _refuse_writes(func, args, kwargs)
        num_lent = 0
        reused: list[int] = []  # addresses of memory that the next operation overwrites

        def lend(value: Any) -> Any:
            nonlocal num_lent
            if not isinstance(value, FrozenWeight):
                return value
            values = value.lend(func, num_lent)
            num_lent += 1
            if value.reuses_memory:
                reused.append(values.untyped_storage().data_ptr())
            return values

        def keep(value: Any) -> Any:
            return value.clone() if _find_address(value) in reused else value

        result = func(*[_map(lend, value) for value in args], **{name: _map(lend, v) for name, v in kwargs.items()})
        return _map(keep, result) if reused else result

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return torch.nn.Parameter(self.read("copy.deepcopy"), requires_grad=False)

    # These do not pass through the dispatcher.

    @property
    def data(self) -> torch.Tensor:
        return self.twin()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not self.is_same(value):  # nn.Module.to() assigns what it got, which is a twin
            raise self.refuse("assigned to")

    def numpy(self, *, force: bool = False) -> Any:
        return self.read("numpy").numpy(force=force)

    def tolist(self) -> Any:
        return self.read("tolist").tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        raise self.refuse("asked for its storage", NoStorageError)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.read("__dlpack__").__dlpack__(*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self.refuse("written by __setitem__")

    def apply_(self, function: Any) -> torch.Tensor:
        raise self.refuse("written by apply_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refuse("pickled")


class Placeholder(FrozenWeight):
    """What stands for a weight while it is sharded: its name, shape, dtype and device; reading it raises ShardError.

    So counts, `.to(device)`, `state_dict()` and the bookkeeping of PEFT and Trainer stay right, and nothing can
    mistake a sharded weight for zeros, NaN or stale bytes.

    While `reader` is set, the values are read from there, one tensor at a time: some adapters are initialized from the
    base's weights before those are sharded.

    Memory: none.
    """

    full_name: str
    reader: Callable[[], torch.Tensor] | None

    @staticmethod
    def __new__(cls, full_name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Placeholder:
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, requires_grad=False)
        self.full_name = full_name
        self.reader = None
        return self

    def twin(self) -> Placeholder:
        twin = Placeholder(self.full_name, self.shape, self.dtype, self.device)
        twin.reader = self.reader
        return twin

    def is_same(self, other: object) -> bool:
        return isinstance(other, Placeholder) and other.full_name == self.full_name

    def lend(self, function: Any, index: int) -> torch.Tensor:
        return self.read(str(function))

    def read(self, what: str) -> torch.Tensor:
        if self.reader is None:
            raise self.refuse(f"used by {what}")
        return self.reader()

    def refuse(self, what: str, kind: type[ShardError] = ShardError) -> ShardError:
        return kind(
            f"it is sharded and was {what}",
            where=f"base weight '{self.full_name}'",
            expected="a use inside of the model's own forward or backward, where its values are unsharded",
            fix="save adapters with save_pretrained; load with placement='replicate' to keep the unsharded base "
            "readable on every rank",
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        return super().untyped_storage() if self.reader is None else self.reader().untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({self.full_name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _refuse_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ShardError if an operation would write a frozen weight, or let another tensor share its memory."""
    if not func._schema.is_mutable:
        return
    written = args
    if func.overloadpacket is not torch.ops.aten.set_:
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    for value in pytree.tree_leaves(written):
        if isinstance(value, FrozenWeight):
            raise value.refuse(f"written by {func}")


def _find_address(value: Any) -> int | None:
    """Return the address of a plain tensor's memory."""
    if type(value) is not torch.Tensor or not torch._C._has_storage(value):
        return None
    return value.untyped_storage().data_ptr()


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return pytree.tree_map(function, value) if isinstance(value, (list, tuple, dict)) else function(value)
