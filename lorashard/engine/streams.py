"""The side stream that gathers run on, beside the stream that computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from ..runtime.dist import Work
from .queues import Event, Queues


class SideStream:
    """Runs collectives beside the computation, and measures how long the computation waited for them.

    On CUDA: a stream of its own, ordered against the compute stream by events alone. On CPU, where the collective
    runs in a thread of the process group, there is no stream and waiting blocks the caller.
    """

    def __init__(self, device: torch.device, queues: Queues | None = None) -> None:
        """Make the stream.

        Args:
            queues: what runs on `device`, if not its own.
        """
        self._queues = queues or Queues.of(device)
        self._queue = self._queues.make() if self._queues is not None else None
        self._waited_s = 0.0
        self._timings: list[tuple[Event, Event]] = []

    def mark(self) -> Event | None:
        """Return an event that happens when the device has done all that the compute stream was given so far."""
        return self._queues.record() if self._queues is not None else None

    def after(self, event: Event | None) -> AbstractContextManager[None]:
        """Run the body on the side stream, behind `event`.

        A slot is reused through this: the event says that its last reader is done, so the gather cannot overtake it.
        """
        if self._queues is None or self._queue is None:
            return contextlib.nullcontext()
        return self._behind(self._queues, self._queue, event)

    @contextlib.contextmanager
    def _behind(self, queues: Queues, queue: torch.cuda.Stream, event: Event | None) -> Iterator[None]:
        with queues.on(queue):
            if event is not None:
                queues.wait(event)
            yield

    def wait(self, work: Work) -> None:
        """Make the computation wait for `work`; the host continues where the device can."""
        if self._queues is None:
            begin_s = time.perf_counter()
            work.wait()
            self._waited_s += time.perf_counter() - begin_s
            return
        begin = self._queues.record(is_timed=True)
        work.wait()
        self._timings.append((begin, self._queues.record(is_timed=True)))
        if len(self._timings) >= 1024:
            self._settle(len(self._timings) // 2)

    def waited_s(self) -> float:
        """Return the seconds that the computation has waited for collectives so far.

        Ranks: local. On CUDA it waits for the waits that are still to happen.
        """
        self._settle(len(self._timings))
        return self._waited_s

    def _settle(self, count: int) -> None:
        for begin, end in self._timings[:count]:
            end.synchronize()
            self._waited_s += begin.elapsed_time(end) / 1000
        del self._timings[:count]
