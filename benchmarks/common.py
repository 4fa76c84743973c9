"""What the benchmarks share: their commands, starting ranks, reading memory, describing the machine, records."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "safetensors", "triton", "bitsandbytes", "deepspeed")
PACKAGES += ("lorashard",)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark that starts ranks is told; a benchmark adds what is its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print what a record says, measure nothing")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser


def add_step_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Let `parser` say where steps are run and what each trains on; `steps` of them if it is not told."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=steps, help="measured steps of each that takes turns")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a microbatch on each rank")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--lora-r", type=int, default=16)


def run_command(
    args: argparse.Namespace,
    name: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    make_table: Callable[[dict[str, Any]], str],
    run_rank: Callable[[str], None],
) -> None:
    """Do what `args` of `make_parser` ask for: a rank's job, the table of a record, or to measure.

    Args:
        name: of the record's file.
    """
    if args.job:
        run_rank(args.job)
    elif args.table:
        print(make_table(json.loads(args.table.read_text())))
    else:
        record = measure(args)
        write_record(record, args.out or RECORDS / f"{name}.json")
        print(make_table(record))


class Sampler:
    """Samples this process's memory in a thread and keeps the maximum of each field of /proc/self/status.

    RssAnon is what the process itself allocated. Resident memory as a whole also counts mapped files, such as
    checkpoints and the libraries of torch, which the ranks of a machine share.
    """

    FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmHWM")

    def __init__(self, interval_s: float = 0.002) -> None:
        self.peak_bytes = dict.fromkeys(self.FIELDS, 0)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for name, num_bytes in read_memory().items():
                self.peak_bytes[name] = max(self.peak_bytes[name], num_bytes)
            if self._stop.wait(self._interval_s):
                return


def read_memory() -> dict[str, int]:
    """Return this process's resident bytes by kind, and the largest that their sum ever was (VmHWM)."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith(Sampler.FIELDS))
    return {name: int(lines[name].split()[0]) * 1024 for name in Sampler.FIELDS}


def return_free_memory() -> None:
    """Make the C library give back what was freed, so that a model that was built and sharded is not counted."""
    ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Outcome:
    """What processes reported, by rank (None from one that did not), and in a line what ended them early, if it did."""

    reports: list[Any]
    error: str | None


def launch(script: Path, job: dict[str, Any], world_size: int, device: str, timeout_s: float = 3600) -> list[Any]:
    """Run `script --job FILE` on `world_size` fresh ranks and return what each handed to `report`.

    torchrun starts them, and ends all of them when one fails.
    """
    outcome = try_launch(script, job, world_size, device, timeout_s)
    if outcome.error:
        raise RuntimeError(f"{script.name}: {outcome.error}")
    return outcome.reports


def try_launch(script: Path, job: dict[str, Any], world_size: int, device: str, timeout_s: float) -> Outcome:
    """Do as `launch` does, but return what failed, and what had been reported by then.

    Args:
        world_size: 0 means a single process that no launcher started.
    """
    num_processes = max(world_size, 1)
    command = [sys.executable]
    if world_size:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        error = run_process([*command, str(script), "--job", str(path)], num_processes, device, timeout_s)
        files = [path.with_name(f"rank_{rank}.json") for rank in range(num_processes)]
        reports = [json.loads(file.read_text()) if file.exists() else None for file in files]
    if error is None and None in reports:
        error = f"rank {reports.index(None)} reported nothing"
    return Outcome(reports, error)


def run_process(
    command: list[str], num_processes: int, device: str, timeout_s: float, grace_s: float = 10
) -> str | None:
    """Run `command`, which computes in `num_processes`, and return what went wrong, in a line, or None.

    What outlives `timeout_s` is asked to end, so that a launcher ends its ranks, and killed `grace_s` later.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(count_threads(num_processes)), "PYTHONWARNINGS": "ignore"}
    if device == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=environment)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_s:.0f} s"
    finally:
        if process.poll() is None:
            _end(process, grace_s)
    return f"ended with exit code {code}" if code else None


def _end(process: subprocess.Popen, grace_s: float) -> None:
    root = psutil.Process(process.pid)
    started = {root, *root.children(recursive=True)}
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with suppress(psutil.NoSuchProcess):
        started.update(root.children(recursive=True))
    for one in started:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def count_threads(world_size: int) -> int:
    """Return the cores that each of `world_size` ranks on this machine has to itself."""
    return max(1, (os.cpu_count() or 1) // world_size)


def report(job_path: str, value: Any) -> None:
    """Hand `value` of this process to `launch`; a later one takes its place."""
    path = Path(job_path).with_name(f"rank_{os.environ.get('RANK', '0')}.json")
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(value))
    written.replace(path)


def summarize(values: Iterable[float]) -> dict[str, float]:
    """Return the median and the extremes."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}


def largest(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, for each key, the largest value over the ranks."""
    return {key: max(one[key] for one in found) for key in found[0]}


def describe_environment() -> dict[str, Any]:
    """Return what a record says of where it was made: commit, versions, hardware."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": None if changes is None else bool(changes),
        "versions": {"python": sys.version.split()[0]} | {name: _version(name) for name in PACKAGES},
        "hardware": {
            "cpu": _read_field("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "memory_bytes": int(_read_field("/proc/meminfo", "MemTotal").split()[0]) * 1024,
            "gpus": _list_gpus(),
        },
    }


def _git(*args: str) -> str | None:
    """Return what git says, or None where there is no git, or only a copy of the files without their history."""
    if shutil.which("git") is None:
        return None
    result = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    return None if result.returncode else result.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return "unknown 0"


def _list_gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write `record` where the README's tables are generated from; whoever reads meanwhile finds the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".partial")
    written.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    written.replace(path)
    print(f"wrote {path}", file=sys.stderr)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table whose first column is text and whose other columns are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def in_mib(num_bytes: float) -> str:
    """Return `num_bytes` as text, in MiB."""
    return f"{num_bytes / 2**20:,.0f}"
