"""Stand-ins for the driver of GPUs (NVML) and for CUDA's own library. Imports nothing that takes long."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace

GIB = 2**30


class NvmlError(Exception):
    """What the driver raises."""


class Nvml:
    """A driver with some cards, in place of the module `pynvml`; a handle is a card's own record."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, list_cards: Callable[[], Sequence[SimpleNamespace]], is_there: bool = True) -> None:
        self.is_there = is_there
        self.num_open = 0
        self.nvmlDeviceGetCount = lambda: len(list_cards())
        self.nvmlDeviceGetHandleByIndex = lambda index: list_cards()[index]
        self.nvmlDeviceGetHandleByUUID = lambda uuid: _find(
            [part for card in list_cards() for part in (card, *card.parts) if part.uuid == uuid], 0
        )
        self.nvmlDeviceGetMigMode = lambda card: (1 if card.parts else 0, 0)
        self.nvmlDeviceGetMaxMigDeviceCount = lambda card: 7
        self.nvmlDeviceGetMigDeviceHandleByIndex = lambda card, place: _find(card.parts, place)
        self.nvmlDeviceGetUUID = lambda card: card.uuid
        self.nvmlDeviceGetName = lambda card: _tell(card.name)
        self.nvmlDeviceGetMemoryInfo = lambda card: _tell(card.memory)
        self.nvmlDeviceGetUtilizationRates = lambda card: SimpleNamespace(gpu=_tell(card.utilization))
        self.nvmlDeviceGetCpuAffinity = lambda card, num_words: _tell(card.cpu_words)
        self.nvmlDeviceGetTemperature = lambda card, kind: _tell(card.temperature)

    def nvmlInit(self) -> None:
        if not self.is_there:
            raise NvmlError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1


def _find(found: Sequence[SimpleNamespace], place: int) -> SimpleNamespace:
    if place >= len(found):
        raise NvmlError("Not Found")
    return found[place]


def _tell(value):
    if value is None:
        raise NvmlError("Not Supported")
    return value


def card(number: int, name: str | None = "H100", parts: tuple = (), **facts) -> SimpleNamespace:
    """Return a card; a fact that is None is not told."""
    memory = SimpleNamespace(total=80 * GIB, free=(70 + number) * GIB)
    uuid = f"GPU-{number}{number}aaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
    known = {"uuid": uuid, "memory": memory, "utilization": 10 + number, "temperature": 40, "cpu_words": None}
    return SimpleNamespace(name=name, parts=parts, **known | facts)


class Cuda:
    """CUDA's library, which fills what it is given a reference to; it has cards of these UUIDs, in this order."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.cuInit = lambda flags: 0
        self.cuDeviceGetCount = lambda count: _fill(count, len(uuids).to_bytes(4, "little"))
        self.cuDeviceGet = lambda device, place: _fill(device, place.to_bytes(4, "little"))
        self.cuDeviceGetUuid = lambda uuid, device: _fill(uuid, bytes.fromhex(uuids[device.value][4:].replace("-", "")))


def _fill(reference, content: bytes) -> int:
    ctypes.memmove(reference, content, len(content))
    return 0
