"""The side stream that gathers run on, beside the stream that computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from ..dist import Work


class SideStream:
    """Runs collectives beside the computation, and measures how long the computation waited for them.

    On CUDA: a stream of its own, ordered against the compute stream by events alone. On CPU, where the collective
    runs in a thread of the process group, there is no stream and waiting blocks the caller.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._waited_s = 0.0
        self._timings: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that happens when the device has done all that the compute stream was given so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

    @contextlib.contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Run the body on the side stream, behind `event`.

        A slot is reused through this: the event says that its last reader is done, so the gather cannot overtake it.
        """
        if self._stream is None:
            yield
            return
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, work: Work) -> None:
        """Make the computation wait for `work`; the host goes on where the device can."""
        if self._stream is None:
            begin_s = time.perf_counter()
            work.wait()
            self._waited_s += time.perf_counter() - begin_s
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(self._device))
        work.wait()
        end.record(torch.cuda.current_stream(self._device))
        self._timings.append((begin, end))
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
