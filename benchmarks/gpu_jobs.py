"""What the processes that gpu.py starts do: write the base, measure one contender, compare gradients."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import report, return_free_memory, summarize
from contenders import (
    Alone,
    Batch,
    Contender,
    Fsdp2Offload,
    Zero3Offload,
    fill_adapter,
    make_batches,
    start_ranks,
    synchronize,
)
from gpu_finetune import WARMUP_STEPS, measure_trl
from peft import LoraConfig, PeftModel, get_peft_model
from random_base import LORA_R, SHAPES, WEIGHTS_STD, Shape, write_base
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import lorashard
from lorashard.engine import Stats
from lorashard.engine.copies import allocate_host
from lorashard.engine.queues import Queues
from lorashard.engine.streams import SideStream
from lorashard.planning.probe import probe
from lorashard.quantization.format import make_quantizer
from lorashard.quantization.quantized_weight import QuantizedWeight
from lorashard.runtime.dist import ShardGroup
from lorashard.runtime.rank_store import Lookout
from lorashard.runtime.shared_groups import SharedGroup

PASSES = 2
CHECKPOINTING = {"use_reentrant": False}


# -- the contenders ----------------------------------------------------------------------------------------------------


def make_lora() -> LoraConfig:
    return LoraConfig(r=LORA_R, lora_alpha=2 * LORA_R, target_modules="all-linear", task_type="CAUSAL_LM")


def load_on_host(folder: str, lora: LoraConfig, device: torch.device) -> PeftModel:
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return get_peft_model(base, lora, autocast_adapter_dtype=False)


def load_plain(folder: str, lora: LoraConfig, device: torch.device) -> PeftModel:
    return load_on_host(folder, lora, device).to(device)


def load_placed(
    placement: str, folder: str, lora: LoraConfig, device: torch.device, quantization: str | None = None
) -> PeftModel:
    return lorashard.load(folder, lora, placement, dtype=torch.bfloat16, device=device, quantization=quantization)


@dataclass(frozen=True)
class Way:
    """How a contender gets its model from a folder, and how it runs it; `needs_ranks` if only under a launcher."""

    title: str
    load: Callable[[str, LoraConfig, torch.device], PeftModel]
    kind: type[Contender] = Alone
    needs_ranks: bool = False

    def build(self, folder: str, shape: Shape, device: torch.device) -> Contender:
        """Return the contender, with a seeded bf16 adapter on all linears and activation checkpointing."""
        model = self.load(folder, make_lora(), device)
        fill_adapter(model)
        model.gradient_checkpointing_enable(dict(CHECKPOINTING))
        return self.kind(model.train(), shape.size(*shape.batches[0]), device)


PLACEMENTS = {name: Way(f"lorashard, `{name}`", partial(load_placed, name)) for name in ("replicate", "host", "file")}
QUANTIZED = {
    f"{placement}_{quantization}": Way(
        f"lorashard, `{placement}`, {quantization}", partial(load_placed, placement, quantization=quantization)
    )
    for quantization in ("nf4", "int8")
    for placement in ("replicate", "host")
}
WAYS = {
    "peft": Way("plain PEFT, resident", load_plain),
    **PLACEMENTS,
    **QUANTIZED,
    "fsdp2": Way("FSDP2, CPUOffloadPolicy", load_on_host, Fsdp2Offload, needs_ranks=True),
    "zero3": Way("DeepSpeed ZeRO-3, offload_param", load_on_host, Zero3Offload, needs_ranks=True),
}
CHECKS = ("two_gloo_ranks", "nccl_alone")


# -- a process ---------------------------------------------------------------------------------------------------------


def run_job(job_path: str) -> None:
    """Do what the job says; report what was found, as far as it came."""
    job = json.loads(Path(job_path).read_text())
    jobs = {"prepare": prepare, "contender": measure_contender, "two_gloo_ranks": check_ranks, "nccl_alone": check_nccl}
    jobs |= {"unpacking": measure_unpacking, "trl": measure_trl}
    found: dict[str, Any] = {}
    try:
        jobs[job["what"]](job, found, partial(report, job_path, found))
    except Exception as error:  # whatever ends a contender is what the record says of it
        traceback.print_exc()
        found["error"] = describe(error)
        report(job_path, found)
        raise SystemExit(1) from error
    report(job_path, found)
    if dist.is_initialized():
        dist.destroy_process_group()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def start_alone(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def count_allocations(device: torch.device) -> int:
    """Return how often torch has asked the device for memory so far, retries after a refusal included."""
    if device.type == "cpu":
        return 0
    counts = torch.cuda.memory_stats(device)
    return counts["segment.all.allocated"] + counts["num_alloc_retries"]


def prepare(job: dict[str, Any], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Write the bases, and measure the link from host memory to the device, and what a plan takes of the machine."""
    device = start_alone(job["device"])
    begin_s = time.monotonic()
    for shape, folder in job["bases"].items():
        write_base(SHAPES[shape].make_config(), Path(folder), device)
    found["write_s"] = time.monotonic() - begin_s
    found["speeds"] = asdict(probe(device, torch.bfloat16))
    found["buffer_bytes"] = SHAPES[job["shape"]].layer_bytes
    found["host_to_device_bytes_per_s"] = found["device_bytes"] = found["is_pinning_allowed"] = None
    if device.type == "cuda":
        found["device_bytes"] = torch.cuda.get_device_properties(device).total_memory
        source = allocate_host(found["buffer_bytes"], Queues.of(device))[0]
        found["is_pinning_allowed"] = source.is_pinned()
        if not source.is_pinned():
            source = torch.empty(found["buffer_bytes"], dtype=torch.uint8, pin_memory=True)
        found["host_to_device_bytes_per_s"] = measure_link(source.fill_(1), device)


