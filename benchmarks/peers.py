"""Time lorashard and its peers, and measure their memory: one model, one LoRA, one batch, one run.

    python benchmarks/peers.py                       measure, write a record, print its table
    python benchmarks/peers.py --table RECORD.json   print the table of a record

Time: all contenders live side by side in one process group and take turns, a step each, so that a machine that slows
down slows all of them down; the ratios are medians over the turns. Memory: each contender has fresh ranks of its own.
`--dtype float32` is for a CPU without bf16 instructions, where bf16 is some 65 times slower.
Before anything is timed, the gradients of the first step are compared with DDP's, lorashard's bit for bit.

DeepSpeed is optional: `pip install deepspeed`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from dataclasses import asdict
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
from contenders import (
    CONTENDERS,
    Batch,
    Contender,
    ModelSize,
    build_contenders,
    deepspeed_config,
    held_bytes,
    make_batches,
    run_job,
    synchronize,
)

from lorashard.runtime.dist import ShardGroup

WARMUP_STEPS = 2
FLOOR_ROUNDS = 8
MEMORY_STEPS = 2
# How far a peer's gradients may be from DDP's, in norm: FSDP2's were equal, ZeRO-3's 1.5 % off after 12 layers (bf16;
# the difference begins in the last layer and grows with depth; a sum in another order would do that, but the cause was
# not traced). On CUDA lorashard needs it too: flash attention's backward is not deterministic. On a CPU its gradients
# must equal DDP's.
GRADIENT_TOLERANCE = 0.05
LOSS_TOLERANCE = 0.02
SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
# With them a CPU stands for one that has fewer instructions: of oneDNN, MKL and torch's own kernels.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
NOT_INSTALLED = "not installed"


def main() -> None:
    args = parse_args()
    run_rank = partial(run_job, measures={"time": measure_time, "memory": measure_memory})
    name = f"peers-{args.device}-{args.world_size}" + ("-float32" if args.dtype == "float32" else "")
    run_command(args, name, measure, make_table, run_rank)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_step_options(parser, steps=7)
    parser.add_argument("--dtype", choices=list(SHORT_DTYPES), default="bfloat16", help="of the base and the adapters")
    return parser.parse_args()


# -- the parent: start ranks, put together what they measured ----------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every job and return the record."""
    begin_s = time.monotonic()
    shape = (args.layers, args.hidden, args.intermediate, args.vocab, args.lora_r, args.batch, args.sequence)
    size = ModelSize(*shape, dtype=args.dtype)
    names = [name for name in CONTENDERS if name != "zero3" or importlib.util.find_spec("deepspeed")]
    job = {"size": asdict(size), "device": args.device, "steps": args.steps}
    modes = []
    for activation_checkpointing in (False, True):
        job["activation_checkpointing"] = activation_checkpointing
        timed = launch(Path(__file__), job | {"measure": "time", "names": names}, args.world_size, args.device)
        memory = {
            name: launch(Path(__file__), job | {"measure": "memory", "names": [name]}, args.world_size, args.device)
            for name in names
        }
        modes.append(summarize_mode(activation_checkpointing, names, size, timed, memory))
    config = asdict(size) | {"world_size": args.world_size, "device": args.device}
    config |= {"threads_per_rank": count_threads(args.world_size), "optimizer": "torch.optim.AdamW"}
    config |= {"warmup_steps": WARMUP_STEPS, "measured_steps": args.steps, "memory_steps": MEMORY_STEPS}
    config["instructions"] = {name: os.environ[name] for name in INSTRUCTION_LIMITS if name in os.environ}
    config["deepspeed"] = deepspeed_config(size)
    return {
        "benchmark": "peers",
        **describe_environment(),
        "config": config,
        "duration_s": time.monotonic() - begin_s,
        "modes": modes,
    }


