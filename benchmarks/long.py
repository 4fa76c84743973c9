"""Train on one long row that the ranks share, and compare with a row on each rank and with the peers that share rows.

    python benchmarks/long.py                       measure, write a record, print its table
    python benchmarks/long.py --table RECORD.json   print the table of a record

Contenders take turns, each on fresh ranks: peers replace functions of torch and transformers for a whole process. In
each turn and for each length a contender computes a first step, whose gradients are compared with those of the whole
model on whole rows in one process, and then steps that are timed; where rows are shared, a rank that computes more than
its slice of one ends the contender. Of the seconds the fastest step counts, as slow as its slowest rank, since another
process can only make one slower; processor seconds are those of all threads. Memory is the most that the first step
takes above what the process held before the model. What a contender cannot run is recorded with its reason.

DeepSpeed is optional: `pip install deepspeed`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Sampler,
    count_threads,
    describe_environment,
    format_table,
    in_mib,
    launch,
    make_parser,
    report,
    return_free_memory,
    run_command,
    summarize,
    try_launch,
)
from contenders import (
    Alone,
    Batch,
    Contender,
    ModelSize,
    add_lora,
    build_base,
    held_bytes,
    make_batches,
    start_ranks,
    synchronize,
)
from long_contenders import CONTENDERS, MODULES, OwnRows, SharedRows

# How far gradients may be from the whole model's, in norm. A peer that is farther computes something else.
GRADIENT_TOLERANCE = 1e-5
PEER_TOLERANCE = 1e-3
OWN = (SharedRows.name, OwnRows.name)
TURN_S = 3600.0
HEADER = ("tokens of a row: contender", "tokens/s", "processor, s", "memory, MiB", "gradient")


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(layers=2, hidden=256, intermediate=704, vocab=2000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--lora-r", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens of a row")
    parser.add_argument("--turns", type=int, default=3, help="of each contender")
    parser.add_argument("--steps", type=int, default=1, help="measured steps of a turn, for each length")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    run_command(args, f"long-{args.device}-{args.world_size}", measure, make_table, run_rank)


# -- the parent --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the turns and return the record."""
    begin_s = time.monotonic()
    sizes = args.layers, args.hidden, args.intermediate, args.vocab, args.lora_r, 1, max(args.lengths)
    heads = args.hidden // args.heads, args.heads // args.kv_heads
    size = ModelSize(*sizes, "float32", *heads)
    job: dict[str, Any] = {"size": asdict(size), "device": args.device, "lengths": args.lengths, "steps": args.steps}
    turns: dict[str, list[Any]] = {name: [] for name in args.only}
    reasons = {name: "not installed" for name in args.only if not all(map(is_installed, MODULES[name]))}
    with tempfile.TemporaryDirectory() as folder:
        job["folder"] = folder
        launch(Path(__file__), job | {"name": Alone.name}, 1, args.device)
        for _ in range(args.turns):
            for name in [name for name in args.only if name not in reasons]:
                outcome = try_launch(Path(__file__), job | {"name": name}, args.world_size, args.device, TURN_S)
                if outcome.error is None:
                    turns[name].append(outcome.reports)
                    continue
                reasons[name] = find_reason(outcome.reports) or outcome.error
                if name in OWN:
                    raise RuntimeError(f"{name}: {reasons[name]}")
    config = asdict(size) | {"world_size": args.world_size, "device": args.device, "lengths": args.lengths}
    config |= {"threads_per_rank": count_threads(args.world_size), "turns": args.turns, "steps_a_turn": args.steps}
    config |= {"optimizer": "torch.optim.AdamW", "activation_checkpointing": True}
    return {
        "benchmark": "long",
        **describe_environment(),
        "config": config,
        "duration_s": time.monotonic() - begin_s,
        "contenders": {
            name: {"does_not_run": reasons[name]} if name in reasons else {"lengths": join(name, turns[name])}
            for name in args.only
        },
    }


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def find_reason(reports: Sequence[Any]) -> str | None:
    """Return what the first rank that failed has said."""
    return next((one["error"] for one in reports if one and "error" in one), None)


