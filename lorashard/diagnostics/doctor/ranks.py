"""Checks that need ranks: do they form a group, do collectives deliver the right bytes, and how fast are the links?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ...errors import VerificationError
from ...planning.probe import Speeds, measure_speeds
from ...runtime import dist
from ...runtime.disk import show_bytes
from ...runtime.dtypes import choose_dtype, explain_slow_bfloat16, name_of
from ...runtime.launch_env import read_launcher_env
from ..checks import Check, explain_error
from ..env import find_pairs_without_peer_access
from .watch import Watch

# As large as a decoder layer of a model that needs several GPUs; less on CPUs, whose ranks talk through sockets.
_UNIT_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
_PINNED_BYTES = 256 * 2**20
_NUM_SUMMED = 2**18
_IMPORTS_TIMEOUT_S = 300
_SLOW_HOST_LINK_BYTES_PER_S = 6e9
_FOREIGN_BYTES = 2 * 2**30  # less may be this process's own context and NCCL's buffers
_SLOW_RANK_SHARE = 0.6

_FIX_IMPORTS = "reinstall the package that it names; if none is broken, the disk with the packages is very slow"
_FIX_MEETING = (
    "see the ranks' logs; several machines: can they reach MASTER_ADDR, and does GLOO_SOCKET_IFNAME or "
    "NCCL_SOCKET_IFNAME name the right network? NCCL_DEBUG=INFO logs more"
)
_FIX_COLLECTIVES = (
    "run it with NCCL_DEBUG=INFO; if it works with NCCL_P2P_DISABLE=1, copies between GPUs are broken (disable ACS or "
    "the IOMMU in the firmware); if it works with NCCL_IB_DISABLE=1, InfiniBand is"
)
_FIX_BYTES = (
    "do not train on this machine: a link delivers wrong bytes; try NCCL_P2P_DISABLE=1, and disable ACS or the IOMMU "
    "in the firmware"
)
_FIX_SPEEDS = "does the GPU work alone (`lorashard doctor --gpus 1`)? Restart the machine if no program can use it"


def check_ranks(timeout_s: int, known: Sequence[Check], report: Callable[[Sequence[Check]], None]) -> list[list[Check]]:
    """Return every rank's checks, by rank.

    If a rank does not answer or a step fails, one rank reports what was found, and all processes end.

    Args:
        timeout_s: for each step.
        known: earlier findings, which are reported too.
        report: prints checks.

    Raises:
        VerificationError: this rank cannot connect to the launcher's store, which has been reported.

    Ranks: collective over all ranks.
    """
    found = list(known)
    try:
        watch = Watch(read_launcher_env(), timeout_s, lambda check: report([*found, check]))
    except (RuntimeError, ValueError) as error:
        unreachable = f"the launcher's store does not answer: {explain_error(error)}"
        report([*found, Check.failed("ranks", unreachable, _FIX_MEETING)])
        raise VerificationError(unreachable) from error
    with watch.step("imports", _FIX_IMPORTS, max(timeout_s, _IMPORTS_TIMEOUT_S)):
        from ...runtime.join import join_launch
    with watch.step("ranks", _FIX_MEETING, timeout_s):
        begin_s = time.perf_counter()
        device = join_launch()
        num_ranks = len(dist.gather_objects(device.type))
        met = f"{num_ranks} on {device.type} met in {time.perf_counter() - begin_s:.2f} s"
        found.append(Check.passed("ranks", met, num_ranks=num_ranks))
    if num_ranks > 1:
        with watch.step("collectives", _FIX_COLLECTIVES, timeout_s):
            found.append(_check_collectives(device))
        with watch.step("gathers", _FIX_COLLECTIVES, timeout_s):
            found.append(_check_gathers(device))
    if device.type == "cuda":
        with watch.step("GPU memory", _FIX_SPEEDS, timeout_s):
            found.append(_check_gpu_memory(device))
        found.append(_check_pinning())
    with watch.step("speeds", _FIX_SPEEDS, timeout_s):
        dtype, sentence = choose_dtype("auto", device)
        has_bfloat16 = int(explain_slow_bfloat16(device) is None)
        auto = f"auto is {str(sentence).removeprefix('dtype: ')}"
        found.append(Check.passed("dtype", auto, has_bfloat16=has_bfloat16))
        speeds = measure_speeds(device, dtype)
        fastest = max(dist.gather_objects(speeds.flops_per_s))
        found += _check_speeds(device, dtype, speeds, fastest)
    with watch.step("report", _FIX_COLLECTIVES, timeout_s):
        return dist.gather_objects(found)


def _check_collectives(device: torch.device) -> Check:
    """Check the default group, which carries an adapter's tensors and gradients.

    Ranks: collective over all ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.arange(_NUM_SUMMED, device=device) % 1000  # small integers, whose sums are exact in float32
    summed = (values + rank).float()
    dist.sum_(summed)
    sent = (values if rank == 0 else torch.zeros_like(values)).float()
    dist.broadcast_([sent])
    wrong = []
    if not torch.equal(summed, (values * size + size * (size - 1) // 2).float()):
        wrong.append("all-reduce")
    if not torch.equal(sent, values.float()):
        wrong.append("broadcast")
    if dist.gather_objects(rank) != list(range(size)):
        wrong.append("gather of objects")
    if wrong:
        return Check.failed("collectives", f"wrong values from {', '.join(wrong)}", _FIX_BYTES)
    found = f"all-reduce, broadcast and gather of objects over {size} ranks deliver the right values"
    return Check.passed("collectives", found)


def _check_gathers(device: torch.device) -> Check:
    """Check the base's groups: gathers as the engine starts them, and its comparisons on the host.

    Ranks: collective over all ranks.
    """
    size = dist.get_world_size()
    group = dist.ShardGroup.of_size(size)
    shard_bytes = _UNIT_BYTES[device.type] // size
    pattern = (torch.arange(shard_bytes, dtype=torch.int32, device=device) % 251).to(torch.uint8)
    shard = pattern + 37 * group.rank % 256
    gathered = torch.empty(size * shard_bytes, dtype=torch.uint8, device=device)
    fastest_s = float("inf")
    for _ in range(3):
        gathered.zero_()
        fastest_s = min(fastest_s, _time_gather(group, gathered, shard))
    rows = gathered.view(size, -1)  # [ranks, bytes of a shard]
    wrong = [str(rank) for rank in range(size) if not torch.equal(rows[rank], pattern + 37 * rank % 256)]
    if wrong:
        return Check.failed("gathers", f"wrong bytes from rank {', '.join(wrong)}", _FIX_BYTES)
    ranks = group.compare([group.rank])
    if group.compare([7]) is not None or ranks != [[rank] for rank in range(size)]:
        found = f"the gloo group on the host delivers {ranks}, expected the index of each rank"
        return Check.failed("gathers", found, _FIX_BYTES)
    speed = (size - 1) * shard_bytes / fastest_s
    found = f"{gathered.numel() >> 20} MiB from {size} ranks: right bytes, {speed / 1e9:.2f} GB/s into each rank"
    return Check.passed("gathers", found, gather_bytes_per_s=speed)


def _time_gather(group: dist.ShardGroup, gathered: torch.Tensor, shard: torch.Tensor) -> float:
    _synchronize(gathered.device)
    begin_s = time.perf_counter()
    group.all_gather(gathered, shard).wait()
    _synchronize(gathered.device)
    return time.perf_counter() - begin_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_gpu_memory(device: torch.device) -> Check:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    foreign_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    found = f"{torch.cuda.get_device_name(device)}: {show_bytes(free_bytes)} of {show_bytes(total_bytes)} free"
    fix = "another program uses this GPU: nvidia-smi names it"
    is_shared = foreign_bytes > _FOREIGN_BYTES
    return Check.warned_if(is_shared, "GPU memory", found, fix, free_bytes=free_bytes, total_bytes=total_bytes)


def _check_pinning() -> Check:
    """Can host memory be pinned? Local: a rank that cannot must not leave the others waiting."""
    try:
        torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        found = f"{_PINNED_BYTES >> 20} MiB cannot be pinned: {explain_error(error)}"
        fix = "raise the limit of locked memory (ulimit -l unlimited; docker --ulimit memlock=-1) and free host memory"
        return Check.failed("pinned memory", found, fix)
    return Check.passed("pinned memory", f"{_PINNED_BYTES >> 20} MiB pinned")


def _check_speeds(device: torch.device, dtype: torch.dtype, own: Speeds, fastest: float) -> list[Check]:
    """Check this rank's speeds.

    Args:
        fastest: operations per second of the fastest rank.
    """
    flops_per_s = own.flops_per_s
    if device.type == "cpu":
        found = f"{flops_per_s / 1e9:.0f} GFLOPS in {name_of(dtype)}"
        compute = Check.passed("compute", found, flops_per_s=flops_per_s)
        return [Check("pinned memory", "skip", "needs a GPU"), compute]
    host_speed = own.host_bytes_per_s
    found = f"{host_speed / 1e9:.1f} GB/s from pinned host memory"
    fix = "less than half of PCIe 3.0 x16: does the card sit in a full slot (nvidia-smi -q -d PCI)?"
    is_slow = host_speed < _SLOW_HOST_LINK_BYTES_PER_S
    checks = [Check.warned_if(is_slow, "host link", found, fix, host_bytes_per_s=host_speed)]
    if own.peer_bytes_per_s is not None:
        checks.append(_check_peers(own.peer_bytes_per_s, host_speed))
    found = f"{flops_per_s / 1e12:.0f} TFLOPS in {name_of(dtype)}"
    is_slow = flops_per_s < _SLOW_RANK_SHARE * fastest
    if is_slow:
        found += f", while the fastest has {fastest / 1e12:.0f}"
    fix = "all ranks wait for the slowest: is it another model, hot, or busy with another program (nvidia-smi)?"
    return [*checks, Check.warned_if(is_slow, "compute", found, fix, flops_per_s=flops_per_s)]


def _check_peers(speed: float, host_speed: float) -> Check:
    pairs = find_pairs_without_peer_access(list(range(torch.cuda.device_count())))
    found = f"{speed / 1e9:.1f} GB/s from other GPUs"
    if pairs:
        named = ", ".join(f"{a}-{b}" for a, b in pairs[:4]) + (", ..." if len(pairs) > 4 else "")
        found += f"; no peer access between GPUs {named}"
    elif speed < host_speed:
        found += ", less than from host memory"
    fix = "`--placement host` may be faster than `shard`; `auto` compares both"
    return Check.warned_if(bool(pairs) or speed < host_speed, "peer link", found, fix, peer_bytes_per_s=speed)
