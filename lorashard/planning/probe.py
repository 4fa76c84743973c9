"""How fast this machine is: measured in a few seconds, and cached for the next run."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from ..engine import FileRange, HostCopies, OpenFile
from ..runtime import dist
from ..runtime.devices import read_cpu_name
from ..runtime.dtypes import name_of
from ..runtime.progress import told_work
from .hardware import Hardware, find_gpu_type, guess_gpu_type, usable_bytes

_SECONDS_EACH = 0.15
# The matmuls of a layer are smaller than the one that is measured.
_MATMUL_SHARE = 0.8
_CPU_KERNEL_S = 4e-6
# Of a core, and of a machine's memory, if nothing was measured.
_CPU_FLOPS_PER_S = 30e9
_CPU_BYTES_PER_S = 5e9
_MATMUL_WIDTH = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
# gloo between processes of one machine goes through sockets: several copies, on the cores that compute.
_LOOPBACK_SHARE = 0.1

_Values = dict[str, Any]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speeds:
    """What was measured, as in `Hardware`; None where there was nothing to measure with."""

    flops_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    file_bytes_per_s: float
    peer_bytes_per_s: float | None


def probe(device: torch.device, dtype: torch.dtype, cache: Path | None = None) -> Hardware:
    """Return this machine's speeds, from the cache or measured now: those of the slowest rank.

    Args:
        dtype: that the base computes in.
        cache: a JSON file; by default in the user's cache folder.

    Ranks: collective over all ranks.
    """
    cache = cache or _find_cache()
    key = _describe_machine(device, dtype)
    known: _Values | None = dist.broadcast_object(_read_cache(cache).get(key))
    if known is None:
        with told_work("measuring the speeds of this machine, once", dist.get_rank() == 0):
            measured = dist.gather_objects(asdict(measure_speeds(device, dtype)))
        known = {name: _least([one[name] for one in measured]) for name in measured[0]}
        if dist.get_rank() == 0:
            _write_cache(cache, key, known)
    return _to_hardware(Speeds(**known), device)


def recall_hardware(device: torch.device, dtype: torch.dtype, cache: Path | None = None) -> tuple[Hardware, str | None]:
    """Return this machine's speeds without measuring, and a note where they are not in the cache but guessed.

    Args:
        dtype, cache: as for `probe`.

    Ranks: local.
    """
    known = _read_cache(cache or _find_cache()).get(_describe_machine(device, dtype))
    if known is not None:
        return _to_hardware(Speeds(**known), device), None
    if device.type == "cpu":
        flops_per_s, speed = _CPU_FLOPS_PER_S * torch.get_num_threads(), _CPU_BYTES_PER_S
        guess = Speeds(flops_per_s, speed, speed, speed, None)
        return _to_hardware(guess, device), "the speeds are guessed: this machine was not measured yet"
    return _recognize(device), "the speeds come from the table of known GPUs: this machine was not measured yet"


def measure_free_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Return how much memory a rank may plan with: of its GPU, or its share of the machine's."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return usable_bytes(free_bytes + unused_bytes)
    return psutil.virtual_memory().available // ranks_per_node


def measure_speeds(device: torch.device, dtype: torch.dtype) -> Speeds:
    """Return how fast this rank's device, its memory and its links are now.

    Ranks: collective over all ranks.
    """
    width, num_bytes = _MATMUL_WIDTH[device.type], _COPY_BYTES[device.type]
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    matmul_s = _time(lambda: torch.mm(left, right), device)
    source, target = (torch.ones(num_bytes // 4, device=device) for _ in range(2))
    copy_s = _time(lambda: torch.mul(source, 2.0, out=target), device)
    memory_bytes_per_s = 2 * num_bytes / copy_s
    host_bytes_per_s = file_bytes_per_s = memory_bytes_per_s / 2
    if device.type == "cuda":
        pinned = torch.ones(num_bytes // 4, pin_memory=True)
        host_bytes_per_s = num_bytes / _time(lambda: target.copy_(pinned, non_blocking=True), device)
        file_bytes_per_s = num_bytes / time_file(target.view(torch.uint8), device)
    return Speeds(
        flops_per_s=2 * width**3 / matmul_s * _MATMUL_SHARE,
        memory_bytes_per_s=memory_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        file_bytes_per_s=file_bytes_per_s,
        peer_bytes_per_s=_measure_peers(device, num_bytes),
    )


def time_file(target: torch.Tensor, device: torch.device) -> float:
    """Return the seconds in which a file that is in memory fills `target` (uint8), as placement `file` reads a unit."""
    memory = os.memfd_create("lorashard-probe")
    try:
        os.posix_fallocate(memory, 0, target.numel())
        source = FileRange(OpenFile(Path(f"/proc/self/fd/{memory}")), 0, target.numel())
    finally:
        os.close(memory)
    copies = HostCopies(device)
    return _time(lambda: copies.start([(target, source)]).wait(), device)


def _measure_peers(device: torch.device, num_bytes: int) -> float | None:
    """Return the bytes a second that a rank receives in a gather inside its node, or in copies between two GPUs where
    there is one process.

    Ranks: collective over all ranks.
    """
    world_size = dist.get_world_size()
    size = dist.find_node_size() or world_size
    if size > 1:
        # The default group exists already.
        group = dist.ShardGroup(dist.get_rank(), size) if size == world_size else dist.ShardGroup.of_size(size)
        shard = torch.ones(num_bytes // 4 // size, dtype=torch.uint8, device=device)
        gathered = torch.empty(shard.numel() * size, dtype=torch.uint8, device=device)
        # Each rank has to gather equally often.
        gather_s = _time(lambda: group.all_gather(gathered, shard).wait(), device, num_times=5)
        return shard.numel() * (size - 1) / gather_s
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", ((device.index or 0) + 1) % torch.cuda.device_count())
        here = torch.ones(num_bytes // 4, device=device)
        there = torch.ones(num_bytes // 4, device=other)
        return num_bytes / _time(lambda: here.copy_(there), device)
    return None


def _time(run: Callable[[], object], device: torch.device, num_times: int | None = None) -> float:
    """Return the seconds that `run` takes, the fastest of several."""
    best_s = float("inf")
    begin_s = time.perf_counter()
    count = 0
    # The first run warms up.
    while count < 3 or (count < num_times if num_times else time.perf_counter() - begin_s < _SECONDS_EACH):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if count > 0:
            best_s = min(best_s, time.perf_counter() - start_s)
        count += 1
    return best_s


def _to_hardware(speeds: Speeds, device: torch.device) -> Hardware:
    measured = {name: value for name, value in asdict(speeds).items() if value is not None}
    if device.type == "cuda":
        return replace(_recognize(device), **measured)
    peer_bytes_per_s = speeds.peer_bytes_per_s or speeds.memory_bytes_per_s * _LOOPBACK_SHARE
    return Hardware(
        name="CPU rank",
        device_type="cpu",
        memory_bytes=psutil.virtual_memory().total,
        network_bytes_per_s=peer_bytes_per_s,
        kernel_s=_CPU_KERNEL_S,
        is_overlapping=False,
        **measured | {"peer_bytes_per_s": peer_bytes_per_s},
    )


def _recognize(device: torch.device) -> Hardware:
    """Return the known GPU that a device is nearest to, under the device's own name and with its memory."""
    properties = torch.cuda.get_device_properties(device)
    known = find_gpu_type(guess_gpu_type(properties.name, properties.total_memory))
    return replace(known, name=properties.name, memory_bytes=properties.total_memory)


def _find_cache() -> Path:
    return Path.home() / ".cache" / "lorashard" / "speeds.json"


def _describe_machine(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = f"CUDA {torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]
    else:
        name, driver = read_cpu_name(), f"{torch.get_num_threads()} threads"
    ranks = f"{dist.get_world_size()} ranks"
    return ", ".join((name, driver, f"torch {torch.__version__}", name_of(dtype), ranks))


def _least(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return min(numbers) if numbers else None


def _read_cache(path: Path) -> dict[str, _Values]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _logger.warning("%s cannot be read (%s): the machine is measured again", path, error)
        return {}


def _write_cache(path: Path, key: str, speeds: _Values) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_read_cache(path) | {key: speeds}, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        _logger.warning("%s cannot be written (%s): the next run measures the machine again", path, error)
