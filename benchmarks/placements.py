"""Time lorashard's placements side by side, and hold each against its floor: one model, one LoRA, one batch, one run.

    python benchmarks/placements.py                       measure, write a record, print its table
    python benchmarks/placements.py --table RECORD.json   print the table of a record

All placements live side by side in one process group and take turns, a step each. A step is the same rows for all: in
two microbatches, or for layer-major in one batch that goes through each layer in two parts. The floor of a placement is
the larger of the time that computing takes (`replicate`'s step) and that of moving its bytes at the bandwidth that is
measured here. Gradients of the first step are compared with `replicate`'s, bit for bit (layer-major: closely). A
quantized base is compared with `replicate` in its own format.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Sampler,
    add_step_options,
    count_threads,
    describe_environment,
    format_table,
    in_mib,
    largest,
    launch,
    make_parser,
    return_free_memory,
    run_command,
    summarize,
)
from contenders import ModelSize, build_base, held_bytes, make_batches, run_job, synchronize, trainable_parameters
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel

WARMUP_STEPS = 2
MICROBATCHES = 2
MEMORY_OF = ("replicate", "file", "shard", "host", "replicate, nf4", "shard, nf4", "shard, int8")
LAYER_MAJOR_TOLERANCE = 0.02


@dataclass(frozen=True)
class Variant:
    """One way of placing the base."""

    title: str
    options: dict[str, Any]
    is_layer_major: bool = False

    @property
    def reference(self) -> str:
        """The variant that gathers and copies nothing, and gives the same gradients."""
        quantization = self.options.get("quantization")
        return f"replicate, {quantization}" if quantization else "replicate"


@dataclass
class Steps:
    """What one variant took, turn by turn."""

    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


def list_variants(batch_size: int) -> dict[str, Variant]:
    """Return the variants by name; `batch_size` is that of a microbatch."""
    variants = [Variant("replicate", {"placement": "replicate"}), Variant("file", {"placement": "file"})]
    for placement in ("shard", "host"):
        for more in ({}, {"prefetch": 0}, {"prefetch": 2}, {"resident_layers": 4}):
            title = ", ".join([placement, *(f"{name} {value}" for name, value in more.items())])
            variants.append(Variant(title, {"placement": placement} | more))
        split = {"placement": placement, "layer_microbatch_size": batch_size}
        variants.append(Variant(f"{placement}, layer-major", split, is_layer_major=True))
    for quantization in ("nf4", "int8"):
        for placement in ("replicate", "shard", "host"):
            options = {"placement": placement, "quantization": quantization}
            variants.append(Variant(f"{placement}, {quantization}", options))
    return {variant.title: variant for variant in variants}


def main() -> None:
    args = parse_args()
    run_rank = partial(run_job, measures={"time": measure_time, "memory": measure_memory})
    run_command(args, f"placements-{args.device}-{args.world_size}", measure, make_table, run_rank)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_step_options(parser, steps=5)
    return parser.parse_args()


# -- the parent --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every job and return the record."""
    begin_s = time.monotonic()
    size = ModelSize(args.layers, args.hidden, args.intermediate, args.vocab, args.lora_r, args.batch, args.sequence)
    variants = list_variants(args.batch)
    with tempfile.TemporaryDirectory() as folder:
        build_base(size).save_pretrained(folder)
        job = {"size": asdict(size), "device": args.device, "steps": args.steps, "folder": folder}
        timed = launch(Path(__file__), job | {"measure": "time", "names": list(variants)}, args.world_size, args.device)
        memory = {
            name: launch(Path(__file__), job | {"measure": "memory", "names": [name]}, args.world_size, args.device)
            for name in MEMORY_OF
        }
    tokens = MICROBATCHES * size.batch_size * size.sequence_tokens * args.world_size
    bandwidth = min(rank["gather_bytes_per_s"] for rank in timed)
    # A step takes as long as its slowest rank.
    seconds = {
        name: [max(turn) for turn in zip(*(r["seconds"][name] for r in timed), strict=True)] for name in variants
    }
    found = {}
    for name, own in seconds.items():
        engine = timed[0]["engine"][name]
        compute_s = statistics.median(seconds[variants[name].reference])
        floor_s = max(compute_s, engine["gathered_bytes_per_step"] / bandwidth)
        ratios = [mine / other for mine, other in zip(own, seconds["replicate"], strict=True)]
        against_shard = [mine / other for mine, other in zip(own, seconds["shard"], strict=True)]
        found[name] = {
            "step_s": summarize(own) | {"all": own},
            "tokens_per_s": tokens / statistics.median(own),
            "times_replicate": summarize(ratios),
            "times_shard": summarize(against_shard),
            "floor_s": floor_s,
            "times_floor": statistics.median(own) / floor_s,
            "exposed_wait_s": summarize(w for rank in timed for w in rank["waited"][name]),
            "gradient_error": max(rank["gradient_errors"][name] for rank in timed),
            "engine": engine,
        }
        if name in memory:
            found[name]["memory_bytes"] = largest([rank["memory_bytes"] for rank in memory[name]])
    config = asdict(size) | {"dtype": "bfloat16", "world_size": args.world_size, "device": args.device}
    config |= {"threads_per_rank": count_threads(args.world_size), "microbatches": MICROBATCHES}
    config |= {"warmup_steps": WARMUP_STEPS, "measured_steps": args.steps, "activation_checkpointing": True}
    return {
        "benchmark": "placements",
        **describe_environment(),
        "config": config,
        "duration_s": time.monotonic() - begin_s,
        "gather_bytes_per_s": bandwidth,
        "variants": found,
    }


