"""GPUs on a machine without one: torch's fake tensors, which have a device and a shape, and no values."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorashard.engine import FrozenWeight
from lorashard.engine.queues import Queues

_NUM_DEVICE_TYPES = 21
_CPU, _CUDA = 0, 1


class _FakeQueues(Queues):
    """Queues that order nothing."""

    @classmethod
    def of(cls, device: torch.device) -> Queues | None:
        return cls(device) if device.type == "cuda" else None

    def make(self, *args: Any, **kwargs: Any) -> object:
        return object()

    @contextlib.contextmanager
    def on(self, queue: object) -> Iterator[None]:
        yield

    def record(self, is_timed: bool = False) -> Mock:
        return Mock(elapsed_time=lambda end: 0.0)

    def wait(self, event: Mock) -> None:
        pass

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def pin(self, memory: torch.Tensor) -> str | None:
        return None

    def unpin(self, memory: torch.Tensor) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


class _FakeGpu(TorchDispatchMode):
    """Makes what is put on a GPU a fake tensor, and leaves what is on the host as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FrozenWeight) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        device = torch.device(kwargs.get("device") or "cpu")
        is_fake = device.type == "cuda" or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        with self._fake if is_fake else contextlib.nullcontext():
            return func(*args, **kwargs)


def _submit(self: ThreadPoolExecutor, function: Callable[..., object], *args: Any) -> Future[object]:
    """Call a function at once: fake tensors are for one thread."""
    future: Future[object] = Future()
    future.set_result(function(*args))
    return future


@contextlib.contextmanager
def fake_gpus() -> Iterator[None]:
    """While the body runs, let tensors be on GPUs, of which number 0 is the current one.

    Autograd's graph can be built there, and not be run: a torch without CUDA has no thread for a GPU.
    """
    # What asks for the device of a graph's node is not in a torch without CUDA, and ends the process. The CPU's serves.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guard, guards[_CUDA] = guards[_CUDA], guards[_CUDA] or guards[_CPU]
    try:
        with pytest.MonkeyPatch.context() as patch, _FakeGpu():
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            for name in ("_exchange_device", "_maybe_exchange_device"):
                patch.setattr(torch.cuda, name, lambda index: 0)
            patch.setattr(torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: []))  # fake ones have some
            patch.setattr(torch, "from_dlpack", lambda tensor: tensor[:])
            patch.setattr(ThreadPoolExecutor, "submit", _submit)
            patch.setattr(Queues, "of", _FakeQueues.of)
            yield
    finally:
        guards[_CUDA] = guard
