"""Checks of the machine that need no ranks: packages, GPUs, memory, folders, environment, the hub."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import filelock
import psutil
from packaging.requirements import Requirement

from ...config.use_options import DoctorOptions
from ...errors import ConfigError, UserError
from ...runs.root import find_existing
from ...runtime.devices import count_cores, find_gpus
from ...runtime.disk import show_bytes
from ...runtime.plugins import is_on, refuse_plugins
from ..checks import Check, explain_error
from ..env import (
    find_accelerate_config,
    find_hub_cache,
    hide_secrets,
    read_accelerate_config,
    read_available_bytes,
    read_driver_cuda,
    read_memory_limit,
)

if sys.platform != "win32":
    import resource

_GIB = 2**30
_PROBE_BYTES = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_SLOW_DISK_BYTES_PER_S = 20e6
_LOW_DISK_BYTES = 5 * _GIB
_LOW_MEMORY_BYTES = 4 * _GIB
_LOW_SHM_BYTES = _GIB
_LOW_OPEN_FILES = 1024
_HUB_TIMEOUT_S = 10
_PLAIN_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU")
_SLOWING_VARIABLES = {
    "NCCL_P2P_DISABLE": "GPUs reach each other through host memory",
    "NCCL_SHM_DISABLE": "the ranks of a machine communicate over the network",
    "NCCL_IB_DISABLE": "machines communicate over TCP instead of InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "nothing overlaps on a GPU",
}
_ERRNO_FIXES = {
    (errno.ENOSPC, errno.EDQUOT): "free space there, or choose another folder",
    (errno.EACCES, errno.EPERM, errno.EROFS): "choose a folder that you may write to, or have its permissions changed",
    (errno.ENOTDIR, errno.EEXIST): "a file has the name of a folder: choose another name, or move it",
    (errno.EFBIG,): "files may not grow: raise the limit (ulimit -f), or choose another file system",
    (errno.ENOENT,): "this folder cannot be created there: choose another",
}


def check_machine(options: DoctorOptions) -> Iterator[Check]:
    """Yield the outcome of each check; none takes longer than `timeout_s`.

    Ranks: local; once on each machine.
    """
    checks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("packages", check_packages),
        ("GPUs", partial(check_gpus, options)),
        ("memory", check_memory),
        ("limits", check_limits),
        ("output_dir", lambda: check_folder("output_dir", Path(options.output_dir), _PROBE_BYTES)),
        ("hub cache", lambda: check_folder("hub cache", find_hub_cache(), _CHUNK_BYTES)),
        ("temporary files", lambda: check_folder("temporary files", Path(tempfile.gettempdir()), _CHUNK_BYTES)),
        ("environment", partial(check_environment, options, os.environ)),
        ("hub", check_hub),
    ]
    if options.model_name_or_path is not None:
        checks.append(("model", partial(check_model, options.model_name_or_path, options.model_revision)))
    for name, run in checks:
        yield from run_bounded(name, run, options.timeout_s)


def run_bounded(name: str, run: Callable[[], Iterator[Check]], timeout_s: float) -> list[Check]:
    """Return a check's findings, or that it does not end: a call to a dead network file system never returns."""
    found: list[Check] = []

    def collect() -> None:
        try:
            found.extend(run())
        except Exception as error:  # any error is a finding
            found.append(Check.failed(name, f"cannot be checked: {explain_error(error)}", "fix that first"))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        return [Check.failed(name, f"no answer within {timeout_s:g} s", "is a disk, a driver or the network down?")]
    return found


def check_packages() -> Iterator[Check]:
    """Are the installed versions those that lorashard needs?"""
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("lorashard") or []]
    except importlib.metadata.PackageNotFoundError:
        found = "lorashard is not installed, so its requirements are not known"
        yield Check("packages", "warn", found, "pip install lorashard")
        return
    wrong, fitting = {}, []
    for requirement in requirements:
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        is_extra = not is_needed and any(requirement.marker.evaluate({"extra": e}) for e in ("ui", "quant"))  # type: ignore[union-attr]
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if is_needed:
                wrong[requirement] = "is not installed"
            continue
        if (is_needed or is_extra) and not requirement.specifier.contains(installed, prereleases=True):
            wrong[requirement] = f"is {installed}"
        elif requirement.name in ("torch", "transformers", "peft", "trl", "accelerate"):
            fitting.append(f"{requirement.name} {installed}")
    if wrong:
        found = "; ".join(f"{need.name} {what}, expected {need.specifier}" for need, what in wrong.items())
        words = " ".join(f"'{need.name}{need.specifier}'" for need in wrong)
        yield Check.failed("packages", found, f"pip install {words}")
    else:
        yield Check.passed("packages", ", ".join(fitting))