def measure_link(source: torch.Tensor, device: torch.device) -> float:
    """Return the bytes per second of copies of pinned memory to the device, with nothing beside them."""
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return source.numel() / statistics.median(seconds[2:])


def measure_contender(job: dict[str, Any], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Measure one contender with each batch until its time is up."""
    way, shape = WAYS[job["name"]], SHAPES[job["shape"]]
    device = start_ranks(job["device"]) if way.needs_ranks else start_alone(job["device"])
    begin_s = time.monotonic()
    contender = way.build(job["folder"], shape, device)
    return_free_memory()
    synchronize(device)
    found["load_s"] = time.monotonic() - begin_s
    found["allocated_bytes_after_load"] = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    read_stats = partial(lorashard.stats, contender.model) if job["name"] in PLACEMENTS | QUANTIZED else None
    if read_stats:
        names = ("bytes_at_rest", "host_bytes_at_rest", "slot_bytes", "num_slots", "num_resident")
        found["engine"] = {name: getattr(read_stats(), name) for name in names}
    if way.kind is Alone:
        make_optimizer_state(contender)
    found["batches"] = {}
    for rows, tokens in shape.batches:
        name = str(rows * tokens)
        if time.time() > job["deadline"]:
            found["batches"][name] = {"error": "its time was up"}
            continue
        batches = make_batches(shape.size(rows, tokens), WARMUP_STEPS + job["steps"], 0, device)
        try:
            own = found["batches"][name] = measure_batches(contender, read_stats, batches, job["deadline"], device)
            if job["name"] in QUANTIZED:
                own["unpacking_s"] = time_unpacking(contender, batches[0], device)
                own["unpacking_share"] = own["unpacking_s"] / own["step_s"]["median"]
        except torch.OutOfMemoryError as error:
            found["batches"][name] = {"error": describe(error)}
            contender.optimizer.zero_grad(set_to_none=True)
        save()


def make_optimizer_state(contender: Contender) -> None:
    """Make the optimizer allocate its state, which is not lorashard's, before allocations are counted.

    A step with a learning rate of 0 changes no parameter.
    """
    for group in contender.optimizer.param_groups:
        group["lr"], lr = 0.0, group["lr"]
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        contender.update()
        group["lr"] = lr


def measure_batches(
    contender: Contender,
    read_stats: Callable[[], Stats] | None,
    batches: list[Batch],
    deadline: float,
    device: torch.device,
) -> dict[str, Any]:
    """Run a step with each of `batches`, at least one beyond the warm-up, and return what was measured."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()  # what a larger batch has left cached would hide allocations
        torch.cuda.reset_peak_memory_stats(device)
    seconds, waited, copied, losses, allocations = [], [], [], [], []
    for turn, batch in enumerate(batches):
        if turn > WARMUP_STEPS and time.time() > deadline:
            break
        before = read_stats() if read_stats else None
        num_allocations = count_allocations(device)
        synchronize(device)
        begin_s = time.perf_counter()
        losses.append(contender.step(batch))
        synchronize(device)
        step_s = time.perf_counter() - begin_s
        allocations.append(count_allocations(device) - num_allocations)
        if turn < WARMUP_STEPS:
            continue
        seconds.append(step_s)
        if read_stats and before:
            after = read_stats()
            waited.append(after.wait_s - before.wait_s)
            copied.append(after.copied_bytes - before.copied_bytes)
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"the losses are not finite: {losses}")
    median_s = statistics.median(seconds)
    return {
        "step_s": summarize(seconds) | {"all": seconds},
        "tokens_per_s": batches[0]["input_ids"].numel() / median_s,
        "exposed_wait_s": statistics.median(waited) if waited else None,
        "copied_bytes_per_step": statistics.mean(copied) if copied else None,
        "copied_bytes_per_s": statistics.mean(copied) / median_s if copied else None,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
        "allocations_by_step": allocations if is_cuda else None,
        "allocations_after_first_step": sum(allocations[1:]) if is_cuda else None,
        "losses": losses,
    }


