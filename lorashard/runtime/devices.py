"""How many ranks a run has, and on what: asked for, given by a launcher, or found on the machine, without torch."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..config.base_options import BaseOptions, RankOptions
from ..errors import ConfigError

# Names the runs of `lorashard.launch.elastic`, so that a rank knows its launcher.
RUN_ID_PREFIX = "lorashard-"

# With more, the ranks wait for one another and for memory from their start on. One for each core is fastest.
_MAX_RANKS_PER_CORE = 8

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Torch 2.9 and later read the first where the other two, its older names, are not set.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True)
class Launcher:
    """What a launcher's environment says of this process."""

    rank: int
    world_size: int
    local_world_size: int
    is_lorashard: bool


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that this process may use; `problem` says why a driver that is there shows none."""

    count: int
    problem: str | None = None


@dataclass(frozen=True)
class RankChoice:
    """How many ranks to start; `gpu_ids` where some of the visible GPUs were picked; `note` is for the user."""

    num_ranks: int
    device_type: str
    gpu_ids: tuple[int, ...] | None = None
    note: str | None = None


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return what torchrun, `accelerate launch` or lorashard's own launcher told this process, or None.

    Raises:
        ConfigError: A part of the variables is missing or they are not numbers.
    """
    found = {name: environ[name] for name in _LAUNCHER_VARIABLES if name in environ}
    if "RANK" not in found or "WORLD_SIZE" not in found:
        # `accelerate launch` says nothing of ranks when it starts a single process.
        is_accelerate = "ACCELERATE_MIXED_PRECISION" in environ
        return Launcher(0, 1, 1, is_lorashard=False) if is_accelerate else None
    try:
        numbers = {name: int(value) for name, value in found.items()}
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", numbers["WORLD_SIZE"]))
    except ValueError:
        raise ConfigError(expected="whole numbers in the launcher's environment", found=found) from None
    if "LOCAL_RANK" not in found:
        if numbers["WORLD_SIZE"] == 1:  # some clusters set both for a job that is one process
            return None
        raise ConfigError(
            option="LOCAL_RANK",
            expected="RANK, WORLD_SIZE and LOCAL_RANK in the environment, as torchrun sets them, or none of them",
            found=f"WORLD_SIZE={found['WORLD_SIZE']} without it",
        )
    is_lorashard = environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID_PREFIX)
    return Launcher(numbers["RANK"], numbers["WORLD_SIZE"], local_world_size, is_lorashard)


def check_launcher(options: RankOptions, launcher: Launcher) -> None:
    """Refuse a number of ranks that is not the launcher's.

    Raises:
        ConfigError: `gpus` or `cpu` asks for something else than the launcher started.
    """
    if launcher.is_lorashard:
        return
    if isinstance(options.gpus, list):
        raise ConfigError(
            "ids cannot be chosen inside torchrun or accelerate launch, whose ranks have theirs",
            option="gpus",
            fix="set CUDA_VISIBLE_DEVICES before it, or give a count",
        )
    for name, asked in (("gpus", options.gpus), ("cpu", options.cpu)):
        if asked is not None and asked != launcher.local_world_size:
            raise ConfigError(
                option=name,
                expected=f"{launcher.local_world_size} ranks, as torchrun or accelerate launch has started here",
                found=asked,
                fix=f"leave out --{name}, or give it the same number",
            )


