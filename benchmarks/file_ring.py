"""Time how fast a file goes through the ring of pinned buffers that feeds a GPU, against dd. No GPU is needed.

    python benchmarks/file_ring.py                       measure, write a record, print its table
    python benchmarks/file_ring.py --table RECORD.json   print the table of a record

A device is played by queues whose copies are done at once, by the thread that gives them: into a unit's buffer
(`copied`; a GPU reads the host's memory by itself) or not at all (`read`: the host's own part, and what dd does, which
drops what it has read). Warm: the file is in the page cache. Cold: it was dropped from there before each run. All take
turns, and of each the fastest is shown too, since another process can only make a run slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from common import describe_environment, format_table, make_parser, run_command, summarize

from lorashard.engine import FileRange, HostCopies, OpenFile
from lorashard.engine.copies import RING_BUFFER_BYTES, RING_BUFFERS, RING_READERS
from lorashard.engine.queues import Queues

UNIT_BYTES = 416 * 2**20  # a layer of an 8B model in bf16
WAYS = {"dd": "`dd bs=8M`", "read": "ring, read", "copied": "ring, read and copied"}


class HostQueues(Queues):
    """Of a device whose memory is the host's."""

    def __init__(self, is_copying: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._is_copying = is_copying
        self._nothing = Mock()

    def make(self) -> Any:
        return self._nothing

    def on(self, queue: Any) -> Any:
        return torch.no_grad()

    def record(self, is_timed: bool = False) -> Any:
        return self._nothing

    def wait(self, event: Any) -> None:
        pass

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._is_copying:
            target.copy_(source)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--bytes", type=int, default=2 * 2**30, help="of the file")
    parser.add_argument("--rounds", type=int, default=20, help="runs of each way, warm; a quarter of them cold")
    parser.add_argument("--folder", type=Path, help="where the file is written")
    run_command(parser.parse_args(), f"file_ring-cpu-{os.cpu_count()}", measure, make_table, lambda job: None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Write a file, stream it each way in turn, and return the record."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = Path(folder, "file")
        write(file, args.bytes)
        ways = {
            "dd": partial(run_dd, file),
            "read": make_ring(file, args.bytes, is_copying=False),
            "copied": make_ring(file, args.bytes, is_copying=True),
        }
        warm = take_turns(ways, args.rounds)
        cold = take_turns(ways, args.rounds // 4, partial(drop, file))
    config = {"bytes": args.bytes, "rounds": args.rounds, "threads": torch.get_num_threads()}
    config |= {"readers": RING_READERS, "buffers": RING_BUFFERS, "buffer_bytes": RING_BUFFER_BYTES}
    return {"benchmark": "file_ring", **describe_environment(), "config": config, "warm_s": warm, "cold_s": cold}


def write(file: Path, num_bytes: int) -> None:
    """Write bytes that no file system stores as a hole or twice."""
    with file.open("wb") as stream:
        for begin in range(0, num_bytes, 2**26):
            stream.write(os.urandom(min(2**26, num_bytes - begin)))
        os.fsync(stream.fileno())


def drop(file: Path) -> None:
    """Drop a file from the page cache."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_dd(file: Path) -> None:
    subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=8M"], check=True, capture_output=True)


def make_ring(file: Path, num_bytes: int, is_copying: bool) -> Callable[[], None]:
    """Return what streams a file through a ring, a unit at a time into one buffer, as the engine does."""
    copies = HostCopies(torch.device("cpu"), HostQueues(is_copying))
    opened = OpenFile(file)
    slot = torch.zeros(min(UNIT_BYTES, num_bytes), dtype=torch.uint8)

    def stream() -> None:
        for begin in range(0, num_bytes, len(slot)):
            unit = FileRange(opened, begin, min(len(slot), num_bytes - begin))
            copies.start([(slot[: len(unit)], unit)]).wait()

    stream()
    if is_copying:
        last = num_bytes - (num_bytes % len(slot) or len(slot))
        assert bytes(slot[: num_bytes - last].numpy()) == read_end(file, last), "the ring brought other bytes"
    return stream


def read_end(file: Path, begin: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(begin)
        return stream.read()


def take_turns(
    ways: dict[str, Callable[[], None]], rounds: int, prepare: Callable[[], object] = lambda: None
) -> dict[str, dict[str, float]]:
    """Return the seconds of each way, after a round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            prepare()
            begin_s = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin_s)
    return {name: summarize(values[1:]) for name, values in seconds.items()}


def make_table(record: dict[str, Any]) -> str:
    """Return the markdown table of a record."""
    rows = []
    for cache in ("warm", "cold"):
        found = record[f"{cache}_s"]
        for name, title in WAYS.items():
            rates = [record["config"]["bytes"] / found[name][key] / 1e9 for key in ("median", "min")]
            shares = [found["dd"][key] / found[name][key] for key in ("median", "min")]
            rows.append(
                [f"{title}, {cache}", *(f"{rate:.2f}" for rate in rates), *(f"{share:.2f}" for share in shares)]
            )
    return format_table(["", "GB/s, median", "GB/s, fastest", "of dd, median", "of dd, fastest"], rows)


if __name__ == "__main__":
    main()