class Stopwatch:
    """Measures stretches of a stream's time on a GPU, or of the process's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Begin a stretch, or end the one that has begun."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def read(self) -> list[float]:
        """Return the seconds of each stretch."""
        synchronize(self._device)
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._device.type == "cpu":
            return [end - begin for begin, end in pairs]
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


def time_unpacking(contender: Contender, batch: Batch, device: torch.device) -> float:
    """Return the seconds of one more step in which weights are unpacked."""
    watch, unpack = Stopwatch(device), QuantizedWeight.lend

    def timed(weight: QuantizedWeight, function: Any, index: int) -> torch.Tensor:
        watch.mark()
        values = unpack(weight, function, index)
        watch.mark()
        return values

    with patch.object(QuantizedWeight, "lend", timed):
        contender.step(batch)
        return sum(watch.read())


def measure_unpacking(job: dict[str, Any], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Measure how fast the largest linear of a layer is unpacked to bf16, by each format and way of doing it.

    `nf4` takes the kernel of bitsandbytes or Triton where one can be used, and `nf4, torch` never does.
    """
    device = start_alone(job["device"])
    shape = SHAPES[job["shape"]]
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.empty(shape.intermediate, shape.hidden, dtype=torch.bfloat16, device=device)
    weight.normal_(0, WEIGHTS_STD, generator=generator)
    found["formats"] = measured = {}
    formats = {
        "nf4": lorashard.Quantization("nf4"),
        "nf4, torch": lorashard.Quantization("nf4"),
        "nf4, double": lorashard.Quantization("nf4", double_quant=True),
        "int8": lorashard.Quantization("int8"),
        "fp8": lorashard.Quantization("fp8"),
    }
    expected: torch.Tensor | None = None
    for name, quantization in formats.items():
        with (
            patch("lorashard.quantization.nf4.find_kernel", lambda *_: None) if name == "nf4, torch" else nullcontext()
        ):
            quantizer = make_quantizer(quantization)
            numbers, scales = quantizer.quantize(weight.view(-1), weight.shape)
            like = quantizer.parts(weight.shape)[0]
            parts = [numbers.view(like.dtype).view(like.shape), *quantizer.keep_scales(scales)]
            out = torch.empty_like(weight)
            unpack = quantizer.unpack_in_chunks if name == "nf4, torch" else quantizer.unpack
            watch = Stopwatch(device)
            for _ in range(3 + job["steps"]):
                watch.mark()
                unpack(parts, out)
                watch.mark()
        seconds = watch.read()[3:]
        measured[name] = {"unpack_s": summarize(seconds), "bytes_per_s": out.nbytes / statistics.median(seconds)}
        if name == "nf4":
            expected = out
        elif name == "nf4, torch":
            measured[name]["is_equal"] = expected is not None and torch.equal(out, expected)
        save()