def choose_ranks(options: RankOptions, gpus: VisibleGpus) -> RankChoice:
    """Return the ranks to start on this machine: those asked for, else all GPUs, else one CPU rank.

    Raises:
        ConfigError: GPUs are asked for that are not there, or far more CPU ranks than there are cores.
    """
    if options.cpu is not None:
        most = _MAX_RANKS_PER_CORE * count_cores()
        if options.cpu > most:
            expected = f"at most {most}, {_MAX_RANKS_PER_CORE} for each core that this process may use"
            raise ConfigError(option="cpu", expected=expected, found=options.cpu)
        return RankChoice(options.cpu, "cpu")
    if options.gpus is None:
        if gpus.count:
            return RankChoice(gpus.count, "cuda")
        reason = gpus.problem or "no GPU was found"
        return RankChoice(1, "cpu", note=f"{reason}: computing with one CPU rank (--cpu N chooses how many)")
    if not gpus.count:
        reason = gpus.problem or "this machine has no GPU"
        raise ConfigError(option="gpus", expected="GPUs", found=reason, fix="give --cpu N to train with N CPU ranks")
    if isinstance(options.gpus, int):
        if options.gpus > gpus.count:
            raise ConfigError(option="gpus", expected=f"at most {gpus.count}, the visible GPUs", found=options.gpus)
        return RankChoice(options.gpus, "cuda")
    if max(options.gpus) >= gpus.count:
        raise ConfigError(
            option="gpus",
            expected=f"ids of the {gpus.count} visible GPUs, which are numbered from 0",
            found=",".join(map(str, options.gpus)),
        )
    return RankChoice(len(options.gpus), "cuda", tuple(options.gpus))


def check_device(options: BaseOptions, device_type: str) -> None:
    """Refuse a dtype that the device cannot train in.

    Raises:
        ConfigError: float16 on the CPU.
    """
    if options.dtype == "float16" and device_type == "cpu":
        raise ConfigError(
            "its loss scaling needs a GPU", option="dtype", expected="bfloat16 or float32 on CPU ranks", found="float16"
        )


def build_environment(choice: RankChoice, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the ranks need beside the launcher's own."""
    # torchrun gives each rank one thread, which leaves most cores idle; torch's own default gives each rank all.
    changes = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if "OMP_NUM_THREADS" not in environ:
        changes["OMP_NUM_THREADS"] = str(max(1, count_cores() // choice.num_ranks))
    if choice.device_type == "cuda":
        changes |= _choose_for_gpus(environ)
    if choice.device_type == "cpu":
        # Where it is not told, accelerate sees one process on a machine without GPUs, and each rank trains alone.
        changes |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    elif choice.gpu_ids is not None:
        visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        names = [visible[gpu_id] if visible else str(gpu_id) for gpu_id in choice.gpu_ids]
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return changes


def _choose_for_gpus(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks on GPUs are told, but for what somebody has decided."""
    changes = {}
    if "NCCL_LAUNCH_ORDER_IMPLICIT" not in environ:
        # The base's gathers and the adapter's all-reduce are two communicators in flight: from 2.26 on NCCL then keeps
        # them in the order in which each rank has launched them, which is the same on all.
        changes["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    if not any(name in environ for name in _ALLOCATOR_VARIABLES):
        # Batches of many lengths fragment the cache, and the plan fills memory to its edge.
        changes["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return changes


def count_cores() -> int:
    """Return how many physical cores this process may keep busy: on the machine, by affinity, by its container."""
    limits = [psutil.cpu_count(logical=False), os.cpu_count()]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        microseconds, period = quota.read_text().split()
        if microseconds != "max":
            limits.append(int(microseconds) // int(period))
    return max(1, min(limit for limit in limits if limit is not None))


def read_cpu_name() -> str:
    """Return the CPU's model, or its architecture where the system does not name the model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None) or platform.processor() or platform.machine()


def find_gpus() -> VisibleGpus:
    """Count GPUs as torch would, mostly without it.

    The CUDA driver respects CUDA_VISIBLE_DEVICES; AMD's has no such door, so torch is asked.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _ask_torch() if Path("/dev/kfd").exists() else VisibleGpus(0)
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status == 0:
        return VisibleGpus(count.value)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        return VisibleGpus(0)
    return VisibleGpus(0, f"the CUDA driver cannot start (error {status}; does nvidia-smi work?)")


def _ask_torch() -> VisibleGpus:
    import torch

    return VisibleGpus(torch.cuda.device_count() if torch.cuda.is_available() else 0)
