"""Copies from the host, with the queues of a device that is none."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.engine import CPU, GARBAGE_BYTE
from helpers.lazy_queues import LazyQueues

from lorashard.engine import FileRange, HostBytes, HostCopies, OpenFile
from lorashard.engine.copies import RING_BUFFERS, allocate_host
from lorashard.engine.queues import Queues
from lorashard.errors import CheckpointError

BUFFER_BYTES = 64


@pytest.fixture
def copies(monkeypatch) -> HostCopies:
    monkeypatch.setattr("lorashard.engine.copies.RING_BUFFER_BYTES", BUFFER_BYTES)
    return HostCopies(CPU, LazyQueues())


def make_file_pairs(file: Path) -> list[tuple[torch.Tensor, HostBytes]]:
    """Return the same from ranges of a file, with what a cache keeps in memory between them."""
    pairs = make_pairs()
    file.write_bytes(b"head" + b"".join(bytes(source.tolist()) for _, source in pairs))
    opened = OpenFile(file)
    begins = [4, 4 + len(pairs[0][1]), 4 + len(pairs[0][1]) + len(pairs[1][1])]
    ranges = [FileRange(opened, begin, len(source)) for begin, (_, source) in zip(begins, pairs, strict=True)]
    return [(target, found) for (target, _), found in zip(pairs, ranges, strict=True)] + make_pairs()[:1]


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


def read(source: HostBytes) -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        return source
    content = source.file.path.read_bytes()[source.begin_byte : source.begin_byte + source.num_bytes]
    return torch.tensor(list(content), dtype=torch.uint8)


def test_files_are_read_into_the_ring(copies, tmp_path):
    """Catches parts of a file in another order or at another place, and a file that is replaced under a run."""
    pairs = make_file_pairs(tmp_path / "file")
    expected = [read(source) for _, source in pairs]
    (tmp_path / "other").write_bytes(bytes(2**12))
    (tmp_path / "other").rename(tmp_path / "file")
    for _ in range(3):
        copies.start(pairs).wait()
        assert all(torch.equal(target, wanted) for (target, _), wanted in zip(pairs, expected, strict=True))
        for target, _ in pairs:
            target.fill_(GARBAGE_BYTE)
    assert isinstance(pairs[0][1], FileRange)
    HostCopies(CPU).start(pairs).wait()
    assert all(torch.equal(target, wanted) for (target, _), wanted in zip(pairs, expected, strict=True))


def test_a_shrunk_file_is_an_error_of_who_waits(copies, tmp_path):
    """Catches a run that hangs, or that computes with old bytes, where a thread could not read; and a ring it broke."""
    pairs = make_file_pairs(tmp_path / "file")
    num_bytes = (tmp_path / "file").stat().st_size
    os.truncate(tmp_path / "file", 100)
    with pytest.raises(CheckpointError) as caught:
        copies.start(pairs).wait()
    error = caught.value
    assert (error.where, error.expected, error.found) == (tmp_path / "file", f"{num_bytes} bytes", "100 bytes")
    others = make_pairs()
    copies.start(others).wait()
    assert all(torch.equal(target, source) for target, source in others)


class GatedRange(FileRange):
    """A range that is read only when its gate is open."""

    gate = threading.Event()
    is_read = threading.Event()

    def __getitem__(self, part: slice) -> FileRange:
        return self

    def read_into(self, out: torch.Tensor) -> None:
        self.gate.wait(60)
        self.is_read.set()


def test_an_error_waits_for_the_other_readers(copies, monkeypatch, tmp_path):
    """Catches a reader that still writes into a buffer which the next unit has been given after an error."""
    pairs = make_file_pairs(tmp_path / "file")
    os.truncate(tmp_path / "file", 0)
    target, source = pairs[0]
    assert isinstance(source, FileRange)
    gated = GatedRange(source.file, 0, BUFFER_BYTES)

    def wait_for(readers: list[Future]) -> None:
        gated.gate.set()
        wait(readers)

    monkeypatch.setattr("lorashard.engine.copies.wait", wait_for)
    with pytest.raises(CheckpointError):
        copies.start([(target, source), (torch.empty(BUFFER_BYTES), gated)]).wait()
    is_read = gated.is_read.is_set()
    gated.gate.set()
    assert is_read


def test_a_buffer_is_filled_again_only_when_it_was_read(monkeypatch):
    """Catches bytes of another piece on a device that lags behind: its copies run when their event is waited for."""
    monkeypatch.setattr("lorashard.engine.copies.RING_BUFFER_BYTES", BUFFER_BYTES)
    queues = LazyQueues()
    pairs = make_pairs()
    HostCopies(CPU, queues).start(pairs).wait()
    assert queues.races == []
    assert all(torch.equal(target, source) for target, source in pairs)


def test_threads_and_files_end_with_the_copies(monkeypatch, tmp_path):
    """Catches five threads and an open file for each model that a process ever had."""
    monkeypatch.setattr("lorashard.engine.copies.RING_BUFFER_BYTES", BUFFER_BYTES)
    copies = HostCopies(CPU, LazyQueues())
    before = threading.enumerate()
    pairs = make_file_pairs(tmp_path / "file")
    copies.start(pairs).wait()
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert started and str(tmp_path / "file") in find_open_files()
    del copies, pairs
    gc.collect()
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)
    assert str(tmp_path / "file") not in find_open_files()


def find_open_files() -> set[str]:
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


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
    assert {"dc", "hg"} <= find_flags(pinned.data_ptr())  # "do not copy on fork", and huge pages
    assert "dc" not in find_flags(pageable.data_ptr())


def test_a_queue_goes_before_the_computation(monkeypatch):
    """Catches copies and gathers that wait behind matrix products which were given to the device before."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: (args, options))
    assert Queues(device).make() == ((device,), {"priority": -1})
