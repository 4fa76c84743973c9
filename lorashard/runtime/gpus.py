"""The GPUs of this machine as the driver tells of them (NVML), numbered as `--gpus` numbers them. Imports no torch.

NVML reads memory, utilization and temperature without a CUDA context, so asking takes nothing from a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

_MIG_PREFIX = "MIG-"
_CPU_WORDS = 128  # of 64 CPUs each, as many as Linux can have


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use, or the part of one that MIG gives.

    Attributes:
        index: as in `--gpus`: counted from 0 among those that CUDA_VISIBLE_DEVICES leaves.
        uuid: the driver's name for it, whatever its index is elsewhere.
        total_bytes, free_bytes: 0 of a GPU that does not answer; of one that shares the machine's memory, that.
        utilization_percent, temperature_c: None where the driver does not tell.
        cpus: the logical CPUs of its NUMA node; empty where the driver does not tell.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    utilization_percent: int | None = None
    temperature_c: int | None = None
    cpus: frozenset[int] = frozenset()


def list_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that a run started with this environment sees; none where there is no NVIDIA driver."""
    try:
        import pynvml
    except ImportError:  # it is there with lorashard, but not with its files alone
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_describe(pynvml, index, handle) for index, handle in enumerate(_find_visible(pynvml, environ))]
    except pynvml.NVMLError:
        return []
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _find_visible(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    """Return handles as CUDA_VISIBLE_DEVICES has them: like CUDA, up to the first name that is nobody's."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(place) for place in range(nvml.nvmlDeviceGetCount())]
    names = {_ask(nvml, nvml.nvmlDeviceGetName, handle) for handle in handles}
    if len(names) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA puts the fastest first then, and nobody else knows which that is.
        found = [_ask(nvml, nvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in _ask_cuda()]
        if found and all(handle is not None for handle in found):
            return found
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [_enter_mig(nvml, handle) for handle in handles]
    visible: list[Any] = []
    uuids: set[str] = set()
    for name in wanted.split(","):
        handle = _find_handle(nvml, handles, name.strip())
        if handle is None:
            break
        uuid = _ask(nvml, nvml.nvmlDeviceGetUUID, handle) or name
        if uuid in uuids:  # CUDA shows nothing then
            return []
        uuids.add(uuid)
        visible.append(handle)
    return visible


def _ask_cuda() -> list[str]:
    """Return the UUIDs of the GPUs that CUDA shows this process, in its order; no context is made."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    uuids = []
    for place in range(count.value):
        device, uuid = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
        if driver.cuDeviceGet(ctypes.byref(device), place) or driver.cuDeviceGetUuid(ctypes.byref(uuid), device):
            return []
        digits = bytes(uuid).hex()
        uuids.append(f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}")
    return uuids


def _find_handle(nvml: Any, handles: list[Any], name: str) -> Any | None:
    """Return the GPU that a word of CUDA_VISIBLE_DEVICES names: a number, a UUID or its beginning, a MIG instance."""
    if name.startswith(_MIG_PREFIX):
        return _ask(nvml, nvml.nvmlDeviceGetHandleByUUID, name)
    if name.isdigit():
        return _enter_mig(nvml, handles[int(name)]) if int(name) < len(handles) else None
    if not name.startswith("GPU-"):
        return None
    found = [handle for handle in handles if (_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or "").startswith(name)]
    return _enter_mig(nvml, found[0]) if len(found) == 1 else None


def _enter_mig(nvml: Any, handle: Any) -> Any:
    """Return what CUDA uses of a GPU: where it is divided by MIG its first instance, else itself."""
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return handle
    for place in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        if part is not None:
            return part
    return handle


def _describe(nvml: Any, index: int, handle: Any) -> Gpu:
    name = _ask(nvml, nvml.nvmlDeviceGetName, handle)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    total_bytes, free_bytes = (memory.total, memory.free) if memory is not None else (0, 0)
    if memory is None and name is not None:  # it has none of its own
        total_bytes, free_bytes = psutil.virtual_memory().total, psutil.virtual_memory().available
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index=index,
        uuid=_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or f"gpu-{index}",
        name=name or "a GPU that does not answer",
        total_bytes=int(total_bytes),
        free_bytes=int(free_bytes),
        utilization_percent=None if rates is None else int(rates.gpu),
        temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        cpus=_find_cpus(_ask(nvml, nvml.nvmlDeviceGetCpuAffinity, handle, _CPU_WORDS) or ()),
    )


def _find_cpus(words: Sequence[int]) -> frozenset[int]:
    """Return the numbers of the bits that are set in a mask of 64-bit words, the lowest first."""
    return frozenset(64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def _ask(nvml: Any, question: Callable[..., Any], *subject: Any) -> Any | None:
    """Return what the driver answers; None where it does not: old cards, parts of a card, one that has failed."""
    try:
        answer = question(*subject)
    except nvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer
