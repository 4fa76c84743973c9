"""What stands in a module for a base weight while it is sharded: everything but the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ShardError
from .stand_in import StandIn, refuse_writes


class Placeholder(StandIn):
    """A parameter's name, shape, dtype and device, without storage; reading its numbers raises ShardError.

    So counts, `.to(device)`, `state_dict()` and the bookkeeping of PEFT and Trainer stay right, and nothing can
    mistake a sharded weight for zeros, NaN or stale bytes.

    While `reader` is set, reading gets the numbers from there, one tensor at a time: some adapters are initialized
    from the base's weights before those are sharded.

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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Placeholder) and (twin := first.answer(func, kwargs)) is not None:
            return twin
        refuse_writes(func, args, kwargs)
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        read_args, read_kwargs = torch.utils._pytree.tree_unflatten([_read(leaf, func) for leaf in leaves], spec)
        return func(*read_args, **read_kwargs)

    def twin(self) -> Placeholder:
        """Return another placeholder of the same weight."""
        twin = Placeholder(self.full_name, self.shape, self.dtype, self.device)
        twin.reader = self.reader
        return twin

    def is_same(self, other: object) -> bool:
        return isinstance(other, Placeholder) and other.full_name == self.full_name

    def read(self, what: str) -> torch.Tensor:
        if self.reader is None:
            raise self.refusal(f"used by {what}")
        return self.reader()

    def refusal(self, what: str) -> ShardError:
        return ShardError(
            f"base weight '{self.full_name}' is sharded and was {what}: its numbers are whole only inside the model's "
            "own forward and backward. Save adapters with save_pretrained; load with placement='replicate' to keep "
            "the whole base readable on every rank"
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        return super().untyped_storage() if self.reader is None else self.reader().untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({self.full_name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _read(value: Any, func: object) -> Any:
    return value.read(str(func)) if isinstance(value, Placeholder) else value
