"""A device's queues of work, and the events that order them: the one place in the engine that calls torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

Event = torch.cuda.Event  # a point in a queue


class Queues:
    """The streams of one GPU, which works beside the host; work of one stream is done in the order it was given.

    A device without them, the CPU, has done its work when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self) -> torch.cuda.Stream:
        """Return a new queue."""
        return torch.cuda.Stream(self._device)

    @contextlib.contextmanager
    def on(self, queue: torch.cuda.Stream) -> Iterator[None]:
        """Make `queue` the current one of this thread while the body runs."""
        with torch.cuda.device(self._device), torch.cuda.stream(queue):
            yield

    def record(self, is_timed: bool = False) -> Event:
        """Return an event that happens when all that the current queue was given so far is done."""
        return torch.cuda.current_stream(self._device).record_event(Event(enable_timing=is_timed))

    def wait(self, event: Event) -> None:
        """Hold up the current queue, not the host, until `event` has happened."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory from which `copy` does not hold up the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` is in such memory."""
        return tensor.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give the current queue a copy from pinned memory."""
        target.copy_(source, non_blocking=True)


def queues_of(device: torch.device) -> Queues | None:
    """Return the queues of `device`; None for the CPU."""
    return Queues(device) if device.type == "cuda" else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current GPU of this thread while the body runs, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