def check_gpus(options: DoctorOptions) -> Iterator[Check]:
    """Does torch see the GPUs that the driver has?"""
    if options.cpu is not None:
        yield Check("GPUs", "skip", "not checked: --cpu is given")
        return
    gpus = find_gpus()
    if gpus.problem:
        fix = "see whether nvidia-smi works; reboot after an update of the driver; start a container with --gpus all"
        yield Check.failed("GPUs", gpus.problem, fix)
        return
    if not gpus.count:
        found, fix = "none was found", "if there are some: install the driver, start a container with --gpus all"
        if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            found, fix = "CUDA_VISIBLE_DEVICES leaves none visible", "unset it, or list the GPUs to use"
        fix += "; to compute on the CPU on purpose give --cpu N"
        yield Check("GPUs", "warn", f"{found}: ranks compute on the CPU", fix)
        return
    import torch

    newest = read_driver_cuda()
    driver = f"a driver for CUDA {newest[0]}.{newest[1]}" if newest else "a driver"
    if torch.version.cuda is None and torch.version.hip is None:
        found = f"{gpus.count} with {driver}, but torch {torch.__version__} is a build for the CPU"
        yield Check.failed("GPUs", found, f"install a build of torch for {driver} (see pytorch.org)")
    elif not torch.cuda.is_available():
        found = f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use {gpus.count} GPUs with {driver}"
        yield Check.failed("GPUs", found, "update the driver, or install a build of torch for the driver's CUDA")
    elif torch.cuda.device_count() != gpus.count:
        found = f"the driver has {gpus.count}, torch sees {torch.cuda.device_count()}"
        yield Check("GPUs", "warn", found, "give --gpus with the number that torch sees; is one of them broken?")
    else:
        yield Check.passed("GPUs", f"{gpus.count}, {driver}, torch's CUDA {torch.version.cuda}")


def check_memory() -> Iterator[Check]:
    """Is there free host memory, and may this process take all of it?"""
    free_bytes, system_bytes = read_available_bytes(), psutil.virtual_memory().available
    limit_bytes = read_memory_limit()
    found = f"{show_bytes(free_bytes)} free"
    if limit_bytes is not None:
        found += f" of {show_bytes(limit_bytes)} that the container or job may use"
    fix = "end other programs, or allow the container or job more memory; `--placement host` needs most"
    is_low = free_bytes < _LOW_MEMORY_BYTES
    is_limited = not is_low and free_bytes < system_bytes / 2
    if is_limited:
        found += f", while the machine has {show_bytes(system_bytes)} free, which plans count on"
        fix = "a rank beyond the limit is killed: allow more, or choose `--placement shard` or `file` yourself"
    yield Check.warned_if(is_low or is_limited, "memory", found, fix, free_bytes=free_bytes)


def check_limits() -> Iterator[Check]:
    """Are /dev/shm and the limits of this process large enough?"""
    shm = Path("/dev/shm")
    if shm.is_dir():
        free_bytes = shutil.disk_usage(shm).free
        fix = "NCCL and data loaders use it: start the container with --shm-size=8g or --ipc=host"
        found = f"{show_bytes(free_bytes)} free"
        yield Check.warned_if(free_bytes < _LOW_SHM_BYTES, "/dev/shm", found, fix, free_bytes=free_bytes)
    if sys.platform != "win32":
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = limit == resource.RLIM_INFINITY
        fix = f"a rank may need more for files and connections: ulimit -n {8 * _LOW_OPEN_FILES}"
        found = "unlimited" if is_unlimited else f"up to {limit}"
        yield Check.warned_if(not is_unlimited and limit < _LOW_OPEN_FILES, "open files", found, fix)


def check_folder(name: str, folder: Path, num_bytes: int) -> Iterator[Check]:
    """Can files be written, renamed and locked there, as a run does it, and how fast?"""
    where = hide_secrets(str(folder))
    try:
        with _probe_folder(folder) as probe:
            write_s = _write(probe / "written", num_bytes)
            os.replace(probe / "written", probe / "renamed")
            is_locking = _is_locking(probe / "lock")
        free_bytes = shutil.disk_usage(find_existing(folder)).free
    except OSError as error:
        fix = next((fix for numbers, fix in _ERRNO_FIXES.items() if error.errno in numbers), "choose another folder")
        yield Check.failed(name, f"{where}: {error.strerror or error}", fix)
        return
    speed = num_bytes / write_s
    figures = {"write_bytes_per_s": speed, "free_bytes": free_bytes}
    found = f"{where}: {num_bytes >> 20} MiB written at {speed / 1e6:.0f} MB/s, {show_bytes(free_bytes)} free"
    if not is_locking:
        fix = "without locks processes damage each other's files: choose another file system, such as a local one"
        yield Check(name, "FAIL", f"{where}: two processes can hold the same lock", fix, figures)
    elif free_bytes < _LOW_DISK_BYTES:
        yield Check(name, "warn", found, "free space: checkpoints and downloads need it", figures)
    else:
        is_slow = speed < _SLOW_DISK_BYTES_PER_S and num_bytes >= _PROBE_BYTES
        yield Check.warned_if(is_slow, name, found, "checkpoints will take long: choose a faster disk", **figures)


