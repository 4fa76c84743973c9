"""Which CPUs each rank runs on: those of its GPU's NUMA node. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..runtime.devices import RankChoice
from ..runtime.gpus import list_gpus
from ..runtime.output import warn

# Who sets one of these has decided where threads run; the first is accelerate's own binding.
_DECIDED_BY = ("ACCELERATE_CPU_AFFINITY", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


def choose_cpus(
    choice: RankChoice, environ: Mapping[str, str] = os.environ, nodes_dir: Path = Path("/sys/devices/system/node")
) -> list[list[int]]:
    """Return for each rank the logical CPUs near its GPU, of those that this process may use; empty to bind none.

    Memory is taken from the node of the thread that touches it first, and a copy of pinned memory from another node
    crosses the link between sockets. Ranks are bound where a machine has several nodes, unless a variable says that
    somebody has decided; a rank whose GPU's CPUs are not known leaves all unbound, and that is said in one line.

    torch's own `numa_options` asks for `numactl` to be installed and initializes CUDA in the launcher; NVML is here.
    """
    is_decided = any(name in environ for name in _DECIDED_BY)
    if choice.device_type != "cuda" or is_decided or len(list(nodes_dir.glob("node[0-9]*"))) < 2:
        return []
    gpus, allowed = list_gpus(environ)[: choice.num_ranks], os.sched_getaffinity(0)
    cpus = [sorted(gpu.cpus & allowed) for gpu in gpus]
    if len(cpus) == choice.num_ranks and all(cpus):
        return cpus
    num_known = sum(bool(gpu.cpus) for gpu in gpus)
    warn(
        "the ranks are not bound to the NUMA nodes of their GPUs: "
        + ("this process may use no CPU of one" if num_known == choice.num_ranks else "the driver does not tell them")
    )
    return []
