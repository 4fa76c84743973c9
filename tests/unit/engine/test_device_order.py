"""The engine as a GPU runs it, rehearsed on a device whose queues work as late as they may: bits, and order.

What each test catches is shown by the mistakes in `tests/mutants` whose names begin with "order:".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.engine import CPU
from helpers.lazy_queues import LazyGroup, LazyQueues, Watch
from helpers.tiny import (
    add_lora,
    build_base,
    fill_adapter,
    find_differences,
    make_batch,
    set_checkpointing,
    take_gradients,
)
from peft import LoraConfig, PeftModel

import lorashard
from lorashard.config.quantization_options import read_quantization
from lorashard.engine import HostCopies
from lorashard.engine.queues import Queues
from lorashard.model.adapters import base_test
from lorashard.model.homes import ShardedHomes, choose_resident
from lorashard.model.quantizing import quantize_structure
from lorashard.model.sharding import engine_of, shard_structure
from lorashard.model.sources import MemorySource
from lorashard.model.units import find_structure
from lorashard.runtime.dist import ShardGroup

Found = dict[str, torch.Tensor]
RING_BUFFER_BYTES = 1000  # a layer goes through it several times
SIZES = dict(num_hidden_layers=5)


@pytest.fixture(autouse=True)
def small_ring(monkeypatch) -> None:
    monkeypatch.setattr("lorashard.engine.copies.RING_BUFFER_BYTES", RING_BUFFER_BYTES)


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    """transformers asks the default group whether all ranks have generated enough."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def rehearsed(queues: LazyQueues) -> Iterator[None]:
    """Let all that the body makes run on `queues`, and all that it does be watched; nothing may be out of order."""
    with pytest.MonkeyPatch.context() as patch, Watch(queues):
        patch.setattr(Queues, "of", lambda device: queues)
        yield
    assert queues.races == []
    assert queues.num_deferred > 0 and queues.num_checked > 0  # or nothing was shown


def make_model(checkpointing: str = "off") -> PeftModel:
    model = add_lora(build_base(**SIZES))
    set_checkpointing(model, checkpointing)
    return model.train()


def shard_as_rank(
    queues: LazyQueues,
    rank: int,
    size: int,
    is_on_host: bool = False,
    resident_layers: int = 0,
    prefetch: int = 1,
    quantization: str | None = None,
    checkpointing: str = "off",
) -> PeftModel:
    """Shard a model over `size` ranks, and return that of `rank`."""
    groups = [LazyGroup(queues, number, size) if size > 1 else ShardGroup() for number in range(size)]
    models = []
    for group in groups:
        model = make_model(checkpointing)
        structure = find_structure(model, base_test(model))
        quantize_structure(structure, read_quantization(quantization))
        resident = choose_resident(structure, resident_layers)
        make_home = ShardedHomes(is_on_host, group, CPU, MemorySource(), resident, HostCopies(CPU))
        shard_structure(model, structure, make_home, group, CPU, prefetch)
        models.append(model)
    for units in zip(*(engine_of(model).units for model in models), strict=True):
        if not units[0].is_resident:
            for group in groups:
                if isinstance(group, LazyGroup):
                    group.learn([unit.home.shard for unit in units])
    return models[rank]


class Stop(Exception):
    """What a user's code may raise."""


def stop(*args: object) -> None:
    raise Stop


def step(model: PeftModel, seed: int, needs_all: bool = True) -> Found:
    output = model(**make_batch(seed))
    output.loss.backward()
    gradients = take_gradients(model, needs_all)
    return {f"{seed}.logits": output.logits.detach(), **{f"{seed}.{name}": value for name, value in gradients.items()}}


def evaluate(model: PeftModel, seed: int) -> Found:
    with torch.inference_mode():
        return {f"{seed}.evaluated": model(**make_batch(seed)).logits.clone()}


def leave_early(model: PeftModel, seed: int) -> Found:
    """Run the first layers alone, while others that were prefetched are on their way, whose slots are needed next."""
    config = model.get_base_model().model.config
    config.num_hidden_layers = 2
    found = evaluate(model, seed) | step(model, seed, needs_all=False)
    config.num_hidden_layers = len(model.get_base_model().model.layers)
    return found


def live(model: PeftModel) -> Found:
    """Return the results of training, evaluation, `generate` before a backward, and training after two exceptions."""
    layers = model.get_base_model().model.layers
    found = step(model, 1) | evaluate(model, 2) | evaluate(model, 3) | leave_early(model, 4)
    output = model(**make_batch(5))
    with torch.no_grad():
        tokens = model.generate(input_ids=make_batch(5)["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
    output.loss.backward()
    found |= {"generated": tokens, **{f"5.{name}": value for name, value in take_gradients(model).items()}}
    for seed, register in enumerate(
        (layers[2].self_attn.register_forward_hook, layers[2].mlp.register_full_backward_hook), 6
    ):
        hook = register(stop)
        with pytest.raises(Stop):
            step(model, seed)
        hook.remove()
        model.zero_grad(set_to_none=True)
        found |= step(model, seed + 10) | evaluate(model, seed + 20)
    return found


WAYS: dict[str, dict[str, Any]] = {
    "shards on the device": dict(rank=0, size=2),
    "no prefetch": dict(rank=1, size=2, prefetch=0),
    "prefetch 2, recomputed": dict(rank=0, size=2, prefetch=2, checkpointing="non-reentrant"),
    "resident layers": dict(rank=0, size=2, resident_layers=2),
    "host, recomputed": dict(rank=0, size=1, is_on_host=True, checkpointing="reentrant"),
    "host, pageable": dict(rank=0, size=1, is_on_host=True, prefetch=2, resident_layers=1, can_pin=False),
    "host, two ranks": dict(rank=1, size=2, is_on_host=True),
    "host, two ranks, pageable": dict(rank=0, size=2, is_on_host=True, prefetch=0, can_pin=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_runs_beside_the_computation_is_in_order(way):
    """Catches a gather or copy that overtakes the last reader of its slot, a computation that does not wait for it, a
    ring buffer that is filled again too early: on a GPU all of these give wrong numbers now and then."""
    options = {"can_pin": True, "checkpointing": "off", **WAYS[way]}
    queues = LazyQueues(seed=len(way), can_pin=options.pop("can_pin"))
    with rehearsed(queues):
        found = live(shard_as_rank(queues, **options))
    assert find_differences(found, live(make_model(options["checkpointing"]))) == []


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("placement", ["file", "host"])
def test_a_base_that_is_loaded_runs_in_order(placement, quantization, tmp_path):
    """Catches the same for homes in files, and for weights that are unpacked when they are read."""
    build_base(**SIZES).save_pretrained(tmp_path)

    def load(placement: str, **options: Any) -> PeftModel:
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = lorashard.load(str(tmp_path), lora, placement, device=CPU, quantization=quantization, **options)
        return fill_adapter(model)

    queues = LazyQueues(seed=3)
    with rehearsed(queues):
        found = live(load(placement, resident_layers=1))
    assert find_differences(found, live(load("replicate"))) == []


@pytest.mark.parametrize("is_on_host", [False, True])
def test_weights_are_written_when_nobody_reads_them(is_on_host):
    """Catches a checkpoint's weights in a pass that was given to the device before, and is done by it after."""
    queues = LazyQueues(seed=4)
    with rehearsed(queues):
        model = shard_as_rank(queues, 0, 1 if is_on_host else 2, is_on_host)
        evaluate(model, 1)
        for unit in engine_of(model).units:
            engine_of(model).write(unit, 0, torch.zeros(unit.weights[0].placeholder.shape))
