"""The GPUs that `--gpus` numbers, from a stand-in for the driver."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pytest
from helpers.nvml import GIB, Cuda, Nvml, card

from lorashard.runtime.gpus import list_gpus


@pytest.fixture
def drive(monkeypatch):
    """Put a driver in place of the machine's; `order` is that of CUDA, which else does not answer."""

    def drive(*cards: SimpleNamespace, order: Sequence[int] = (), **options) -> Nvml:
        nvml = Nvml(lambda: cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Cuda([cards[place].uuid for place in order]))
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
        ("GPU-11aaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee, 0", [1, 0]),
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
    assert [gpu.uuid[:6] for gpu in list_gpus({})] == ["MIG-1", "GPU-11"]
    named = list_gpus({"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-1,MIG-7"})
    assert [(gpu.uuid, gpu.total_bytes) for gpu in named] == [("MIG-2", 10 * GIB), ("MIG-1", 10 * GIB)]


def test_different_cards_are_numbered_as_cuda_numbers_them(drive):
    """CUDA puts the fastest card first, the driver the first slot: a run on another card than the one that was free."""
    drive(card(0, "GT 1030"), card(1, "RTX 5090"), order=(1, 0))
    assert [gpu.name for gpu in list_gpus({})] == ["RTX 5090", "GT 1030"]
    assert [gpu.name for gpu in list_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})] == ["GT 1030", "RTX 5090"]


def test_a_driver_that_does_not_answer_is_no_error(drive):
    """A page that cannot be opened on a machine without a GPU, or with one that has failed."""
    drive(is_there=False)
    assert list_gpus({}) == []
    drive(card(0, utilization=None, temperature=None))
    (gpu,) = list_gpus({})
    assert (gpu.utilization_percent, gpu.temperature_c) == (None, None)
    assert gpu.cpus == frozenset()
    drive(card(0, name=None, memory=None))
    (gpu,) = list_gpus({})
    assert gpu.name and gpu.free_bytes == 0


def test_a_gpu_without_memory_of_its_own_has_the_machines(drive):
    """A GPU of 0 bytes, on which nothing is ever said to fit."""
    drive(card(0, memory=None))
    (gpu,) = list_gpus({})
    assert gpu.total_bytes == psutil.virtual_memory().total and 0 < gpu.free_bytes <= gpu.total_bytes