def make_table(record: dict[str, Any]) -> str:
    """Return the markdown table of a record, with a line that says what was measured."""
    config, hardware = record["config"], record["hardware"]
    header = ["", "step, s", "tokens/s", "x replicate", "x floor", "exposed wait, s", "gathered a step, MiB"]
    header += ["copied a step, MiB", "at rest + slots + workspace, MiB", "anonymous memory, MiB"]
    rows = []
    for name, found in record["variants"].items():
        engine = found["engine"]
        num_bytes = engine["bytes_at_rest"] + engine["host_bytes_at_rest"] + engine["slot_bytes"]
        num_bytes += engine.get("workspace_bytes", 0)
        rows.append(
            [
                name,
                f"{found['step_s']['median']:.2f}",
                f"{found['tokens_per_s']:,.0f}",
                f"{found['times_replicate']['median']:.2f}",
                f"{found['times_floor']:.2f}",
                f"{found['exposed_wait_s']['median']:.2f}",
                in_mib(engine["gathered_bytes_per_step"]),
                in_mib(engine["copied_bytes_per_step"]),
                in_mib(num_bytes),
                in_mib(found["memory_bytes"]["peak"]) if "memory_bytes" in found else "",
            ]
        )
    machine = (
        ", ".join(hardware["gpus"]) if config["device"] == "cuda" else f"{hardware['cores']} cores of {hardware['cpu']}"
    )
    words = (
        f"{config['num_layers']}-layer Llama, hidden {config['hidden_size']}, bf16, LoRA r {config['lora_r']} on all "
        f"linears, activation checkpointing, {config['microbatches']} x {config['batch_size']} x "
        f"{config['sequence_tokens']} tokens a step on each of {config['world_size']} ranks; {machine}. Medians of "
        f"{config['measured_steps']} steps, taken in turn; gathers alone move "
        f"{record['gather_bytes_per_s'] / 1e9:.2f} GB/s."
    )
    return f"{format_table(header, rows)}\n\n{words}"


# -- a rank ------------------------------------------------------------------------------------------------------------


