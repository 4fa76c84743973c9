"""Checks that take ranks: do they meet, are what they send each other the right bytes, and how fast are the links?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from ...errors import VerificationError
from ...planning.probe import Speeds, measure_speeds
from ...runtime import dist
from ...runtime.disk import show_bytes
from ...runtime.dtypes import choose_dtype, explain_slow_bfloat16, name_of
from ...runtime.launch_env import read_launcher_env
from ..env import find_pairs_without_peer_access
from .checks import Check, explain_error
from .watch import Watch

# As large as a decoder layer of a model that needs several GPUs; less on CPUs, whose ranks talk through sockets.
_UNIT_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
_PINNED_BYTES = 256 * 2**20
_NUM_SUMMED = 2**18
_IMPORTS_TIMEOUT_S = 300
_SLOW_HOST_LINK_BYTES_PER_S = 6e9
_FOREIGN_BYTES = 2 * 2**30  # less may be this process's own context and NCCL's buffers
_SLOW_RANK_SHARE = 0.6

_FIX_IMPORTS = "reinstall the package that it names; where nothing is broken, the disk with the packages is very slow"
_FIX_MEETING = (
    "see the ranks' logs; several machines: can they reach MASTER_ADDR, and does GLOO_SOCKET_IFNAME or "
    "NCCL_SOCKET_IFNAME name the right network? NCCL_DEBUG=INFO tells more"
)
_FIX_COLLECTIVES = (
    "run it with NCCL_DEBUG=INFO; if it works with NCCL_P2P_DISABLE=1, copies between GPUs are broken (switch off ACS "
    "or the IOMMU in the firmware); if with NCCL_IB_DISABLE=1, InfiniBand is"
)
_FIX_BYTES = (
    "never train on this: a link delivers wrong bytes; try NCCL_P2P_DISABLE=1, and switch off ACS or the IOMMU in the "
    "firmware"
)
_FIX_SPEEDS = "does the GPU work alone (`lorashard doctor --gpus 1`)? Restart the machine if no program can use it"


def check_ranks(timeout_s: int, known: Sequence[Check], speak: Callable[[Sequence[Check]], None]) -> list[list[Check]]:
    """Return every rank's checks, by rank.

    Where that is not possible, because a rank does not answer or a step fails, one rank speaks and all processes end.

    Args:
        timeout_s: for each step.
        known: what was found before, which is reported too.
        speak: reports checks.

    Raises:
        VerificationError: This rank cannot reach the launcher's store, which has been reported.

    Ranks: collective over all ranks.
    """
    found = list(known)
    try:
        watch = Watch(read_launcher_env(), timeout_s, lambda check: speak([*found, check]))
    except (RuntimeError, ValueError) as error:
        found.append(
            Check("ranks", "FAIL", f"their meeting place does not answer: {explain_error(error)}", _FIX_MEETING)
        )
        speak(found)
        raise VerificationError(found[-1].found) from error
    with watch.step("imports", _FIX_IMPORTS, max(timeout_s, _IMPORTS_TIMEOUT_S)):
        from ...runtime.join import join_launch
    with watch.step("ranks", _FIX_MEETING, timeout_s):
        begin_s = time.perf_counter()
        device = join_launch()
        everyone = dist.gather_objects(device.type)
        met = f"{len(everyone)} on {device.type} met in {time.perf_counter() - begin_s:.2f} s"
        found.append(Check("ranks", "ok", met, None, {"num_ranks": len(everyone)}))
    if len(everyone) > 1:
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
        found.append(_judge_dtype(device, dtype, str(sentence)))
        speeds = measure_speeds(device, dtype)
        everyones = [Speeds(**values) for values in dist.gather_objects(asdict(speeds))]
        found += _judge_speeds(device, dtype, speeds, everyones)
    with watch.step("report", _FIX_COLLECTIVES, timeout_s):
        return dist.gather_objects(found)


def _check_collectives(device: torch.device) -> Check:
    """The default group: what an adapter's tensors and gradients go through.

    Ranks: collective over all ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(_NUM_SUMMED, device=device) % 1000
    mine = (numbers + rank).float()
    dist.sum_(mine)
    sent = (numbers if rank == 0 else torch.zeros_like(numbers)).float()
    dist.broadcast_([sent])
    wrong = []
    if not torch.equal(mine, (numbers * size + size * (size - 1) // 2).float()):  # small whole numbers: exact
        wrong.append("all-reduce")
    if not torch.equal(sent, numbers.float()):
        wrong.append("broadcast")
    if dist.gather_objects(rank) != list(range(size)):
        wrong.append("gather of objects")
    if wrong:
        return Check("collectives", "FAIL", f"wrong values from {', '.join(wrong)}", _FIX_BYTES)
    return Check(
        "collectives", "ok", f"all-reduce, broadcast and gather of objects over {size} ranks give right values"
    )


def _check_gathers(device: torch.device) -> Check:
    """The groups of the base: gathers as the engine starts them, and its comparisons on the host.

    Ranks: collective over all ranks.
    """
    size = dist.get_world_size()
    group = dist.ShardGroup.of_size(size)
    shard_bytes = _UNIT_BYTES[device.type] // size
    pattern = (torch.arange(shard_bytes, dtype=torch.int32, device=device) % 251).to(torch.uint8)
    shard = pattern + 37 * group.rank % 256
    whole = torch.empty(size * shard_bytes, dtype=torch.uint8, device=device)
    fastest_s = float("inf")
    for _ in range(3):
        whole.zero_()
        fastest_s = min(fastest_s, _time_gather(group, whole, shard))
    rows = whole.view(size, -1)
    wrong = [str(rank) for rank in range(size) if not torch.equal(rows[rank], pattern + 37 * rank % 256)]
    if wrong:
        return Check("gathers", "FAIL", f"wrong bytes from rank {', '.join(wrong)}", _FIX_BYTES)
    ranks = group.compare([group.rank])
    if group.compare([7]) is not None or ranks != [[rank] for rank in range(size)]:
        return Check(
            "gathers", "FAIL", f"the gloo group on the host gives {ranks}, expected each rank's number", _FIX_BYTES
        )
    speed = (size - 1) * shard_bytes / fastest_s
    found = f"{whole.numel() >> 20} MiB from {size} ranks: right bytes, {speed / 1e9:.2f} GB/s into each rank"
    return Check("gathers", "ok", found, None, {"gather_bytes_per_s": speed})


def _time_gather(group: dist.ShardGroup, whole: torch.Tensor, shard: torch.Tensor) -> float:
    _synchronize(whole.device)
    begin_s = time.perf_counter()
    group.all_gather(whole, shard).wait()
    _synchronize(whole.device)
    return time.perf_counter() - begin_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_gpu_memory(device: torch.device) -> Check:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    foreign_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    found = f"{torch.cuda.get_device_name(device)}: {show_bytes(free_bytes)} of {show_bytes(total_bytes)} free"
    figures = {"free_bytes": free_bytes, "total_bytes": total_bytes}
    if foreign_bytes > _FOREIGN_BYTES:
        fix = "another program uses this GPU: nvidia-smi names it"
        return Check("GPU memory", "warn", found, fix, figures)
    return Check("GPU memory", "ok", found, None, figures)


def _check_pinning() -> Check:
    """Can host memory be pinned? Local, since a rank that cannot must not leave the others waiting."""
    try:
        torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        found = f"{_PINNED_BYTES >> 20} MiB cannot be pinned: {explain_error(error)}"
        fix = "raise the limit of locked memory (ulimit -l unlimited; docker --ulimit memlock=-1) and free host memory"
        return Check("pinned memory", "FAIL", found, fix)
    return Check("pinned memory", "ok", f"{_PINNED_BYTES >> 20} MiB pinned")


def _judge_dtype(device: torch.device, dtype: torch.dtype, sentence: str) -> Check:
    figures = {"has_bfloat16": int(explain_slow_bfloat16(device) is None)}
    return Check("dtype", "ok", f"auto is {sentence.removeprefix('dtype: ')}", None, figures)


def _judge_speeds(device: torch.device, dtype: torch.dtype, own: Speeds, everyones: Sequence[Speeds]) -> list[Check]:
    if device.type == "cpu":
        found = f"{own.flops_per_s / 1e9:.0f} GFLOPS in {name_of(dtype)}"
        return [
            Check("pinned memory", "skip", "needs a GPU"),
            Check("compute", "ok", found, None, {"flops_per_s": own.flops_per_s}),
        ]
    checks = [_judge_host_link(own.host_bytes_per_s)]
    if own.peer_bytes_per_s is not None:
        checks.append(_judge_peers(own.peer_bytes_per_s, own.host_bytes_per_s))
    best = max(speeds.flops_per_s for speeds in everyones)
    found = f"{own.flops_per_s / 1e12:.0f} TFLOPS in {name_of(dtype)}"
    figures = {"flops_per_s": own.flops_per_s}
    if own.flops_per_s < _SLOW_RANK_SHARE * best:
        fix = "all ranks wait for the slowest: is it another model, hot, or at work for another program (nvidia-smi)?"
        checks.append(Check("compute", "warn", f"{found}, while the fastest has {best / 1e12:.0f}", fix, figures))
    else:
        checks.append(Check("compute", "ok", found, None, figures))
    return checks


def _judge_host_link(speed: float) -> Check:
    found = f"{speed / 1e9:.1f} GB/s from pinned host memory"
    figures = {"host_bytes_per_s": speed}
    if speed < _SLOW_HOST_LINK_BYTES_PER_S:
        fix = "less than half of PCIe 3.0 x16: does the card sit in a full slot (nvidia-smi -q -d PCI)?"
        return Check("host link", "warn", found, fix, figures)
    return Check("host link", "ok", found, None, figures)


def _judge_peers(speed: float, host_speed: float) -> Check:
    pairs = find_pairs_without_peer_access(list(range(torch.cuda.device_count())))
    found = f"{speed / 1e9:.1f} GB/s from other GPUs"
    figures = {"peer_bytes_per_s": speed}
    fix = "`--placement host` may be faster than `shard`; `auto` weighs both"
    if pairs:
        named = ", ".join(f"{a}-{b}" for a, b in pairs[:4]) + (", ..." if len(pairs) > 4 else "")
        return Check("peer link", "warn", f"{found}; no peer access between GPUs {named}", fix, figures)
    if speed < host_speed:
        return Check("peer link", "warn", f"{found}, less than from host memory", fix, figures)
    return Check("peer link", "ok", found, None, figures)