def summarize_mode(
    activation_checkpointing: bool, names: list[str], size: ModelSize, timed: list[Any], memory: dict[str, list[Any]]
) -> dict[str, Any]:
    """Put together what the ranks measured with or without activation checkpointing."""
    # A step takes as long as its slowest rank.
    seconds = {name: largest_of_turns([rank["step_s"][name] for rank in timed]) for name in names}
    processor_s = {name: largest_of_turns([rank["processor_s"][name] for rank in timed]) for name in names}
    tokens = size.batch_size * size.sequence_tokens * len(timed)
    contenders: dict[str, Any] = {}
    for name in CONTENDERS:
        if name not in names:
            contenders[name] = {"skipped": NOT_INSTALLED}
            continue
        contenders[name] = {
            "step_s": summarize(seconds[name]) | {"all": seconds[name]},
            "tokens_per_s": tokens / statistics.median(seconds[name]),
            "times_ddp": summarize(own / ddp for own, ddp in zip(seconds[name], seconds["ddp"], strict=True)),
            "fsdp2_times_own": summarize(
                other / own for own, other in zip(seconds[name], seconds["fsdp2"], strict=True)
            ),
            "processor_s": summarize(processor_s[name]) | {"all": processor_s[name]},
            "memory_bytes": largest([rank["memory_bytes"] for rank in memory[name]]),
            "largest_gradient_error": max(rank["gradient_errors"][name] for rank in timed),
            "first_losses": [rank["losses"][name] for rank in timed],
        }
    contenders["lorashard"]["engine"] = timed[0]["engine"]
    contenders["lorashard"]["predicted"] = predict_bytes(size, len(timed))
    if "floor" in timed[0]:
        contenders["lorashard"]["floor"] = largest([rank["floor"] for rank in timed])
    return {"activation_checkpointing": activation_checkpointing, "contenders": contenders}