@contextmanager
def _probe_folder(folder: Path) -> Iterator[Path]:
    """Create a folder for the probe, and its parents; remove all that was created."""
    created = [place for place in [folder, *folder.parents] if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".lorashard-doctor-", dir=folder) as probe:
            yield Path(probe)
    finally:
        for place in created:
            with suppress(OSError):
                place.rmdir()


def _write(path: Path, num_bytes: int) -> float:
    """Return the seconds that it takes to write a file to the disk."""
    chunk = os.urandom(_CHUNK_BYTES)  # random, so that a file system that compresses does not look fast
    begin_s = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(num_bytes // _CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begin_s


def _is_locking(path: Path) -> bool:
    with filelock.FileLock(path):
        try:
            with filelock.FileLock(path).acquire(timeout=0):
                return False
        except filelock.Timeout:
            return True


def check_environment(options: DoctorOptions, environ: Mapping[str, str]) -> Iterator[Check]:
    """Does an environment variable, or accelerate's configuration, stop or slow a run?"""
    found = [
        *_check_plugins(environ),
        *_check_interfaces(environ),
        *_check_slowing(environ),
        *_check_threads(options, environ),
    ]
    yield from found or [Check.passed("environment", "no variable or accelerate setting stops or slows a run")]


def _check_plugins(environ: Mapping[str, str]) -> Iterator[Check]:
    try:
        refuse_plugins(environ)
    except ConfigError as error:
        yield Check.of_error("environment", error)
    file = find_accelerate_config()
    kind = str(read_accelerate_config().get("distributed_type", "NO"))
    if file is not None and kind not in _PLAIN_TYPES:
        fix = "choose plain multi-GPU in `accelerate config`, or give `accelerate launch --multi_gpu`"
        yield Check("environment", "warn", f"{hide_secrets(str(file))} has distributed_type {kind}", fix)


def _check_interfaces(environ: Mapping[str, str]) -> Iterator[Check]:
    present = sorted(psutil.net_if_addrs())
    gloo = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    unknown = {"GLOO_SOCKET_IFNAME": [name for name in gloo if name not in present]}
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not nccl.startswith("^"):  # ^ names those that are not to be used, = whole names, else beginnings
        is_exact = nccl.startswith("=")
        unknown["NCCL_SOCKET_IFNAME"] = [
            name
            for name in nccl.removeprefix("=").split(",")
            if not any(one == name if is_exact else one.startswith(name) for one in present)
        ]
    for variable, names in unknown.items():
        if names:
            found = f"{variable} names {', '.join(names)}, but this machine has {', '.join(present)}"
            fix = f"unset {variable}, or name an interface that reaches the other ranks"
            yield Check.failed("environment", found, fix)


def _check_slowing(environ: Mapping[str, str]) -> Iterator[Check]:
    for name, effect in _SLOWING_VARIABLES.items():
        if is_on(environ.get(name)):
            fix = f"unset {name} unless something fails without it"
            yield Check("environment", "warn", f"{name} is set: {effect}", fix)
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found = "TORCH_DISTRIBUTED_DEBUG is DETAIL: every collective is checked first"
        yield Check("environment", "warn", found, "unset TORCH_DISTRIBUTED_DEBUG after debugging")


def _check_threads(options: DoctorOptions, environ: Mapping[str, str]) -> Iterator[Check]:
    num_threads = environ.get("OMP_NUM_THREADS", "")
    if options.cpu is None or not num_threads.isdigit():
        return
    num_cores = count_cores()
    if int(num_threads) * options.cpu > num_cores > 0 and int(num_threads) > 1:
        found = f"OMP_NUM_THREADS is {num_threads} for each of {options.cpu} ranks, on {num_cores} cores"
        yield Check("environment", "warn", found, "unset it: lorashard then divides the cores among the ranks")


def check_hub() -> Iterator[Check]:
    """Does the hub answer?"""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        found = "offline by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE: models must be folders or in the cache"
        yield Check("hub", "skip", found)
        return
    endpoint = hide_secrets(constants.ENDPOINT)
    begin_s = time.perf_counter()
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # the HTTP library's own classes differ between versions of the hub's client
        found = f"{endpoint} does not answer: {hide_secrets(explain_error(error))}"
        fix = "behind a proxy set HTTPS_PROXY; for a mirror HF_ENDPOINT; without a network HF_HUB_OFFLINE=1"
        yield Check("hub", "warn", found, fix)
        return
    answer_s = time.perf_counter() - begin_s
    yield Check.passed("hub", f"{endpoint} answers in {answer_s:.2f} s", answer_s=answer_s)


def check_model(name: str, revision: str | None) -> Iterator[Check]:
    """Can the model's files be read?"""
    from ..model_facts import describe_model

    try:
        yield Check.passed("model", f"{name}: {hide_secrets(describe_model(name, revision))}")
    except UserError as error:
        yield Check.of_error("model", error)
