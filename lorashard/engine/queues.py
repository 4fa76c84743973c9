"""A device's queues of work, and the events that order them: the one place in the engine that calls torch.cuda."""

from __future__ import annotations

import contextlib
import resource
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

    @classmethod
    def of(cls, device: torch.device) -> Queues | None:
        """Return the queues of `device`; None for the CPU."""
        return cls(device) if device.type == "cuda" else None

    def make(self) -> torch.cuda.Stream:
        """Return a new queue, whose work goes before what waits in the computation's."""
        return torch.cuda.Stream(self._device, priority=-1)

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

    def pin(self, memory: torch.Tensor) -> str | None:
        """Make uint8 host memory such memory, where it is; return why the system refused, if it did."""
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 1))  # 1: for all devices
        if status == 0:
            return None
        # CUDA remembers the refusal, and torch would raise it at the next kernel, whose fault it is not.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        words = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"
        return (
            f"the system refused to pin {memory.numel() / 2**20:.0f} MiB of host memory (CUDA error {status}; the "
            f"limit on locked memory, `ulimit -l`, is {words})"
        )

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`, while the memory is still mapped."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give the current queue a copy from pinned memory."""
        target.copy_(source, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current GPU of this thread while the body runs, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