def predict_bytes(size: ModelSize, world_size: int) -> dict[str, int]:
    """Return what lorashard should hold, to compare with its engine's count; alignment adds a little."""
    hidden, item_bytes = size.hidden_size, size.torch_dtype.itemsize
    layer_bytes = (4 * hidden**2 + 3 * hidden * size.intermediate_size + 2 * hidden) * item_bytes
    embedding_bytes = size.vocab_size * hidden * item_bytes
    head_bytes = embedding_bytes + hidden * item_bytes
    base_bytes = size.num_layers * layer_bytes + embedding_bytes + head_bytes
    # One layer computes, one is prefetched, one may stay; embedding and head take turns in one slot.
    slot_bytes = min(3, size.num_layers) * layer_bytes + head_bytes
    return {"base_bytes": base_bytes, "bytes_at_rest": base_bytes // world_size, "slot_bytes": slot_bytes}


def largest_of_turns(ranks: list[list[float]]) -> list[float]:
    """Return the slowest rank's value of each turn."""
    return [max(turn) for turn in zip(*ranks, strict=True)]


def make_table(record: dict[str, Any]) -> str:
    """Return the markdown tables of a record, with a line that says what was measured."""
    config, hardware = record["config"], record["hardware"]
    is_cuda = config["device"] == "cuda"
    header = ["", "step, s", "tokens/s", "x DDP", "FSDP2 / it", f"{'GPU' if is_cuda else 'anonymous'} memory, MiB"]
    parts = []
    for mode in record["modes"]:
        rows = []
        for name, contender in CONTENDERS.items():
            found = mode["contenders"][name]
            if "skipped" in found:
                rows.append([contender.title, found["skipped"], "", "", "", ""])
                continue
            cells = [
                f"{found['step_s']['median']:.2f}",
                f"{found['tokens_per_s']:,.0f}",
                f"{found['times_ddp']['median']:.2f}",
                f"{found['fsdp2_times_own']['median']:.2f}",
                in_mib(found["memory_bytes"]["peak"]),
            ]
            rows.append([contender.title, *cells])
        parts.append(f"{'With' if mode['activation_checkpointing'] else 'Without'} activation checkpointing:")
        parts.append(format_table(header, rows))
        if "floor" in mode["contenders"]["lorashard"]:
            parts.append(describe_floor(mode["contenders"]))
    machine = ", ".join(hardware["gpus"]) if is_cuda else f"{hardware['cores']} cores of {hardware['cpu']}"
    if config.get("instructions"):
        machine += f" held to {' '.join(f'{name}={value}' for name, value in config['instructions'].items())}"
    dtype = SHORT_DTYPES[config["dtype"]]
    parts.append(
        f"{config['num_layers']}-layer Llama, hidden {config['hidden_size']}, {dtype}, LoRA r {config['lora_r']} on "
        f"all linears, batch {config['batch_size']} x {config['sequence_tokens']} tokens on each of "
        f"{config['world_size']} ranks; {machine}. Medians of {config['measured_steps']} steps, taken in "
        "turn; the peak memory of the largest rank."
    )
    return "\n\n".join(parts)


def describe_floor(contenders: dict[str, Any]) -> str:
    """Return what lorashard's step takes of the processor beyond DDP's, and what its gathers alone take."""
    own, floor = contenders["lorashard"], contenders["lorashard"]["floor"]
    ddp_s = contenders["ddp"]["processor_s"]["median"]
    beyond_s = own["processor_s"]["median"] - ddp_s
    more = "more" if beyond_s > 0 else "less"
    return (
        f"lorashard's step takes {abs(beyond_s):.2f} s {more} of each processor than DDP's {ddp_s:.2f} s. Its "
        f"{own['engine']['gathers_per_step']:.0f} gathers ({own['engine']['gathered_bytes_per_step'] / 1e6:,.0f} MB) "
        f"alone take {floor['gathers_processor_s']:.2f} s over gloo, and {floor['copies_s']:.2f} s as plain copies at "
        "memory speed."
    )


# -- a rank ------------------------------------------------------------------------------------------------------------


def measure_time(job: dict[str, Any], size: ModelSize, device: torch.device) -> dict[str, Any]:
    """Let the contenders take turns and return each one's step seconds, first losses and gradient errors."""
    contenders = build_contenders(job["names"], size, job["activation_checkpointing"], device)
    batches = make_batches(size, WARMUP_STEPS + job["steps"], dist.get_rank(), device)
    losses: dict[str, list[float]] = {name: [contender.backward(batches[0])] for name, contender in contenders.items()}
    errors = compare_gradients(contenders, is_exact=device.type == "cpu")
    for contender in contenders.values():
        contender.update()
    for batch in batches[1:WARMUP_STEPS]:
        for name, contender in contenders.items():
            losses[name].append(contender.step(batch))
    check_losses(losses, is_exact=device.type == "cpu")
    return_free_memory()
    step_s: dict[str, list[float]] = {name: [] for name in contenders}
    processor_s: dict[str, list[float]] = {name: [] for name in contenders}
    engine = EngineCounter(contenders["lorashard"])
    for turn, batch in enumerate(batches[WARMUP_STEPS:]):
        # Back and forth, so that no contender always comes after the same one.
        for name in list(contenders) if turn % 2 == 0 else reversed(contenders):
            wall_s, busy_s = time_step(contenders[name], batch, device)
            step_s[name].append(wall_s)
            processor_s[name].append(busy_s)
    counts = engine.count_per_step(job["steps"])
    return {
        "step_s": step_s,
        "processor_s": processor_s,
        "losses": losses,
        "gradient_errors": errors,
        "engine": counts,
        **({"floor": measure_floor(counts)} if device.type == "cpu" else {}),
    }


def measure_floor(counts: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a step's gathers without anything else, and of copying as many bytes.

    Ranks: collective.
    """
    group = ShardGroup.of_size(dist.get_world_size())
    num_gathers = round(counts["gathers_per_step"])
    shard = torch.ones(int(counts["gathered_bytes_per_step"] / num_gathers / group.size), dtype=torch.uint8)
    rows = torch.empty(group.size, len(shard), dtype=torch.uint8)
    rounds = []
    for _ in range(FLOOR_ROUNDS):
        dist.barrier()
        begin_s, processor_begin_s = time.perf_counter(), time.process_time()
        for _ in range(num_gathers):
            group.all_gather(rows.view(-1), shard).wait()
        gathered_s, processor_s = time.perf_counter(), time.process_time() - processor_begin_s
        for _ in range(num_gathers):
            for row in rows:
                row.copy_(shard)
        rounds.append((gathered_s - begin_s, processor_s, time.perf_counter() - gathered_s))
    return dict(zip(("gathers_s", "gathers_processor_s", "copies_s"), map(min, *rounds), strict=True))


def time_step(contender: Contender, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Return the wall seconds of one step that all ranks begin together, and the CPU seconds of all threads."""
    dist.barrier()
    synchronize(device)
    begin_s, processor_begin_s = time.perf_counter(), time.process_time()
    contender.step(batch)
    synchronize(device)
    return time.perf_counter() - begin_s, time.process_time() - processor_begin_s


def compare_gradients(contenders: dict[str, Contender], is_exact: bool) -> dict[str, float]:
    """Return each contender's largest relative difference from DDP's gradients; stop if one is wrong.

    Ranks: collective, since sharded gradients are gathered.
    """
    expected = contenders["ddp"].gradients()
    errors = {}
    for name, contender in contenders.items():
        found = contender.gradients()
        assert len(found) == len(expected), f"{name}: {len(found)} gradients, DDP has {len(expected)}"
        if name == "lorashard" and is_exact:
            differing = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert differing == 0, f"lorashard: {differing} of {len(expected)} gradients differ from DDP's"
        pairs = [(a.float(), b.float()) for a, b in zip(found, expected, strict=True)]
        errors[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        assert errors[name] <= GRADIENT_TOLERANCE, f"{name}: a gradient differs from DDP's by {errors[name]:.1%}"
    return errors


def check_losses(losses: dict[str, list[float]], is_exact: bool) -> None:
    """Stop if the first steps of a contender do not give DDP's losses; lorashard's to the bit if `is_exact`."""
    if is_exact:
        assert losses["lorashard"] == losses["ddp"], f"lorashard's losses {losses['lorashard']}, DDP's {losses['ddp']}"
    for name, found in losses.items():
        for own, ddp in zip(found, losses["ddp"], strict=True):
            assert abs(own - ddp) <= LOSS_TOLERANCE * ddp, f"{name}: losses {found}, DDP's {losses['ddp']}"


class EngineCounter:
    """What lorashard's engine counted from here on."""

    def __init__(self, contender: Contender) -> None:
        self._model = contender.model
        self._before = self._read()

    def _read(self) -> Any:
        import lorashard

        return lorashard.stats(self._model)

    def count_per_step(self, num_steps: int) -> dict[str, float]:
        """Return counts and waits for one step, and the bytes that the engine holds."""
        before, after = self._before, self._read()
        return {
            "gathers_per_step": (after.num_gathers - before.num_gathers) / num_steps,
            "gathered_bytes_per_step": (after.gathered_bytes - before.gathered_bytes) / num_steps,
            "wait_s_per_step": (after.wait_s - before.wait_s) / num_steps,
            "bytes_at_rest": after.bytes_at_rest,
            "slot_bytes": after.slot_bytes,
            "peak_unsharded_bytes": after.peak_unsharded_bytes,
        }


def measure_memory(job: dict[str, Any], size: ModelSize, device: torch.device) -> dict[str, Any]:
    """Return the bytes that one contender, alone on fresh ranks, holds before the model, at rest and at its peak."""
    before = held_bytes(device)
    contender = build_contenders(job["names"], size, job["activation_checkpointing"], device)[job["names"][0]]
    batches = make_batches(size, MEMORY_STEPS, dist.get_rank(), device)
    return_free_memory()
    at_rest = held_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with Sampler() as sampler:
        for batch in batches:
            contender.step(batch)
    if device.type == "cuda":
        peak = {
            "peak": torch.cuda.max_memory_allocated(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    else:
        shared = {f"peak_{name}": num_bytes for name, num_bytes in sampler.peak_bytes.items() if name != "RssAnon"}
        peak = {"peak": sampler.peak_bytes["RssAnon"]} | shared
    return {"memory_bytes": {"before_model": before, "at_rest": at_rest} | peak}


if __name__ == "__main__":
    main()
