"""The GPUs that `--gpus` numbers, from a stand-in for the driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest

from lorashard.runtime import gpus
from lorashard.runtime.gpus import list_gpus

GIB = 2**30


class NvmlError(Exception):
    """What the driver raises."""


class Nvml:
    """A driver with some cards; a handle is a card's own record."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *cards: SimpleNamespace, is_there: bool = True) -> None:
        self.cards = cards
        self.is_there = is_there
        self.num_open = 0

    def nvmlInit(self):
        if not self.is_there:
            raise NvmlError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        parts = [part for card in self.cards for part in (card, *card.parts)]
        found = [part for part in parts if part.uuid == uuid]
        if not found:
            raise NvmlError("Not Found")
        return found[0]

    def nvmlDeviceGetMigMode(self, card):
        return (1 if card.parts else 0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, place):
        if place >= len(card.parts):
            raise NvmlError("Not Found")
        return card.parts[place]

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetName(self, card):
        return self._tell(card.name)

    def nvmlDeviceGetMemoryInfo(self, card):
        return self._tell(card.memory)

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu=self._tell(card.utilization))

    def nvmlDeviceGetTemperature(self, card, kind):
        return self._tell(card.temperature)

    def _tell(self, value):
        if value is None:
            raise NvmlError("Not Supported")
        return value


def card(number: int, name: str | None = "H100", parts: tuple = (), **facts) -> SimpleNamespace:
    memory = SimpleNamespace(total=80 * GIB, free=(70 + number) * GIB)
    known = {"uuid": f"GPU-{number}{number}aa-bb", "memory": memory, "utilization": 10 + number, "temperature": 40}
    return SimpleNamespace(name=name, parts=parts, **known | facts)


@pytest.fixture
def drive(monkeypatch):
    """Put a driver in place of the machine's."""

    def drive(*cards: SimpleNamespace, **options) -> Nvml:
        nvml = Nvml(*cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(gpus, "_ask_cuda", lambda: [])
        return nvml

    return drive


def test_what_the_driver_tells_is_listed(drive):
    """Free and total swapped, a driver left open, or a field that is always None."""
    nvml = drive(card(0), card(1))
    first, second = list_gpus({})
    assert (first.index, second.index) == (0, 1)
    assert (second.name, second.total_bytes, second.free_bytes) == ("H100", 80 * GIB, 71 * GIB)
    assert (second.utilization_percent, second.temperature_c) == (11, 40)
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-11aa-bb, 0", [1, 0]),
        ("GPU-1", [1]),
        ("GPU", []),
        ("GPU-", []),
        ("1,7,0", [1]),
        ("-1", []),
        ("", []),
        ("1,1", []),
    ],
)
def test_indexes_are_those_that_cuda_gives(drive, visible, expected):
    """A GPU shown as free under the number of another one."""
    drive(card(0), card(1), card(2))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = list_gpus(environ)
    assert [gpu.uuid[4] for gpu in found] == [str(number) for number in expected]
    assert [gpu.index for gpu in found] == list(range(len(expected)))


def test_parts_of_a_card_are_listed_as_cuda_uses_them(drive):
    """A whole card's memory promised where MIG gives a seventh of it."""
    parts = tuple(
        card(9, "H100 MIG 1g.10gb", uuid=f"MIG-{n}", memory=SimpleNamespace(total=10 * GIB, free=9 * GIB))
        for n in (1, 2)
    )
    drive(card(0, parts=parts), card(1))
    assert [gpu.uuid for gpu in list_gpus({})] == ["MIG-1", "GPU-11aa-bb"]
    named = list_gpus({"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-1,MIG-7"})
    assert [(gpu.uuid, gpu.total_bytes) for gpu in named] == [("MIG-2", 10 * GIB), ("MIG-1", 10 * GIB)]


def test_different_cards_are_numbered_as_cuda_numbers_them(drive, monkeypatch):
    """CUDA puts the fastest card first, the driver the first slot: a run on another card than the one that was free."""
    drive(card(0, "GT 1030"), card(1, "RTX 5090"))
    monkeypatch.setattr(gpus, "_ask_cuda", lambda: ["GPU-11aa-bb", "GPU-00aa-bb"])
    assert [gpu.name for gpu in list_gpus({})] == ["RTX 5090", "GT 1030"]
    assert [gpu.name for gpu in list_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})] == ["GT 1030", "RTX 5090"]


def test_a_driver_that_does_not_answer_is_no_error(drive):
    """A page that cannot be opened on a machine without a GPU, or with one that has failed."""
    drive(is_there=False)
    assert list_gpus({}) == []
    drive(card(0, utilization=None, temperature=None))
    (gpu,) = list_gpus({})
    assert (gpu.utilization_percent, gpu.temperature_c) == (None, None)
    drive(card(0, name=None, memory=None))
    (gpu,) = list_gpus({})
    assert (gpu.name, gpu.free_bytes) == ("a GPU that does not answer", 0)


def test_a_gpu_without_memory_of_its_own_has_the_machines(drive):
    """A GPU of 0 bytes, on which nothing is ever said to fit."""
    drive(card(0, memory=None))
    (gpu,) = list_gpus({})
    assert gpu.total_bytes == psutil.virtual_memory().total and 0 < gpu.free_bytes <= gpu.total_bytes