def build(variant: Variant, folder: str, size: ModelSize, device: torch.device) -> DistributedDataParallel:
    """Load the checkpoint as `variant` wants it, with a seeded adapter whose B is not zero, under DDP."""
    import lorashard

    lora = LoraConfig(r=size.lora_r, lora_alpha=2 * size.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
    model = lorashard.load(folder, lora, dtype=torch.bfloat16, device=device, **variant.options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return DistributedDataParallel(
        model.train(), device_ids=[device] if device.type == "cuda" else None, broadcast_buffers=False
    )


def run_step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rows: Any, is_layer_major: bool) -> None:
    """Forward and backward all rows of a step, in one batch or in microbatches, and leave the gradients."""
    optimizer.zero_grad(set_to_none=True)
    if is_layer_major:
        joined = {name: torch.cat([batch[name] for batch in rows]) for name in rows[0]}
        model(**joined).loss.backward()
        return
    for batch in rows[:-1]:
        with model.no_sync():
            (model(**batch).loss / len(rows)).backward()
    (model(**rows[-1]).loss / len(rows)).backward()


def measure_time(job: dict[str, Any], size: ModelSize, device: torch.device) -> dict[str, Any]:
    """Let the variants take turns and return each one's seconds, waits, counts and gradient errors."""
    import lorashard

    variants = {name: variant for name, variant in list_variants(size.batch_size).items() if name in job["names"]}
    models = {name: build(variant, job["folder"], size, device) for name, variant in variants.items()}
    optimizers = {name: torch.optim.AdamW(trainable_parameters(m), lr=1e-4) for name, m in models.items()}
    num_steps = WARMUP_STEPS + job["steps"]
    batches = make_batches(size, num_steps * MICROBATCHES, dist.get_rank(), device)
    steps = [batches[i : i + MICROBATCHES] for i in range(0, len(batches), MICROBATCHES)]
    return_free_memory()
    errors: dict[str, float] = {}
    found = {name: Steps() for name in variants}
    before: dict[str, Any] = {}
    for turn, rows in enumerate(steps):
        if turn == WARMUP_STEPS:
            before = {name: lorashard.stats(model.module) for name, model in models.items()}
        # Back and forth, so that none always comes after the same one.
        for name in list(variants) if turn % 2 == 0 else reversed(variants):
            waited_s = lorashard.stats(models[name].module).wait_s
            dist.barrier()
            synchronize(device)
            begin_s = time.perf_counter()
            run_step(models[name], optimizers[name], rows, variants[name].is_layer_major)
            optimizers[name].step()
            synchronize(device)
            if turn >= WARMUP_STEPS:
                found[name].seconds.append(time.perf_counter() - begin_s)
                found[name].waited.append(lorashard.stats(models[name].module).wait_s - waited_s)
        if turn == 0:
            errors = compare_gradients(models, variants)
    return {
        "seconds": {name: steps.seconds for name, steps in found.items()},
        "waited": {name: steps.waited for name, steps in found.items()},
        "gradient_errors": errors,
        "engine": {
            name: count_per_step(before[name], lorashard.stats(model.module), job["steps"])
            for name, model in models.items()
        },
        "gather_bytes_per_s": measure_gathers(size, device),
    }


def compare_gradients(models: dict[str, Any], variants: dict[str, Variant]) -> dict[str, float]:
    """Return the largest relative difference from the gradients of each one's reference; stop if one is wrong."""
    errors = {}
    for name, model in models.items():
        expected = [parameter.grad for parameter in trainable_parameters(models[variants[name].reference])]
        found = [parameter.grad for parameter in trainable_parameters(model)]
        pairs = [(a.float(), b.float()) for a, b in zip(found, expected, strict=True)]
        errors[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        allowed = LAYER_MAJOR_TOLERANCE if variants[name].is_layer_major else 0.0
        assert errors[name] <= allowed, f"{name}: a gradient differs from its reference's by {errors[name]:.2e}"
    return errors


def count_per_step(before: Any, after: Any, num_steps: int) -> dict[str, float]:
    """Return what the engine did in one step, and the bytes that it holds."""
    return {
        "gathers_per_step": (after.num_gathers - before.num_gathers) / num_steps,
        "gathered_bytes_per_step": (after.gathered_bytes - before.gathered_bytes) / num_steps,
        "copied_bytes_per_step": (after.copied_bytes - before.copied_bytes) / num_steps,
        "bytes_at_rest": after.bytes_at_rest,
        "host_bytes_at_rest": after.host_bytes_at_rest,
        "slot_bytes": after.slot_bytes,
        "workspace_bytes": after.workspace_bytes,
    }


def measure_gathers(size: ModelSize, device: torch.device) -> float:
    """Return the bytes per second of gathers of a layer, one after another with nothing beside them."""
    from lorashard.runtime.dist import ShardGroup

    group = ShardGroup.of_size(dist.get_world_size())
    num_bytes = 2 * (4 * size.hidden_size**2 + 3 * size.hidden_size * size.intermediate_size)
    shard = torch.zeros(num_bytes // group.size, dtype=torch.uint8, device=device)
    whole = torch.zeros(shard.numel() * group.size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(8):
        dist.barrier()
        synchronize(device)
        begin_s = time.perf_counter()
        group.all_gather(whole, shard).wait()
        synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
    return whole.numel() / statistics.median(seconds)


def measure_memory(job: dict[str, Any], size: ModelSize, device: torch.device) -> dict[str, Any]:
    """Return the bytes that one variant, alone on fresh ranks, holds before the model and at its peak."""
    before_bytes = held_bytes(device)
    variant = list_variants(size.batch_size)[job["names"][0]]
    model = build(variant, job["folder"], size, device)
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-4)
    batches = make_batches(size, MICROBATCHES, dist.get_rank(), device)
    return_free_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with Sampler() as sampler:
        for _ in range(2):
            run_step(model, optimizer, batches, variant.is_layer_major)
            optimizer.step()
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else sampler.peak_bytes["RssAnon"]
    return {"memory_bytes": {"before_model": before_bytes, "peak": peak_bytes}}


if __name__ == "__main__":
    main()
