"""Checks of the machine, before any rank starts: packages, GPUs, memory, folders, environment, the hub."""

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
from ..env import (
    find_accelerate_config,
    hide_secrets,
    read_accelerate_config,
    read_available_bytes,
    read_driver_cuda,
    read_memory_limit,
)
from .checks import Check, explain_error

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
_SLOWING = {
    "NCCL_P2P_DISABLE": "GPUs reach each other through host memory",
    "NCCL_SHM_DISABLE": "ranks of a machine talk over the network",
    "NCCL_IB_DISABLE": "machines talk over TCP instead of InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "nothing overlaps on a GPU",
}


def check_machine(options: DoctorOptions) -> Iterator[Check]:
    """Yield one check after another; none takes longer than `timeout_s`.

    Ranks: local; once on each machine.
    """
    checks: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("packages", check_packages),
        ("GPUs", partial(check_gpus, options)),
        ("memory", check_memory),
        ("limits", check_limits),
        ("output_dir", lambda: check_folder("output_dir", Path(options.output_dir), _PROBE_BYTES)),
        ("hub cache", lambda: check_folder("hub cache", _find_hub_cache(), _CHUNK_BYTES)),
        ("temporary files", lambda: check_folder("temporary files", Path(tempfile.gettempdir()), _CHUNK_BYTES)),
        ("environment", partial(check_environment, options, os.environ)),
        ("hub", check_hub),
    ]
    if options.model_name_or_path is not None:
        checks.append(("model", partial(check_model, options.model_name_or_path, options.model_revision)))
    for name, run in checks:
        yield from run_bounded(name, run, options.timeout_s)


def run_bounded(name: str, run: Callable[[], Iterator[Check]], timeout_s: float) -> list[Check]:
    """Return a check's findings, or that it does not end: a file system that is gone hangs whoever asks it."""
    found: list[Check] = []

    def collect() -> None:
        try:
            found.extend(run())
        except Exception as error:  # whatever it is, it is what the check finds
            found.append(Check(name, "FAIL", f"cannot be checked: {explain_error(error)}", "fix that first"))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        return [Check(name, "FAIL", f"no answer within {timeout_s:g} s", "is a disk, a driver or the network gone?")]
    return found


def check_packages() -> Iterator[Check]:
    """Are the installed versions those that lorashard needs?"""
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("lorashard") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Check("packages", "warn", "lorashard is not installed: its needs are not known", "pip install lorashard")
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
        yield Check("packages", "FAIL", found, f"pip install {words}")
    else:
        yield Check("packages", "ok", ", ".join(fitting))


def check_gpus(options: DoctorOptions) -> Iterator[Check]:
    """Does torch see the GPUs that the driver has?"""
    if options.cpu is not None:
        yield Check("GPUs", "skip", "not looked at: --cpu is given")
        return
    gpus = find_gpus()
    if gpus.problem:
        fix = "see whether nvidia-smi works; reboot after an update of the driver; start a container with --gpus all"
        yield Check("GPUs", "FAIL", gpus.problem, fix)
        return
    if not gpus.count:
        if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            found, fix = "none is visible, as CUDA_VISIBLE_DEVICES has it", "unset it, or name the GPUs to use"
        else:
            found, fix = "none was found", "if there are some: install the driver, start a container with --gpus all"
        yield Check("GPUs", "warn", f"{found}: ranks compute on the CPU", f"{fix}; --cpu N says that it is meant")
        return
    import torch

    newest = read_driver_cuda()
    driver = f"a driver for CUDA {newest[0]}.{newest[1]}" if newest else "a driver"
    if torch.version.cuda is None and torch.version.hip is None:
        found = f"{gpus.count} with {driver}, but torch {torch.__version__} is a build for the CPU"
        yield Check("GPUs", "FAIL", found, f"install a build of torch for {driver} (pytorch.org tells how)")
    elif not torch.cuda.is_available():
        found = f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use {gpus.count} GPUs with {driver}"
        yield Check("GPUs", "FAIL", found, "update the driver, or install a build of torch for the driver's CUDA")
    elif torch.cuda.device_count() != gpus.count:
        found = f"the driver has {gpus.count}, torch sees {torch.cuda.device_count()}"
        yield Check("GPUs", "warn", found, "give --gpus with the number that torch sees; is one of them broken?")
    else:
        yield Check("GPUs", "ok", f"{gpus.count}, {driver}, torch's CUDA {torch.version.cuda}")