def join(name: str, turns: list[list[Any]]) -> dict[str, Any]:
    """Return what was measured of each length over the turns and ranks of a contender."""
    world_size = len(turns[0])
    found = {}
    for length in turns[0][0]["lengths"]:
        measured = [[rank["lengths"][length] for rank in ranks] for ranks in turns]
        # A step takes as long as its slowest rank.
        seconds = [max(step) for ranks in measured for step in zip(*(rank["step_s"] for rank in ranks), strict=True)]
        processor_s = [
            sum(step) for ranks in measured for step in zip(*(rank["processor_s"] for rank in ranks), strict=True)
        ]
        ranks = [rank for turn in measured for rank in turn]
        tokens = int(length) * (world_size if name == OwnRows.name else 1)
        found[length] = {
            "tokens_per_step": tokens,
            "step_s": summarize(seconds) | {"all": seconds},
            "processor_s": summarize(processor_s) | {"all": processor_s},
            "tokens_per_s": tokens / min(seconds),
            "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
            "before_model_bytes": max(rank["before_model_bytes"] for rank in ranks),
            "largest_gradient_error": max(rank["gradient_error"] for rank in ranks),
        }
    return found


def make_table(record: dict[str, Any]) -> str:
    """Return the markdown table of a record, with a line that says what was measured."""
    config, contenders = record["config"], record["contenders"]
    titles = {name: CONTENDERS[name].title.format(size=config["world_size"]) for name in contenders}
    rows = []
    for length in config["lengths"]:
        for name in [name for name in contenders if "lengths" in contenders[name]]:
            one = contenders[name]["lengths"][str(length)]
            cells = [
                f"{one['tokens_per_s']:,.0f}",
                f"{one['processor_s']['min'] / one['tokens_per_step'] * 1000:.2f}",
                in_mib(one["peak_bytes"] - one["before_model_bytes"]),
                f"{one['largest_gradient_error']:.0e}" if one["largest_gradient_error"] else "0",
            ]
            rows.append([f"{length:,}: {titles[name]}", *cells])
    for name in [name for name in contenders if "lengths" not in contenders[name]]:
        rows.append([titles[name], f"does not run: {contenders[name]['does_not_run']}", "", "", ""])
    hardware = record["hardware"]
    machine = ", ".join(hardware["gpus"]) or f"{hardware['cores']} cores of {hardware['cpu']}"
    num_heads = config["hidden_size"] // config["head_dim"]
    words = (
        f"{config['num_layers']}-layer Llama, hidden {config['hidden_size']}, {num_heads} heads, "
        f"{num_heads // config['queries_per_key']} of keys, vocabulary {config['vocab_size']:,}, fp32, LoRA r "
        f"{config['lora_r']} on all linears, activation checkpointing, rows of so many tokens, one at a time, on "
        f"{config['world_size']} ranks; {machine}. The fastest of {config['turns'] * config['steps_a_turn']} steps in "
        f"{config['turns']} turns; the processor seconds of all ranks for 1,000 tokens; the most memory of a rank "
        "above what it held before the model; the largest relative difference of a gradient from the whole model's."
    )
    return f"{format_table(HEADER, rows)}\n\n{words}"


# -- a rank ------------------------------------------------------------------------------------------------------------


