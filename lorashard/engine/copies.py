"""Copies from host memory to the device, beside the computation; and host memory that such copies are fast from."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import ConfigError
from ..runtime.dist import Work
from .file_range import FileRange, HostBytes
from .queues import Event, Queues

RING_READERS = 4
RING_BUFFERS = 2 * RING_READERS
RING_BUFFER_BYTES = 4 * 2**20  # all of them fit into the cache of a server's CPU, from which a device reads too

Pairs = Sequence[tuple[torch.Tensor, HostBytes]]

_logger = logging.getLogger(__name__)


class HostCopies:
    """Starts copies of host memory to one device.

    Pinned memory is copied by the device itself. Pageable memory and files go through a ring of pinned buffers, which
    threads fill, so that the thread that computes is not held up. On a CPU a copy is done when `start` returns.

    Memory: on CUDA, RING_BUFFERS * RING_BUFFER_BYTES of pinned memory once there is something to copy.
    """

    def __init__(self, device: torch.device, queues: Queues | None = None) -> None:
        """Prepare to copy.

        Args:
            queues: what runs on `device`, if not its own.
        """
        self._queues = queues or Queues.of(device)
        self._ring: _PinnedRing | None = None
        self._has_warned = False

    @property
    def are_needed(self) -> bool:
        """Whether the device cannot compute with host memory where it is."""
        return self._queues is not None

    def prepare(self) -> None:
        """Make the ring, before anything else takes what the system lets a process pin.

        Raises:
            ConfigError: not even that may be pinned.
        """
        if self._queues is None or self._ring is not None:
            return
        try:
            self._ring = _PinnedRing(self._queues)
        except RuntimeError as error:
            raise ConfigError(
                f"the system refuses to pin {RING_BUFFERS * RING_BUFFER_BYTES / 2**20:.0f} MiB of host memory "
                f"({str(error).splitlines()[0]})",
                fix="raise the limit on locked memory (`ulimit -l`), or choose another placement",
            ) from error

    def allocate(self, owner: object, num_bytes: int) -> torch.Tensor:
        """Return host memory as `allocate_host` does, unpinned again when `owner` goes; warn once if it is pageable.

        Ranks: local.
        Memory: `num_bytes` on the host, until nobody has the tensor.
        """
        self.prepare()
        tensor, refusal = allocate_host(num_bytes, self._queues)
        if refusal is not None:
            if not self._has_warned:
                _logger.warning("%s: units are copied through a small pinned buffer instead, which is slower", refusal)
            self._has_warned = True
        elif self._queues is not None and num_bytes:
            # Holding the tensor until then keeps the memory mapped until it is unpinned.
            weakref.finalize(owner, self._queues.unpin, tensor).atexit = False
        return tensor

    def start(self, pairs: Pairs) -> Work:
        """Start copying each (target, source) of uint8, behind what the current stream was given so far.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read; raised by `wait` where a thread finds it.

        Ranks: local.
        Memory: none beside the ring.
        """
        if self._queues is None:
            for target, source in pairs:
                if isinstance(source, FileRange):
                    source.read_into(target)
                else:
                    target.copy_(source)
            return _DONE
        in_memory = [(target, source) for target, source in pairs if isinstance(source, torch.Tensor)]
        if len(in_memory) == len(pairs) and all(self._queues.is_pinned(source) for _, source in in_memory):
            for target, source in in_memory:
                self._queues.copy(target, source)
            return _Copies(partial(self._queues.wait, self._queues.record()))
        self.prepare()
        assert self._ring is not None
        return self._ring.start(pairs)

    def finish(self) -> None:
        """Hold up the host until every copy that the current stream has waited for is done: memory may be written.

        Ranks: local.
        """
        if self._queues is not None:
            self._queues.record().synchronize()


@dataclass(frozen=True)
class _Copies:
    """Copies that were started; `wait` holds up the current queue, or the host, until they are done."""

    wait: Callable[[], object]


_DONE = _Copies(lambda: None)


class _PinnedRing:
    """Readers, each with two buffers: it fills one while the device empties the other.

    Which reader takes which piece is left to chance: pieces go to places of their own, so the bytes are the same.
    """

    @torch.inference_mode(False)  # the thread could not write into buffers that were made in that mode
    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._queue = queues.make()
        self._buffers = [queues.pinned(RING_BUFFER_BYTES) for _ in range(RING_BUFFERS)]
        self._events: list[Event | None] = [None] * RING_BUFFERS
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lorashard-copies")
        self._readers = ThreadPoolExecutor(RING_READERS, thread_name_prefix="lorashard-reads")

    def start(self, pairs: Pairs) -> Work:
        last = self._thread.submit(self._copy, pairs, self._queues.record())
        return _Copies(lambda: self._queues.wait(last.result()))  # when the thread has started the last copy

    def _copy(self, pairs: Pairs, ready: Event) -> Event:
        with self._queues.on(self._queue):
            self._queues.wait(ready)
            pieces = iter(list(_cut(pairs)))
            readers = [self._readers.submit(self._send, number, pieces) for number in range(RING_READERS)]
            wait(readers)  # all, after an error too: the next to fill these buffers must be alone
            for reader in readers:
                reader.result()
            return self._queues.record()

    def _send(self, reader: int, pieces: Iterator[tuple[torch.Tensor, HostBytes]]) -> None:
        with self._queues.on(self._queue):
            for turn, (target, source) in enumerate(pieces):  # a list's iterator gives each thread another
                index = 2 * reader + turn % 2
                event = self._events[index]
                if event is not None:
                    event.synchronize()  # the device has read what the buffer held
                buffer = self._buffers[index][: len(source)]
                _read(buffer, source)
                self._queues.copy(target, buffer)
                self._events[index] = self._queues.record()


def _cut(pairs: Pairs) -> Iterator[tuple[torch.Tensor, HostBytes]]:
    """Yield the pairs in pieces, none longer than a buffer."""
    for target, source in pairs:
        for begin in range(0, len(source), RING_BUFFER_BYTES):
            end = begin + RING_BUFFER_BYTES
            yield target[begin:end], source[begin:end]


def _read(buffer: torch.Tensor, source: HostBytes) -> None:
    if isinstance(source, FileRange):
        source.read_into(buffer)
    else:  # torch's copy would start as many threads as there are cores, beside each reader
        ctypes.memmove(buffer.data_ptr(), source.data_ptr(), len(source))


def allocate_host(num_bytes: int, queues: Queues | None) -> tuple[torch.Tensor, str | None]:
    """Return uint8 host memory of exactly `num_bytes`, pinned where there are `queues`, or why it could not be.

    torch's own pinned allocator rounds up to a power of two, which could double a base.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    if queues is None or num_bytes == 0:
        return tensor, None
    # The kernel copies pages that a device may write to when the process forks, and a data loader's worker forks.
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # pinning then faults in 2 MiB at a time instead of 4 KiB
    return tensor, queues.pin(tensor)
