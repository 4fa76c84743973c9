"""The CUDA path: streams, slots and memory, on one GPU. NCCL between several GPUs is not covered by any test here."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from tiny import build_model, find_differences, make_batch, take_gradients

from lorashard.dist import ShardGroup
from lorashard.engine import Engine, HostCopies
from lorashard.model.adapters import base_test
from lorashard.model.homes import ShardedHomes
from lorashard.model.sharding import shard_structure
from lorashard.model.sources import MemorySource
from lorashard.model.units import find_structure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]
SIZES = dict(hidden_size=512, intermediate_size=1536, vocab_size=4096)


class _StreamWork:
    """What a collective leaves on its stream: an event that the waiting stream waits for."""

    def __init__(self) -> None:
        self._done = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


class TwoShards(ShardGroup):
    """Rank 0 of two, which knows rank 1's shards: a gather is two copies on the side stream, behind a delay."""

    def __init__(self, rank: int, delay_cycles: int = 0) -> None:
        super().__init__(rank=rank, size=2)
        self.other: dict[int, torch.Tensor] = {}
        self._delay_cycles = delay_cycles

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> _StreamWork:
        self.num_gathers += 1
        self.gathered_bytes += whole.numel()
        whole.fill_(0xFF)  # whoever reads too early reads NaN
        torch.cuda._sleep(self._delay_cycles)
        whole[: shard.numel()].copy_(shard)
        whole[shard.numel() :].copy_(self.other[shard.data_ptr()])
        return _StreamWork()

    def compare(self, values) -> None:
        return None


def shard_on_one_gpu(
    make_model, delay_cycles: int = 0, prefetch: int = 1, placement: str = "shard"
) -> tuple[torch.nn.Module, Engine]:
    """Shard a model over two ranks of which this process is both."""
    device = torch.device("cuda")
    groups = TwoShards(0, delay_cycles), TwoShards(1)
    engines, models = [], []
    for group in groups:
        model = make_model()
        structure = find_structure(model, base_test(model))
        make_home = ShardedHomes(placement == "host", group, device, MemorySource(), (), HostCopies(device))
        engines.append(shard_structure(model, structure, make_home, group, device, prefetch))
        models.append(model.to(device))
    for mine, others in zip(engines[0].units, engines[1].units, strict=True):
        groups[0].other[mine.home.shard.data_ptr()] = others.home.shard
    return models[0], engines[0]


def one_step(model) -> dict[str, torch.Tensor]:
    batch = {name: tensor.cuda() for name, tensor in make_batch(tokens=64).items()}
    model(**batch).loss.backward()
    return take_gradients(model)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("delay_cycles", (0, 2_000_000))
@pytest.mark.parametrize("checkpointing", ("off", "non-reentrant"))
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_gradients_equal_plain_peft(checkpointing, delay_cycles, prefetch):
    """A gather that overtakes a slot's last reader, or a reader that overtakes a gather, reads NaN here."""
    make = lambda: build_model(dtype=torch.bfloat16, checkpointing=checkpointing)  # noqa: E731
    expected = one_step(make().cuda())
    model, _ = shard_on_one_gpu(make, delay_cycles, prefetch)
    for _ in range(3):
        assert find_differences(one_step(model), expected) == []


def test_nothing_is_allocated_in_the_loop():
    """An allocation in each step fragments the caching allocator until a step runs out of memory that is free."""
    model, engine = shard_on_one_gpu(lambda: build_model(dtype=torch.bfloat16))
    for _ in range(2):
        one_step(model)
    addresses = [slot.address for slot in engine.pool]
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        one_step(model)
    assert [slot.address for slot in engine.pool] == addresses
    assert torch.cuda.memory_reserved() == reserved


def test_a_gather_overlaps_the_computation():
    """With prefetch the host must not wait for a gather: it returns long before the device has done the delays."""
    model, engine = shard_on_one_gpu(lambda: build_model(dtype=torch.bfloat16), delay_cycles=20_000_000)
    one_step(model)
    torch.cuda.synchronize()
    batch = {name: tensor.cuda() for name, tensor in make_batch().items()}
    before = engine.stats().num_gathers
    begin_s = time.perf_counter()
    model(**batch)
    host_s = time.perf_counter() - begin_s
    torch.cuda.synchronize()
    device_s = time.perf_counter() - begin_s
    assert engine.stats().num_gathers > before
    assert host_s < device_s / 2
    assert engine.stats().wait_s > 0
