"""`lorashard env`: what a bug report should say about this machine, without secrets.

Nothing here imports torch at the top: the report must be complete where torch cannot be imported.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from .. import __version__
from ..runs.root import find_existing
from ..runtime.devices import count_cores, find_gpus, read_cpu_name
from ..runtime.disk import show_bytes

if sys.platform != "win32":
    import resource

# Those that change how a run computes, required by lorashard or not.
_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "trl",
    "datasets",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "triton",
    "flash-attn",
    "kernels",
    "liger-kernel",
    "bitsandbytes",
    "deepspeed",
    "gradio",
)
_VARIABLE_PREFIXES = (
    "ACCELERATE_",
    "CUDA_",
    "FSDP_",
    "GLOO_",
    "HF_",
    "HIP_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "ROCR_",
    "TORCHELASTIC_",
    "TORCH_",
    "TRANSFORMERS_",
)
_VARIABLES = (
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "LD_LIBRARY_PATH",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MKL_NUM_THREADS",
    "NO_PROXY",
    "RANK",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_ON_NODE",
    "SLURM_JOB_ID",
    "SLURM_LOCALID",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "TMPDIR",
    "TOKENIZERS_PARALLELISM",
    "WORLD_SIZE",
)
_SECRET_NAME = re.compile("TOKEN(?!IZERS)|KEY|SECRET|PASSW|CREDENTIAL|AUTH|PAT$", re.IGNORECASE)
# What precedes the host of an address, with or without `https://`; its query; and tokens anywhere.
_SECRET_VALUE = re.compile(r"(?:(?<=//)|(?<!\S))(?!\w*://)\S+(?=@)|(?<=\?)\S+|\b(?:hf|ghp|gho|sk)[_-]\w{8,}")
_COMMAND_TIMEOUT_S = 10

Section = dict[str, Any]


def describe_environment() -> dict[str, Section]:
    """Return every section of the report; sizes are in bytes, under names that end in `_bytes`.

    A value that cannot be read is replaced by the reason.
    """
    sections: dict[str, Callable[[], Section]] = {
        "lorashard": _describe_lorashard,
        "packages": _describe_packages,
        "system": _describe_system,
        "torch": _describe_torch,
        "GPUs": _describe_gpus,
        "memory and limits": _describe_limits,
        "disk": _describe_disks,
        "variables": lambda: describe_variables(os.environ),
        "accelerate": _describe_accelerate,
    }
    return {title: _try(describe, lambda reason: {"unknown": reason}) for title, describe in sections.items()}


def render_environment(sections: Mapping[str, Section]) -> str:
    """Return the report as a block that can be pasted into an issue."""
    lines = ["```text"]
    for title, section in sections.items():
        lines.append(f"[{title}]" if section else f"[{title}] none")
        width = max(map(len, section), default=0)
        for name, value in section.items():
            first, *more = _show(name, value).split("\n")
            lines += [f"{name:{width}}  {first}".rstrip(), *(f"    {line}" for line in more)]
    return "\n".join([*lines, "```"])


def describe_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change a run, without secrets: of a token, only that it is set."""
    shown = {}
    for name, value in sorted(environ.items()):
        if _SECRET_NAME.search(name):
            if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
                shown[name] = "set, not shown" if value else "empty"
        elif name.startswith(_VARIABLE_PREFIXES) or name.upper() in _VARIABLES:
            shown[name] = hide_secrets(value)
    return shown


def hide_secrets(text: str) -> str:
    """Return `text` without passwords and tokens, with ~ for the user's home."""
    home = str(Path.home())
    if home != "/":
        text = re.sub(rf"{re.escape(home)}(?=/|:|$|\s)", "~", text)
    return _SECRET_VALUE.sub("***", text)


