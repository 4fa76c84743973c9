"""Which CPUs the ranks of GPUs run on, with stand-ins for the GPUs' driver and for the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers.nvml import Nvml, card

from lorashard.launch.cpu_binding import choose_cpus
from lorashard.launch.elastic import run_ranks
from lorashard.runtime.devices import RankChoice

NEAR = ([1 << 3 | 1 << 4, 0], [0, 1 << 5])  # CPUs 3 and 4, CPU 69


@pytest.fixture
def choose(monkeypatch, tmp_path: Path):
    """Return the choice for two GPUs on a machine of two nodes, whose process may use the CPUs 4 to 70."""

    def choose(near=NEAR, device_type="cuda", num_nodes=2, allowed=range(4, 71), **environ: str) -> list[list[int]]:
        cards = [card(number, cpu_words=words) for number, words in enumerate(near)]
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(lambda: cards))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        for number in range(num_nodes):
            (tmp_path / f"node{number}").mkdir(exist_ok=True)
        return choose_cpus(RankChoice(2, device_type), environ, tmp_path)

    return choose


def test_a_rank_runs_near_its_gpu(choose, capfd):
    """Catches words of the driver's mask that change places, CPUs that are not the process's, ids that are ignored."""
    assert choose(num_nodes=1) == []
    assert choose() == [[4], [69]]
    assert choose(CUDA_VISIBLE_DEVICES="1,0") == [[69], [4]]
    assert choose(device_type="cpu") == choose(OMP_PROC_BIND="false") == choose(ACCELERATE_CPU_AFFINITY="0") == []
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("near", "allowed"), [((NEAR[0], None), range(99)), (NEAR[:1], range(99)), (NEAR, range(9))])
def test_what_cannot_be_bound_is_said_and_starts(choose, capfd, near, allowed):
    """Catches a run that does not start, or half of whose ranks are bound, where the driver does not answer."""
    assert choose(near, allowed=allowed) == []
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no kernel that binds processes")
def test_ranks_are_bound_before_they_begin(tmp_path: Path, capfd):
    """Catches all ranks on the CPUs of the first, and a launch that a CPU which went away ends."""
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    allowed = sorted(os.sched_getaffinity(0))
    given = [allowed[:1], allowed[-1:], [10**4]]
    assert run_ranks([sys.executable, "-c", code], 3, tmp_path, cpus=given) is None
    logs = [(tmp_path / f"rank_{rank}.log").read_text().splitlines() for rank in range(3)]
    assert logs[:2] == [[str(allowed[:1])], [str(allowed[-1:])]]
    assert "not bound" in logs[2][0] and logs[2][1] == str(allowed)
