"""The CUDA path: streams, slots and memory, on one GPU. NCCL between several GPUs is not covered by any test here."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.gpu import DEVICE, NEEDS_GPU
from helpers.tiny import build_base, build_model, find_differences, make_batch, set_checkpointing, take_gradients
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

import lorashard
from lorashard.engine import Engine, HostCopies
from lorashard.model.adapters import base_test
from lorashard.model.homes import ShardedHomes
from lorashard.model.sharding import shard_structure
from lorashard.model.sources import MemorySource
from lorashard.model.units import find_structure
from lorashard.runtime.dist import ShardGroup, Work

pytestmark = NEEDS_GPU
# Layers of 6 MB, an embedding of 25.
SIZES = dict(hidden_size=512, intermediate_size=1536, vocab_size=24576)
DELAY_CYCLES = 2_000_000
PLACEMENTS = (
    {"placement": "replicate"},
    {"placement": "host"},
    {"placement": "host", "prefetch": 0},
    {"placement": "host", "prefetch": 2},
    {"placement": "host", "resident_layers": 2},
    {"placement": "host", "resident_layers": "all"},
    {"placement": "file"},
    {"placement": "file", "prefetch": 0},
    {"placement": "file", "resident_layers": 2},
)


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

    def compare(self, values, deed) -> None:
        return None


class TwoShardsByCollectives(TwoShards):
    """Gathers each of the two shards by a collective of the one rank that there is, so that the works are a backend's.

    NCCL's run on a stream of its own; gloo's in a thread, through host memory, and end on yet another stream.
    """

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        whole.fill_(0xFF)
        torch.cuda._sleep(self._delay_cycles)
        self.num_gathers += 1
        alone = ShardGroup()  # the default process group
        halves = whole.view(2, -1)
        return _Both(alone.all_gather(halves[0], shard), alone.all_gather(halves[1], self.other[shard.data_ptr()]))


class _Both:
    def __init__(self, *works: Work) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def shard_on_one_gpu(
    make_model, delay_cycles: int = 0, prefetch: int = 1, kind: type[TwoShards] = TwoShards
) -> tuple[torch.nn.Module, Engine]:
    """Shard a model over two ranks of which this process is both."""
    groups = kind(0, delay_cycles), kind(1)
    engines, models = [], []
    for group in groups:
        model = make_model()
        structure = find_structure(model, base_test(model))
        make_home = ShardedHomes(False, group, DEVICE, MemorySource(), (), HostCopies(DEVICE))
        engines.append(shard_structure(model, structure, make_home, group, DEVICE, prefetch))
        models.append(model.to(DEVICE))
    for mine, others in zip(engines[0].units, engines[1].units, strict=True):
        groups[0].other[mine.home.shard.data_ptr()] = others.home.shard
    return models[0], engines[0]


def one_step(model) -> dict[str, torch.Tensor]:
    batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(tokens=64).items()}
    model(**batch).loss.backward()
    return take_gradients(model)


def time_forward(model) -> tuple[float, float]:
    """Return after how many seconds the host has queued a forward, and after how many the device has done it."""
    batch = {name: tensor.to(DEVICE) for name, tensor in make_batch().items()}
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    model(**batch)
    host_s = time.perf_counter() - begin_s
    torch.cuda.synchronize()
    return host_s, time.perf_counter() - begin_s


def prepare(model: PeftModel, checkpointing: str) -> PeftModel:
    """Give a model an adapter that depends on nothing but its shapes, and no zeros."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    set_checkpointing(model, checkpointing)
    return model.train()


def make_lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def load(folder: Path, checkpointing: str = "off", **options) -> PeftModel:
    return prepare(lorashard.load(str(folder), make_lora(), device=DEVICE, **options), checkpointing)


def load_plain(folder: Path, checkpointing: str = "off") -> PeftModel:
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
    return prepare(get_peft_model(base, make_lora()), checkpointing)


def delay_copies(monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """Make every copy late, and what it will overwrite NaN at once: whoever reads too early or too late reads that."""
    start = HostCopies.start

    def start_late(copies: HostCopies, pairs) -> Work:
        for target, _ in pairs:
            target.fill_(0xFF)
        torch.cuda._sleep(cycles)
        return start(copies, pairs)

    monkeypatch.setattr(HostCopies, "start", start_late)


def delay_computation(model: PeftModel, cycles: int) -> None:
    """Make the device reach the middle of each layer long after the host has queued what comes next."""
    for layer in model.get_base_model().model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: torch.cuda._sleep(cycles))


class RefusingRuntime:
    """CUDA's runtime, which pins nothing."""

    def __init__(self, runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str):
        return (lambda *_: 2) if name == "cudaHostRegister" else getattr(self._runtime, name)


def find_copying_threads() -> set[threading.Thread]:
    """Return the threads that fill rings of pinned buffers."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("lorashard-copies")}


def count_allocations() -> tuple[int, int]:
    """Return how often torch has asked the device for memory, and how often it was refused at first."""
    stats = torch.cuda.memory_stats(DEVICE)
    return stats["segment.all.allocated"], stats["num_alloc_retries"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A bf16 checkpoint."""
    path = tmp_path_factory.mktemp("base")
    build_base("llama", torch.bfloat16, **SIZES).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def deterministic(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=("nccl", "gloo"))