def read_memory_limit(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the least memory in bytes that a container or a job scheduler allows this process, or None for no limit.

    Args:
        root: where cgroups (version 2 or 1) are mounted.
        membership: the file that lists the cgroups of this process.
    """
    return min((limit for _, limit in _find_memory_groups(root, membership)), default=None)


def read_available_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the host memory that this process may still allocate: what is free, or what its container has left."""
    left = [psutil.virtual_memory().available]
    for folder, limit in _find_memory_groups(root, membership):
        name = "memory.current" if (folder / "memory.current").is_file() else "memory.usage_in_bytes"
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # reclaimed when memory is short
        left.append(limit - int((folder / name).read_text()) + cached)
    return max(0, min(left))


def _find_memory_groups(root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the limit of each cgroup around this process that has one."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # Inside a container, its own group may be mounted at the top, under another name than outside.
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            file = folder / name
            text = file.read_text().strip() if folder.is_relative_to(top) and file.is_file() else "max"
            if text != "max" and int(text) < psutil.virtual_memory().total:
                yield folder, int(text)


def read_driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver can run, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def find_accelerate_config() -> Path | None:
    """Return the file of `accelerate config` that `accelerate launch` reads by default, if it exists."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "huggingface")
    names = (Path(home, "accelerate", f"default_config.{suffix}").expanduser() for suffix in ("yaml", "json"))
    return next((path for path in names if path.is_file()), None)


def read_accelerate_config() -> dict[str, Any]:
    """Return what `accelerate config` saved; empty where it never ran."""
    import yaml

    file = find_accelerate_config()
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {} if file else {}


def _try(read: Callable[[], Any], explain: Callable[[str], Any] = lambda reason: f"unknown ({reason})") -> Any:
    # On a broken machine anything may fail, and the report is for what does.
    try:
        return read()
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        return explain(hide_secrets(f"{type(error).__name__}: {first_line}"))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    return done.stdout.strip()


def _describe_lorashard() -> Section:
    return {"version": __version__, "commit": _try(_read_commit), "python": sys.version.split()[0]}


def _read_commit() -> str:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "not from a checkout"
    commit = _run("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _run("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if changed else commit


def _describe_packages() -> Section:
    def find(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {name: _try(partial(find, name)) for name in _PACKAGES}


def _describe_system() -> Section:
    return {
        "OS": _try(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "CPU": _try(read_cpu_name),
        "cores": {
            "usable": _try(count_cores),
            "physical": psutil.cpu_count(logical=False),
            "logical": psutil.cpu_count(),
        },
    }


def _describe_torch() -> Section:
    import torch

    def read_nccl() -> str:
        return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "not in this build"

    return {
        "build": torch.__version__,
        "CUDA runtime": torch.version.cuda or "none: a CPU build",
        "NCCL": _try(read_nccl),
        "cuDNN": _try(lambda: torch.backends.cudnn.version() or "not in this build"),
        "sees GPUs": _try(torch.cuda.device_count),
        "bfloat16": _try(_describe_bfloat16),
        "architectures": _try(lambda: " ".join(torch.cuda.get_arch_list()) or "none"),
    } | ({"ROCm": torch.version.hip} if torch.version.hip else {})


def _describe_bfloat16() -> str:
    """Return whether a run's device computes in bfloat16, which decides what `dtype: auto` is."""
    import torch

    from ..runtime.dtypes import explain_slow_bfloat16

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return explain_slow_bfloat16(device) or f"computed by the {'GPU' if device.type == 'cuda' else 'CPU'}"


def _describe_gpus() -> Section:
    gpus = find_gpus()
    if not gpus.count:
        return {"visible": gpus.problem or "none"}
    newest = read_driver_cuda()
    described: Section = {
        "visible": gpus.count,
        "driver": _try(_read_driver),
        "driver's CUDA": "unknown" if newest is None else f"{newest[0]}.{newest[1]}",
    }
    described |= {f"GPU {index}": _try(partial(_describe_gpu, index)) for index in range(gpus.count)}
    if gpus.count > 1:
        described["peer access"] = _try(lambda: describe_peers(list(range(gpus.count))))
        described["links"] = _try(_read_topology)
    return described


def _describe_gpu(index: int) -> Section:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def describe_peers(indices: list[int]) -> str:
    """Return in words which of these GPUs can read each other's memory."""
    without = [f"{a}-{b}" for a, b in find_pairs_without_peer_access(indices)]
    return f"not between {', '.join(without)}" if without else "between all pairs"


def find_pairs_without_peer_access(indices: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of these GPUs that reach each other only through host memory."""
    import torch

    pairs = [(a, b) for a in indices for b in indices if a < b]
    return [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def _read_driver() -> str:
    return _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]


def _read_topology() -> str:
    table = re.sub(r"\x1b\[[0-9;]*m", "", _run("nvidia-smi", "topo", "-m"))
    return "\n" + table.expandtabs()


def _describe_limits() -> Section:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = _try(read_memory_limit)
    described: Section = {
        "RAM": {"free_bytes": memory.available, "total_bytes": memory.total},
        "swap": {"free_bytes": swap.free, "total_bytes": swap.total},
        "container's limit": "none" if limit is None else {"limit_bytes": limit} if isinstance(limit, int) else limit,
        "this process": {"free_bytes": _try(read_available_bytes)},
        "/dev/shm": _try(lambda: _describe_disk(Path("/dev/shm"))),
    }
    if sys.platform != "win32":
        described["locked memory (ulimit -l)"] = {"limit_bytes": _read_limit(resource.RLIMIT_MEMLOCK)}
        described["open files (ulimit -n)"] = _read_limit(resource.RLIMIT_NOFILE) or "unlimited"
    return described


def _read_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def find_hub_cache() -> Path:
    """Return the folder of downloaded models."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _describe_disks() -> Section:
    places: dict[str, Callable[[], Path]] = {
        "current folder": Path.cwd,
        "hub cache": find_hub_cache,
        "temporary files": lambda: Path(tempfile.gettempdir()),
    }
    return {name: _try(lambda find=find: _describe_disk(find())) for name, find in places.items()}  # type: ignore[misc]


def _describe_disk(path: Path) -> Section:
    usage = shutil.disk_usage(find_existing(path))
    return {"path": hide_secrets(str(path)), "free_bytes": usage.free, "total_bytes": usage.total}


def _describe_accelerate() -> Section:
    file = find_accelerate_config()
    if file is None:
        return {"default config": "none"}
    settings = read_accelerate_config()
    plugins = sorted(name for name in settings if name.endswith("_config") and settings[name])
    return {
        "default config": hide_secrets(str(file)),
        "distributed_type": str(settings.get("distributed_type", "not set")),
        "mixed_precision": str(settings.get("mixed_precision", "not set")),
        "num_processes": str(settings.get("num_processes", "not set")),
        "plugins": ", ".join(plugins) or "none",
    }


def _show(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_show_part(key, part) for key, part in value.items())
    if name.endswith("_bytes"):
        return show_bytes(value) if isinstance(value, int) else "unlimited" if value is None else str(value)
    return str(value)


def _show_part(name: str, value: Any) -> str:
    shown = _show(name, value)
    return shown if name in ("name", "path") else f"{name.removesuffix('_bytes').replace('_', ' ')} {shown}"
