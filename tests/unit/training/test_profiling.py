"""What the page about a few steps says."""

from __future__ import annotations

from types import SimpleNamespace

from torch.autograd import DeviceType

from lorashard.model.profiling import describe, sum_up


def make_event(name: str, seconds: float, device: DeviceType = DeviceType.CPU) -> SimpleNamespace:
    time_range = SimpleNamespace(elapsed_us=lambda: seconds * 1e6)
    is_annotation = not name.startswith(("nccl", "Memcpy", "sgemm"))
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=is_annotation, time_range=time_range)


def test_seconds_are_counted_once():
    """The host's call and the device's kernel have one name: adding both doubles the gather."""
    on_host = [make_event("gloo:broadcast", 1), make_event("unshard layers.0", 2), make_event("gloo:all_reduce", 4)]
    others = [make_event("aten::mm", 8), make_event("gloo:all_gather", 16)]  # the trainer gathers its figures
    facts = sum_up([*on_host, *others], total_s=10, exposed_s=3)
    assert facts == dict(total_s=10, compute_s=7, exposed_s=3, gather_s=1, copy_s=2, all_reduce_s=4)
    on_device = [
        make_event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1, DeviceType.CUDA),
        make_event("Memcpy HtoD (Pinned -> Device)", 2, DeviceType.CUDA),
        make_event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 4, DeviceType.CUDA),
        make_event("sgemm", 8, DeviceType.CUDA),
    ]
    host_calls = [make_event("unshard layers.0", 16), make_event("nccl:all_gather", 32)]
    host_calls += [make_event("unshard layers.0: all_gather", 64, DeviceType.CUDA)]  # a host's range
    facts = sum_up([*on_device, *host_calls], total_s=10, exposed_s=3)
    assert (facts["gather_s"], facts["copy_s"], facts["all_reduce_s"]) == (1, 2, 4)


def test_an_uneven_rank_is_named():
    """The rank that holds all others up looks like the only one that does not wait."""
    even = dict(total_s=10.0, compute_s=9.9, exposed_s=0.1, gather_s=1.0, copy_s=0.0, all_reduce_s=0.1)
    waiting = even | dict(compute_s=6.0, exposed_s=4.0)
    assert "**Rank 1 computes 65% longer than rank 0**" in describe([waiting, even, waiting], 3, 5)
    assert "At most 40%" in describe([waiting, even], 3, 5)
    assert "ranks are even" in describe([even, even], 3, 5)
    assert "ank 0" not in describe([even], 3, 3)
