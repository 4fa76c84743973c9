"""How fast machines are: a table of known GPUs, and what a cluster of them is."""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass

from ..errors import ConfigError

_GB = 1e9
_GIB = 2**30
# The share of the figures in data sheets that programs reach: large bf16 matmuls, copies in memory, transfers.
_MATMUL_SHARE = 0.7
_MEMORY_SHARE = 0.8
_LINK_SHARE = 0.8
# Starting one operation of an eager PyTorch model with PEFT's layers, Python included.
_GPU_KERNEL_S = 7e-6
# Reading files from the page cache into the ring: half of what two idle cores reach (records/file_ring-cpu-2.json).
_FILE_BYTES_PER_S = 9 * _GB


@dataclass(frozen=True)
class Hardware:
    """One rank's device and its links, as fast as programs see them.

    Attributes:
        memory_bytes: of the device; on a CPU of the machine.
        flops_per_s: of large matmuls in the compute dtype.
        memory_bytes_per_s: read and written by everything else.
        host_bytes_per_s: from pinned host memory to the device.
        file_bytes_per_s: from the page cache to the device.
        peer_bytes_per_s: received by each rank in a gather inside a node.
        network_bytes_per_s: received by a whole node from other nodes.
        kernel_s: to start one operation.
        is_overlapping: whether transfers run beside computation rather than take its time.
    """

    name: str
    device_type: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    file_bytes_per_s: float
    peer_bytes_per_s: float
    network_bytes_per_s: float
    kernel_s: float
    is_overlapping: bool


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes that are alike.

    Attributes:
        free_bytes: device memory that the rank with the least may use.
        free_host_bytes: free host memory of a node; None where it is not known.
    """

    hardware: Hardware
    ranks_per_node: int
    num_nodes: int
    free_bytes: int
    free_host_bytes: int | None = None

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_node * self.num_nodes

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.num_ranks} x {self.hardware.name}{nodes}"


# Memory in GiB as sold, dense bf16 TFLOPS, memory GB/s, host link GB/s, peer GB/s (one direction), network of a node in
# GB/s. Memory, TFLOPS and bandwidths: NVIDIA's data sheets and architecture papers of each product, without sparsity,
# with fp32 accumulation. Host links: PCIe 4.0 x16 32, 5.0 x16 64 GB/s. Peers: half of NVLink's total, or the host
# link; GeForce cards reach their peers through host memory, at half of the host link or less. Networks: DGX A100 8 x
# 200 Gb/s, DGX H100, H200 and B200 8 x 400 Gb/s; for cloud machines with PCIe cards 100 Gb/s, for workstations 10 Gb/s.
_KNOWN_GPUS = {
    "a100-40gb": (40, 312, 1555, 32, 300, 200),
    "a100-80gb": (80, 312, 2039, 32, 300, 200),
    "h100-sxm": (80, 989, 3350, 64, 450, 400),
    "h100-pcie": (80, 756, 2000, 64, 64, 12.5),
    "h200": (141, 989, 4800, 64, 450, 400),
    "b200": (180, 2250, 8000, 64, 900, 400),
    "l4": (24, 121, 300, 32, 32, 12.5),
    "l40s": (48, 362, 864, 32, 32, 12.5),
    "a10g": (24, 70, 600, 32, 32, 12.5),
    "rtx-a6000": (48, 155, 768, 32, 32, 12.5),
    "rtx6000-ada": (48, 364, 960, 32, 32, 12.5),
    "rtx3090": (24, 71, 936, 32, 14, 1.25),
    "rtx4090": (24, 165, 1008, 32, 14, 1.25),
    "rtx5090": (32, 210, 1792, 64, 28, 1.25),
}


def known_gpu_types() -> tuple[str, ...]:
    """Return the names that `find_gpu_type` knows."""
    return tuple(_KNOWN_GPUS)


def describe_gpu_type(gpu_type: str) -> str:
    """Return a known GPU as a person reads it, with its memory and how it reaches its peers."""
    memory, _, _, host_gb, peer_gb, _ = _KNOWN_GPUS[gpu_type]
    name = re.sub("(?<=RTX)-?(?=[0-9A])", " ", gpu_type.upper())
    return f"{name}, {memory} GiB, {'NVLink' if peer_gb > host_gb else 'PCIe'}"


@dataclass(frozen=True)
class HardwareOptions:
    """Machines to plan for, as the command line names them; None stands for this machine's.

    Attributes:
        gpu_type: a name of `known_gpu_types`.
        gpu_memory: such as 24GiB.
        nodes: how many nodes.
        peer_gb_per_s: GB/s that a rank receives in a gather inside a node.
        network_gb_per_s: GB/s that a node receives from others.
    """

    gpu_type: str | None = None
    gpu_memory: str | None = None
    nodes: int = 1
    peer_gb_per_s: float | None = None
    network_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.gpu_type is not None:
            _check_gpu_type(self.gpu_type)
        self.memory_bytes()

    def memory_bytes(self) -> int | None:
        """Return `gpu_memory` in bytes.

        Raises:
            ConfigError: it is no amount of memory.
        """
        if self.gpu_memory is None:
            return None
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB|G)?\s*", self.gpu_memory, re.IGNORECASE)
        if match is None or float(match[1]) <= 0:
            raise ConfigError(
                option="gpu_memory", expected="an amount such as 24GiB or 80GB", found=repr(self.gpu_memory)
            )
        scale = {"gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6}[(match[2] or "GiB").lower()]
        return int(float(match[1]) * scale)

    def apply(self, hardware: Hardware) -> Hardware:
        """Return `hardware` with the memory and the links that were given."""
        return dataclasses.replace(
            hardware,
            memory_bytes=self.memory_bytes() or hardware.memory_bytes,
            peer_bytes_per_s=self.peer_gb_per_s * _GB if self.peer_gb_per_s else hardware.peer_bytes_per_s,
            network_bytes_per_s=self.network_gb_per_s * _GB if self.network_gb_per_s else hardware.network_bytes_per_s,
        )


def find_gpu_type(gpu_type: str) -> Hardware:
    """Return a known GPU.

    Raises:
        ConfigError: an unknown name.
    """
    _check_gpu_type(gpu_type)
    memory, tflops, memory_gb, host_gb, peer_gb, network_gb = _KNOWN_GPUS[gpu_type]
    host_bytes_per_s = host_gb * _GB * _LINK_SHARE
    return Hardware(
        name=gpu_type,
        device_type="cuda",
        memory_bytes=int(memory * _GIB),
        flops_per_s=tflops * 1e12 * _MATMUL_SHARE,
        memory_bytes_per_s=memory_gb * _GB * _MEMORY_SHARE,
        host_bytes_per_s=host_bytes_per_s,
        file_bytes_per_s=min(host_bytes_per_s, _FILE_BYTES_PER_S),
        peer_bytes_per_s=peer_gb * _GB * _LINK_SHARE,
        network_bytes_per_s=network_gb * _GB * _LINK_SHARE,
        kernel_s=_GPU_KERNEL_S,
        is_overlapping=True,
    )


def guess_gpu_type(device_name: str, memory_bytes: int) -> str:
    """Return the known GPU that a driver's name means, or else the one nearest in memory.

    Memory also decides between GPUs of one name, such as an A100 with 40 and with 80 GB.
    """
    name = re.sub("[^a-z0-9]", "", device_name.lower())
    words = {gpu_type: re.sub("(-[0-9]+gb|-sxm)$|^rtx|-", "", gpu_type) for gpu_type in _KNOWN_GPUS}
    named = [gpu_type for gpu_type, word in words.items() if word in name]
    # `l4` is in the name of an L40S too.
    longest = max((len(words[gpu_type]) for gpu_type in named), default=0)
    best = [gpu_type for gpu_type in named if len(words[gpu_type]) == longest]
    return min(best or _KNOWN_GPUS, key=lambda gpu_type: abs(_KNOWN_GPUS[gpu_type][0] * _GIB - memory_bytes))


def usable_bytes(memory_bytes: int) -> int:
    """Return the bytes of a GPU that a run can plan with; context, libraries and fragmentation take the rest."""
    return max(0, int(memory_bytes * 0.95) - _GIB)


def _check_gpu_type(gpu_type: str) -> None:
    if gpu_type not in _KNOWN_GPUS:
        written = gpu_type.lower().replace("_", "-").replace(" ", "")
        nearest = [name for name in _KNOWN_GPUS if name.startswith(written)]
        nearest = nearest or difflib.get_close_matches(written, _KNOWN_GPUS, n=1, cutoff=0.4)
        raise ConfigError(
            option="gpu_type",
            expected=f"one of {', '.join(_KNOWN_GPUS)}",
            found=repr(gpu_type),
            fix=f"did you mean {' or '.join(nearest)}?" if nearest else None,
        )