def check_memory() -> Iterator[Check]:
    """Is there host memory, and is what the system calls free this process's to take?"""
    free_bytes, system_bytes = read_available_bytes(), psutil.virtual_memory().available
    limit_bytes = read_memory_limit()
    figures = {"free_bytes": free_bytes}
    found = f"{show_bytes(free_bytes)} free"
    if limit_bytes is not None:
        found += f" of {show_bytes(limit_bytes)} that the container or job may use"
    if free_bytes < _LOW_MEMORY_BYTES:
        fix = "end what else runs here, or allow the container or job more memory; `--placement host` needs most"
        yield Check("memory", "warn", found, fix, figures)
    elif free_bytes < system_bytes / 2:
        found += f", while the machine has {show_bytes(system_bytes)} free, which plans count on"
        fix = "a rank beyond the limit is killed: allow more, or choose `--placement shard` or `file` yourself"
        yield Check("memory", "warn", found, fix, figures)
    else:
        yield Check("memory", "ok", found, None, figures)


def check_limits() -> Iterator[Check]:
    """Are /dev/shm and the limits of this process large enough?"""
    shm = Path("/dev/shm")
    if shm.is_dir():
        free_bytes = shutil.disk_usage(shm).free
        is_low = free_bytes < _LOW_SHM_BYTES
        fix = "NCCL and data loaders talk through it: start the container with --shm-size=8g or --ipc=host"
        figures = {"free_bytes": free_bytes}
        found = f"{show_bytes(free_bytes)} free"
        yield Check("/dev/shm", "warn" if is_low else "ok", found, fix if is_low else None, figures)
    if sys.platform != "win32":
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_low = limit != resource.RLIM_INFINITY and limit < _LOW_OPEN_FILES
        fix = f"a rank may need more for files and connections: ulimit -n {8 * _LOW_OPEN_FILES}"
        found = "unlimited" if limit == resource.RLIM_INFINITY else f"up to {limit}"
        yield Check("open files", "warn" if is_low else "ok", found, fix if is_low else None)


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
        yield Check(name, "FAIL", f"{where}: {error.strerror or error}", _mend_writing(error))
        return
    speed = num_bytes / write_s
    figures = {"write_bytes_per_s": speed, "free_bytes": free_bytes}
    found = f"{where}: {num_bytes >> 20} MiB written at {speed / 1e6:.0f} MB/s, {show_bytes(free_bytes)} free"
    if not is_locking:
        fix = (
            "the file system has no locks, so processes damage each other's files: choose another, such as a local one"
        )
        yield Check(name, "FAIL", f"{where}: a lock holds nobody back", fix, figures)
    elif free_bytes < _LOW_DISK_BYTES:
        yield Check(name, "warn", found, "make room: checkpoints and downloads need it", figures)
    elif speed < _SLOW_DISK_BYTES_PER_S and num_bytes >= _PROBE_BYTES:
        yield Check(name, "warn", found, "checkpoints will take long: choose a faster disk", figures)
    else:
        yield Check(name, "ok", found, None, figures)


@contextmanager
def _probe_folder(folder: Path) -> Iterator[Path]:
    """Make a folder for the probe, and those above it; leave nothing behind."""
    made = [place for place in [folder, *folder.parents] if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".lorashard-doctor-", dir=folder) as probe:
            yield Path(probe)
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


def _write(path: Path, num_bytes: int) -> float:
    """Return the seconds that it takes to write a file to the disk."""
    chunk = os.urandom(_CHUNK_BYTES)  # a file system that compresses must not look fast
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


