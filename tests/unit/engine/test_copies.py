"""Copies from the host, with the queues of a device that is none: they do at once what they are given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.engine import CPU, GARBAGE_BYTE

from lorashard.engine import HostCopies
from lorashard.engine.copies import RING_BUFFERS, allocate_host
from lorashard.engine.queues import Queues

BUFFER_BYTES = 64


class InstantQueues(Queues):
    """Of a device whose memory is the host's; what `pinned` has given is pinned."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.pinned_addresses: set[int] = set()

    def make(self) -> object:
        return object()

    @contextlib.contextmanager
    def on(self, queue: object) -> Iterator[None]:
        yield

    def record(self, is_timed: bool = False) -> Mock:
        return Mock()

    def wait(self, event: Mock) -> None:
        pass

    def pinned(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self.pinned_addresses.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned_addresses

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.is_pinned(source)
        target.copy_(source)


@pytest.fixture
def copies(monkeypatch) -> HostCopies:
    monkeypatch.setattr("lorashard.engine.copies.RING_BUFFER_BYTES", BUFFER_BYTES)
    return HostCopies(CPU, InstantQueues())


def make_pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs that are together longer than the ring; none is as long as some buffers."""
    sizes = (BUFFER_BYTES - 1, (RING_BUFFERS + 2) * BUFFER_BYTES + 5, 3)
    sources = [torch.randint(0, GARBAGE_BYTE, (size,), dtype=torch.uint8) for size in sizes]
    return [(torch.full_like(source, GARBAGE_BYTE), source) for source in sources]


def test_a_ring_that_is_made_in_inference_mode_goes_on_outside(copies):
    """Catches buffers that are inference tensors: nothing could be copied from files any more, in either mode."""
    for is_inference in (True, False):
        pairs = make_pairs()
        with torch.inference_mode(is_inference):
            copies.start(pairs).wait()
        assert all(torch.equal(target, source) for target, source in pairs)


def find_flags(address: int) -> set[str]:
    """Return the kernel's flags of this process's mapping that holds `address`."""
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_found = begin <= address < end
        elif is_found and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no kernel that tells of its mappings")
def test_a_child_is_not_given_pinned_shards(monkeypatch):
    """Catches a data loader's worker whose fork copies the host's share of the base: seconds, and gigabytes each."""
    driver = SimpleNamespace(cudaHostRegister=lambda *args: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    pinned, _ = allocate_host(2**20, Queues(torch.device("cuda", 0)))
    pageable, _ = allocate_host(2**20, None)
    assert "dc" in find_flags(pinned.data_ptr())  # "do not copy on fork"
    assert "dc" not in find_flags(pageable.data_ptr())