def check_ranks(job: dict[str, Any], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Compare the gradients of `shard` and `host` with those of `replicate`, on two ranks that share the device."""
    device = start_ranks(job["device"], shares_gpu=True)
    compute_deterministically()
    shape = SHAPES[job["shape"]]
    batches = make_batches(shape.size(*shape.batches[0]), PASSES, dist.get_rank(), device)
    expected: list[torch.Tensor] = []
    num_differing = 0
    found["placements"] = {}
    for placement in ("replicate", "shard", "host"):
        contender = Way(placement, partial(load_placed, placement)).build(job["folder"], shape, device)
        gradients, seconds, allocations = [], [], []
        for batch in batches:
            num_allocations = count_allocations(device)
            begin_s = time.perf_counter()
            gradients += take_gradients(contender, batch)
            synchronize(device)
            seconds.append(time.perf_counter() - begin_s)
            allocations.append(count_allocations(device) - num_allocations)
        expected = expected or gradients
        num_differing += count_differing(gradients, expected)
        stats = lorashard.stats(contender.model)
        found["placements"][placement] = {
            "pass_s": seconds,
            "gathered_bytes": stats.gathered_bytes,
            "copied_bytes": stats.copied_bytes,
            "exposed_wait_s": stats.wait_s,
            "allocations_by_pass": allocations if device.type == "cuda" else None,
        }
        del contender, gradients
        gc.collect()
    total = torch.tensor(num_differing)
    dist.all_reduce(total)
    found |= {"num_gradients": len(expected), "differing": int(total)}


def check_nccl(job: dict[str, Any], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Compare lorashard's gradients under DDP with plain PEFT's, and a gather's bytes, with NCCL and one rank."""
    device = start_ranks(job["device"])
    compute_deterministically()
    shape = SHAPES[job["shape"]]
    (batch,) = make_batches(shape.size(*shape.batches[0]), 1, 0, device)
    expected = take_gradients(WAYS["peft"].build(job["folder"], shape, device), batch)
    contender = PLACEMENTS["host"].build(job["folder"], shape, device)
    contender.model = DistributedDataParallel(contender.model, device_ids=[device], broadcast_buffers=False)
    num_differing = count_differing(take_gradients(contender, batch), expected)
    stream = SideStream(device)
    group = ShardGroup(
        gather_group=SharedGroup(dist.new_group([0])),
        control_group=SharedGroup(dist.new_group([0], backend="gloo")),
        lookout=Lookout(0, range(1), 0),
    )
    shard = torch.randint(256, (shape.layer_bytes,), dtype=torch.uint8, device=device)
    whole = torch.zeros_like(shard)
    with stream.after(stream.mark()):
        work = group.all_gather(whole, shard)
    stream.wait(work)
    found["gather_is_exact"] = torch.equal(whole, shard) and group.compare([1]) is None
    found |= {"num_gradients": len(expected), "differing": num_differing + (not found["gather_is_exact"])}


def compute_deterministically() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def take_gradients(contender: Contender, batch: Batch) -> list[torch.Tensor]:
    contender.backward(batch)
    gradients = contender.gradients()
    contender.optimizer.zero_grad(set_to_none=True)
    return gradients


def count_differing(found: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    run_job(parser.parse_args().job)