def _mend_writing(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room there, or choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to, or have its rights changed"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a file has the name of a folder: choose another name, or move it"
    if error.errno == errno.EFBIG:
        return "files may not grow: raise the limit (ulimit -f), or choose another file system"
    if error.errno == errno.ENOENT:
        return "this folder cannot be made there: choose another"
    return "is the file system in order? Choose another folder otherwise"


def _find_hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def check_environment(options: DoctorOptions, environ: Mapping[str, str]) -> Iterator[Check]:
    """Does a variable, or accelerate's configuration, stand in the way?"""
    found = [
        *_check_plugins(environ),
        *_check_interfaces(environ),
        *_check_slowing(environ),
        *_check_threads(options, environ),
    ]
    yield from found
    if not found:
        yield Check("environment", "ok", "no variable and no accelerate setting stands in the way")


def _check_plugins(environ: Mapping[str, str]) -> Iterator[Check]:
    try:
        refuse_plugins(environ)
    except ConfigError as error:
        yield Check("environment", "FAIL", str(error))
    file = find_accelerate_config()
    kind = str(read_accelerate_config().get("distributed_type", "NO"))
    if file is not None and kind not in _PLAIN_TYPES:
        fix = "choose plain multi-GPU in `accelerate config`, or give `accelerate launch --multi_gpu`"
        yield Check("environment", "warn", f"{hide_secrets(str(file))} has distributed_type {kind}", fix)


def _check_interfaces(environ: Mapping[str, str]) -> Iterator[Check]:
    there = sorted(psutil.net_if_addrs())
    gloo = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    unknown = {"GLOO_SOCKET_IFNAME": [name for name in gloo if name not in there]}
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not nccl.startswith("^"):  # ^ names those that are not to be used
        names = nccl.removeprefix("=").split(",")
        is_exact = nccl.startswith("=")
        unknown["NCCL_SOCKET_IFNAME"] = [
            name for name in names if not any(one == name if is_exact else one.startswith(name) for one in there)
        ]
    for variable, names in unknown.items():
        if names:
            found = f"{variable} names {', '.join(names)}, but this machine has {', '.join(there)}"
            yield Check(
                "environment", "FAIL", found, f"unset {variable}, or name an interface that reaches the other ranks"
            )


def _check_slowing(environ: Mapping[str, str]) -> Iterator[Check]:
    for name, effect in _SLOWING.items():
        if is_on(environ.get(name)):
            yield Check(
                "environment", "warn", f"{name} is set: {effect}", f"unset {name} unless something fails without it"
            )
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        fix = "unset TORCH_DISTRIBUTED_DEBUG when you have found what you look for"
        found = "TORCH_DISTRIBUTED_DEBUG is DETAIL: every collective is checked first"
        yield Check("environment", "warn", found, fix)


def _check_threads(options: DoctorOptions, environ: Mapping[str, str]) -> Iterator[Check]:
    num_threads = environ.get("OMP_NUM_THREADS", "")
    if options.cpu is None or not num_threads.isdigit():
        return
    num_cores = count_cores()
    if int(num_threads) * options.cpu > num_cores > 0 and int(num_threads) > 1:
        found = f"OMP_NUM_THREADS is {num_threads} for each of {options.cpu} ranks, on {num_cores} cores"
        yield Check("environment", "warn", found, "unset it: lorashard then shares the cores among the ranks")


def check_hub() -> Iterator[Check]:
    """Does the hub answer?"""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        found = "offline, as HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE has it: models must be folders or in the cache"
        yield Check("hub", "skip", found)
        return
    endpoint = hide_secrets(constants.ENDPOINT)
    begin_s = time.perf_counter()
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # the HTTP library's own classes differ between versions of the hub's client
        reason = hide_secrets(explain_error(error))
        fix = (
            "behind a proxy set HTTPS_PROXY; for a mirror HF_ENDPOINT; without a network HF_HUB_OFFLINE=1 saves waiting"
        )
        yield Check("hub", "warn", f"{endpoint} does not answer: {reason}", fix)
        return
    answer_s = time.perf_counter() - begin_s
    yield Check("hub", "ok", f"{endpoint} answers in {answer_s:.2f} s", None, {"answer_s": answer_s})


def check_model(name: str, revision: str | None) -> Iterator[Check]:
    """Can the model's files be read?"""
    from ..validate import describe_model

    try:
        yield Check("model", "ok", f"{name}: {hide_secrets(describe_model(name, revision))}")
    except UserError as error:
        yield Check("model", "FAIL", str(error))