def process_group(request) -> Iterator[None]:
    """A process group of this process alone."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("delay_cycles", (0, 2_000_000))
@pytest.mark.parametrize("checkpointing", ("off", "non-reentrant"))
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_gradients_equal_plain_peft(checkpointing, delay_cycles, prefetch):
    """A gather that overtakes a slot's last reader, or a reader that overtakes a gather, reads NaN here."""
    make = lambda: build_model(dtype=torch.bfloat16, checkpointing=checkpointing)  # noqa: E731
    expected = one_step(make().to(DEVICE))
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
    before = engine.stats()
    host_s, device_s = time_forward(model)
    after = engine.stats()
    assert after.num_gathers > before.num_gathers
    assert host_s < device_s / 2
    assert after.wait_s > 0


@pytest.mark.parametrize("delay_cycles", (0, DELAY_CYCLES))
@pytest.mark.parametrize("prefetch", (0, 1))
def test_collectives_end_before_their_unit_is_read(process_group, prefetch, delay_cycles):
    """A backend whose `wait` does not hold up the stream that computes gives NaN here, or stale weights."""
    make = lambda: build_model(dtype=torch.bfloat16, checkpointing="non-reentrant")  # noqa: E731
    expected = one_step(make().to(DEVICE))
    model, engine = shard_on_one_gpu(make, delay_cycles, prefetch, TwoShardsByCollectives)
    for _ in range(3):
        assert find_differences(one_step(model), expected) == []
    assert engine.stats().num_gathers > len(engine.units)


@pytest.mark.parametrize("late", ("nothing", "copies", "computation"))
@pytest.mark.parametrize("checkpointing", ("off", "non-reentrant"))
@pytest.mark.parametrize("options", PLACEMENTS, ids=lambda options: "-".join(map(str, options.values())))
def test_every_placement_gives_plain_pefts_gradients(folder, monkeypatch, options, checkpointing, late):
    """A copy that overtakes a slot's last reader, or a reader that overtakes a copy, reads NaN or another layer."""
    expected = one_step(load_plain(folder, checkpointing))
    if late == "copies":
        delay_copies(monkeypatch, DELAY_CYCLES)
    model = load(folder, checkpointing, **options)
    if late == "computation":
        delay_computation(model, DELAY_CYCLES)
    for _ in range(3):
        assert find_differences(one_step(model), expected) == []
    stats = lorashard.stats(model)
    is_resident = options["placement"] == "replicate" or options.get("resident_layers") == "all"
    assert (stats.copied_bytes == 0) == is_resident
    assert (stats.host_bytes_at_rest > 0) == (options["placement"] == "host" and not is_resident)
    if options.get("resident_layers") == 2:
        assert stats.num_resident == 2 and stats.bytes_at_rest > 0


def test_shards_on_the_host_are_pinned(folder):
    """From pageable memory a copy is several times slower, and holds up the host: nothing else would tell."""
    before = find_copying_threads()
    model = load(folder, placement="host")
    assert all(unit.home.shard.is_pinned() for unit in lorashard.api.engine_of(model).units)
    one_step(model)
    assert find_copying_threads() - before == set()


@pytest.mark.parametrize("late", ("nothing", "copies", "computation"))
def test_where_pinning_is_refused_the_ring_copies(folder, monkeypatch, late):
    """The embedding is longer than the whole ring: a buffer that is filled again too early gives wrong weights."""
    expected = one_step(load_plain(folder))
    refusing = RefusingRuntime(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    before = find_copying_threads()
    monkeypatch.setattr("lorashard.engine.copies.RING_BUFFER_BYTES", 2**21)
    if late == "copies":
        delay_copies(monkeypatch, DELAY_CYCLES)
    model = load(folder, placement="host")
    if late == "computation":
        delay_computation(model, DELAY_CYCLES)
    assert not any(unit.home.shard.is_pinned() for unit in lorashard.api.engine_of(model).units)
    for _ in range(3):
        assert find_differences(one_step(model), expected) == []
    assert len(find_copying_threads() - before) == 1


@pytest.mark.parametrize("options", PLACEMENTS, ids=lambda options: "-".join(map(str, options.values())))
def test_no_placement_allocates_after_the_first_step(folder, options):
    """Memory that is asked for in each step fragments the cache, and each request stalls the device."""
    gc.collect()
    torch.cuda.empty_cache()  # what other tests left cached would serve this one
    model = load(folder, "non-reentrant", **options)
    addresses = [slot.address for slot in lorashard.api.engine_of(model).pool]
    one_step(model)
    before = count_allocations(), torch.cuda.memory_reserved(DEVICE)
    for _ in range(3):
        one_step(model)
    assert (count_allocations(), torch.cuda.memory_reserved(DEVICE)) == before
    assert [slot.address for slot in lorashard.api.engine_of(model).pool] == addresses


def test_copies_overlap_the_computation(folder, monkeypatch):
    """A copy that the host waits for leaves the device idle while Python queues the next layer."""
    delay_copies(monkeypatch, 10 * DELAY_CYCLES)
    model = load(folder, placement="host")
    one_step(model)
    before = lorashard.stats(model)
    host_s, device_s = time_forward(model)
    after = lorashard.stats(model)
    assert after.num_copies > before.num_copies
    assert host_s < device_s / 2
    assert after.wait_s > before.wait_s