def run_rank(job_path: str) -> None:
    """Measure the job's contender; report what was found, as far as it came."""
    job = json.loads(Path(job_path).read_text())
    found: dict[str, Any] = {}
    try:
        device = start_ranks(job["device"])
        measure_one = save_gradients if job["name"] == Alone.name else measure_contender
        measure_one(job, ModelSize(**job["size"]), device, found)
    except Exception as error:  # whatever ends a contender is what the record says of it
        traceback.print_exc()
        report(job_path, found | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        raise SystemExit(1) from error
    report(job_path, found)
    dist.barrier()
    dist.destroy_process_group()


def save_gradients(job: dict[str, Any], size: ModelSize, device: torch.device, found: dict[str, Any]) -> None:
    """Write the gradients of the whole model on the first rank's rows."""
    model = add_lora(build_base(size), size, activation_checkpointing=True).to(device)
    alone = Alone(model, size, device)
    for length in job["lengths"]:
        alone.backward(make_row(size, length, 0, device))
        torch.save([gradient.cpu() for gradient in alone.gradients()], find_gradients(job, length))
        alone.optimizer.zero_grad(set_to_none=True)


def measure_contender(job: dict[str, Any], size: ModelSize, device: torch.device, found: dict[str, Any]) -> None:
    """Put into `found`, for each length, the seconds of steps, the memory of one, and its gradients' difference."""
    for module in MODULES[job["name"]]:
        importlib.import_module(module)
    return_free_memory()
    before_bytes = held_bytes(device)
    model = add_lora(build_base(size), size, activation_checkpointing=True).to(device)
    seen: list[int] = []
    model.get_base_model().model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    contender = CONTENDERS[job["name"]](model, size, device)
    for group in contender.optimizer.param_groups:
        group["lr"] = 0.0  # all lengths are compared with one adapter's gradients
    found["lengths"] = {}
    for length in job["lengths"]:
        row = make_row(size, length, 0, device)
        return_free_memory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with Sampler() as sampler:
            contender.backward(row)
            error = compare_gradients(job, length, contender)
            contender.update()
        check_slices(job, length, seen[-1])
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else sampler.peak_bytes["RssAnon"]
        row = make_row(size, length, dist.get_rank() if job["name"] == OwnRows.name else 0, device)
        seconds, processor_s = [], []
        for _ in range(job["steps"]):
            dist.barrier()
            synchronize(device)
            begin_s, processor_begin_s = time.perf_counter(), time.process_time()
            contender.step(row)
            synchronize(device)
            seconds.append(time.perf_counter() - begin_s)
            processor_s.append(time.process_time() - processor_begin_s)
        found["lengths"][str(length)] = {
            "step_s": seconds,
            "processor_s": processor_s,
            "peak_bytes": peak,
            "before_model_bytes": before_bytes,
            "gradient_error": error,
        }


def make_row(size: ModelSize, length: int, seed: int, device: torch.device) -> Batch:
    """Return one row of random tokens."""
    return make_batches(replace(size, sequence_tokens=length), 1, seed, device)[0]


def find_gradients(job: dict[str, Any], length: int) -> Path:
    return Path(job["folder"]) / f"gradients_{length}.pt"


def check_slices(job: dict[str, Any], length: int, num_tokens: int) -> None:
    """Stop if a rank has computed `num_tokens` of a row of `length`, and that is not its share."""
    share = length if job["name"] == OwnRows.name else length // dist.get_world_size()
    if num_tokens != share:
        raise RuntimeError(f"a rank computes {num_tokens} tokens of a row of {length}, not {share}")


def compare_gradients(job: dict[str, Any], length: int, contender: Contender) -> float:
    """Return the largest relative difference from the whole model's gradients; stop if they are wrong.

    Ranks: collective, since sharded gradients are gathered.
    """
    expected, found = torch.load(find_gradients(job, length), map_location="cpu"), contender.gradients()
    pairs = zip((gradient.cpu().float() for gradient in found), expected, strict=True)
    error = float(torch.stack([(mine - other).norm() / other.norm() for mine, other in pairs]).max())  # or NaN
    at_most = GRADIENT_TOLERANCE if job["name"] in OWN else PEER_TOLERANCE
    if not error <= at_most:
        raise RuntimeError(f"a gradient differs from the whole model's by {error:.1e}, more than {at_most:.0e}")
    return error


if __name__ == "__main__":
    main()
