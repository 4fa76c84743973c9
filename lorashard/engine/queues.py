"""A device's queues of work, and the events that order them: the one place in the engine that calls torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a queue."""

    def synchronize(self) -> None:
        """Hold up the host until the device has come to this point."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this point to `end`, both recorded as timed."""
        ...


class Queues(Protocol):
    """What the engine asks of a device that works beside the host. Work of one queue is done in the order it was given.

    A device without them, the CPU, has done its work when the call returns.
    """

    def make(self) -> Any:
        """Return a new queue."""

    def on(self, queue: Any) -> AbstractContextManager[None]:
        """Make `queue` the current one of this thread while the body runs."""
        ...

    def record(self, is_timed: bool = False) -> Event:
        """Return an event that happens when all that the current queue was given so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """Hold up the current queue, not the host, until `event` has happened."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory from which `copy` does not hold up the host."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` is in such memory."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give the current queue a copy from pinned memory."""


class CudaQueues:
    """The streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @contextlib.contextmanager
    def on(self, queue: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(queue):
            yield

    def record(self, is_timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=is_timed))

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)


def queues_of(device: torch.device) -> Queues | None:
    """Return the queues of `device`; None for the CPU."""
    return CudaQueues(device) if device.type == "cuda" else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current GPU of this thread while the body runs, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
