"""Time lorashard's placements on one GPU beside plain PEFT, FSDP2 and DeepSpeed that offload, and hold them to bars.

    python benchmarks/gpu.py                              measure an 8B-shaped Llama, write a record, print its tables
    python benchmarks/gpu.py --table RECORD.json          print the tables of a record
    python benchmarks/gpu.py --device cpu --shape tiny    try it where no GPU is: the GPU's own figures are null

The base has random weights; it is written once as safetensors (16 GB) and used again if `--folder` names where. Each
contender has a process, and so a CUDA context, of its own, and `--seconds` to load and to measure in; what it has not
measured by then, or why it failed, stands in the record, and the whole run ends within 8 minutes. The loss is the
model's own: with 16,384 tokens its float32 logits and their gradients take 25 GB and the whole step 46 GB, by the
plan, whose peaks stand beside those that are measured. Then two gloo ranks share the card, so that shards, slots and
streams are exercised (NCCL refuses two ranks on one card), and NCCL runs with one rank; their gradients are compared
bit for bit, in torch's deterministic mode. Of a quantized base it is measured what unpacking takes of a step, and how
fast bitsandbytes' kernel and torch's own operations unpack the largest linear.

It needs no more than `lorashard.load` does: torch, transformers, peft, accelerate, safetensors, pydantic, psutil and
filelock. DeepSpeed and bitsandbytes are optional: `pip install deepspeed bitsandbytes`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import RECORDS, Outcome, describe_environment, format_table, try_launch, write_record
from contenders import trainable_parameters
from gpu_jobs import CHECKPOINTING, CHECKS, PLACEMENTS, QUANTIZED, WARMUP_STEPS, WAYS, make_lora
from peft import PeftModel
from random_base import LORA_R, SHAPES, Shape

from lorashard.config.placement import PlacementOptions
from lorashard.config.quantization_options import read_quantization
from lorashard.planning.auto import BaseModel, Training, plan_training
from lorashard.planning.hardware import Cluster, find_gpu_type
from lorashard.planning.trace import Microbatch

UNPACKING = "unpacking"
JOBS = Path(__file__).with_name("gpu_jobs.py")
RUN_S = 460
CHECK_S = 75
UNPACKING_S = 30
LOSS_TOLERANCE = 0.01
PLAN_TOLERANCE = 0.1


def main() -> None:
    args = parse_args()
    if args.table:
        print(make_tables(json.loads(args.table.read_text())))
    else:
        record = measure(args)
        if args.out or args.device == "cuda":
            write_record(record, args.out or RECORDS / f"gpu-{slug(record['hardware']['gpus'][0])}.json")
        print(make_tables(record))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=[*WAYS, *CHECKS, UNPACKING], help="measure these")
    parser.add_argument("--steps", type=int, default=5, help="measured steps with each batch")
    parser.add_argument("--seconds", type=float, default=45, help="of each contender, loading included")
    parser.add_argument("--folder", type=Path, help="where the base is written, or is from an earlier run")
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print the tables of a record, measure nothing")
    return parser.parse_args()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every job and return the record."""
    begin_s = time.monotonic()
    shape = SHAPES[args.shape]
    # First: what cannot be planned is told before a GPU's minutes are spent.
    planned = plan_peaks(shape, "cuda") if args.device == "cuda" else {}

    def run(what: str, world_size: int, most_s: float, **job: Any) -> dict[str, Any]:
        left_s = RUN_S - (time.monotonic() - begin_s)
        if left_s < 10:
            return {"error": f"not begun: the {RUN_S} s of the whole run were spent"}
        job |= {"what": what, "device": args.device, "steps": args.steps, "deadline": time.time() + most_s}
        print(f"{job.get('name', what)} ...", file=sys.stderr)
        # A step that has begun by the deadline may end.
        outcome = try_launch(JOBS, job, world_size, args.device, min(most_s + 15, left_s))
        return merge_reports(outcome)

    small = "1b" if args.shape == "8b" else args.shape
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        bases = {shape: str((args.folder or Path(temporary)) / shape) for shape in (args.shape, small)}
        prepared = run("prepare", 0, 120, bases=bases, shape=args.shape)
        if "error" in prepared:
            raise SystemExit(f"the base was not written, or the link not measured: {prepared['error']}")
        # The peers last: if time runs out, it is theirs.
        order = ["peft", *PLACEMENTS, *QUANTIZED, UNPACKING, *CHECKS, "fsdp2", "zero3"]
        for name in sorted(args.only or order, key=order.index):
            if name == "zero3" and not importlib.util.find_spec("deepspeed"):
                found[name] = {"error": "not installed"}
            elif name == "nccl_alone" and args.device == "cpu":
                found[name] = {"error": "needs a GPU"}
            elif name == UNPACKING:
                found[name] = run(UNPACKING, 0, UNPACKING_S, shape=args.shape)
            elif name in CHECKS:
                world_size = 2 if name == "two_gloo_ranks" else 1
                found[name] = run(name, world_size, CHECK_S, shape=small, folder=bases[small])
            else:
                job = {"name": name, "shape": args.shape, "folder": bases[args.shape]}
                found[name] = run("contender", int(WAYS[name].needs_ranks), args.seconds, **job)
    contenders = {name: found[name] for name in WAYS if name in found}
    checks = {name: found[name] for name in CHECKS if name in found}
    add_comparisons(contenders, prepared["host_to_device_bytes_per_s"], planned)
    config = {"shape": args.shape, **asdict(shape), "lora_r": LORA_R, "dtype": "bfloat16"}
    config |= {"device": args.device, "activation_checkpointing": True, "optimizer": "torch.optim.AdamW"}
    config |= {"warmup_steps": WARMUP_STEPS, "measured_steps": args.steps, "seconds_of_each": args.seconds}
    return {
        "benchmark": "gpu",
        **describe_environment(),
        "config": config,
        "duration_s": time.monotonic() - begin_s,
        "link": prepared,
        "contenders": contenders,
        "unpacking": found.get(UNPACKING, {}),
        "checks": checks,
        "bars": judge(contenders, checks, shape),
    }


@dataclass(frozen=True)
class Bf16Model(BaseModel):
    """A base whose adapter is in bf16 too, as the contenders train it."""

    def build(self, unit_paths: tuple[str, ...] | None = None) -> PeftModel:
        model = super().build(unit_paths)
        for parameter in trainable_parameters(model):
            parameter.data = parameter.data.to(torch.bfloat16)
        return model


def plan_peaks(shape: Shape, device_type: str) -> dict[str, dict[str, int]]:
    """Return the bytes that the plan foresees for each placement, and for each batch by its tokens."""
    # Bytes are the same on every GPU, and what does not fit is measured all the same.
    cluster = Cluster(replace(find_gpu_type("h100-sxm"), device_type=device_type), 1, 1, free_bytes=2**50)
    options = PlacementOptions(resident_layers=0, activation_checkpointing_layers="all")
    peaks: dict[str, dict[str, int]] = {name: {} for name in [*PLACEMENTS, *QUANTIZED]}
    with tempfile.TemporaryDirectory() as folder:
        shape.make_config().save_pretrained(folder)
        for quantization, (rows, tokens) in product((None, "nf4", "int8"), shape.batches):
            base = Bf16Model(folder, make_lora(), quantization=read_quantization(quantization))
            microbatch = Microbatch(
                rows, tokens, device_type, loss="model", is_autocast=False, checkpointing=CHECKPOINTING
            )
            training = Training(microbatch, optimizer="sgd")
            for row in plan_training(base, training, cluster, options).rows:
                name = row.placement.placement + (f"_{quantization}" if quantization else "")
                # The plan has the adapter and its gradients; AdamW adds two states in the adapter's dtype.
                if name in peaks:
                    peaks[name][str(rows * tokens)] = row.peak_bytes + row.adapter_bytes
    return peaks


def merge_reports(outcome: Outcome) -> dict[str, Any]:
    """Return the first rank's report, with the error that ended a rank, if one did."""
    errors = [found["error"] for found in outcome.reports if found and "error" in found]
    error = errors[0] if errors else outcome.error
    return (outcome.reports[0] or {}) | ({"error": error} if error else {})


def add_comparisons(
    contenders: dict[str, Any], link_bytes_per_s: float | None, planned: dict[str, dict[str, int]]
) -> None:
    """Add to each contender's batches what only shows beside plain PEFT's, the link and the plan."""
    plain = contenders.get("peft", {}).get("batches", {})
    for name, contender in contenders.items():
        for tokens, own in contender.get("batches", {}).items():
            if "step_s" not in own:
                continue
            own["predicted_peak_bytes"] = planned.get(name, {}).get(tokens)
            own["plan_error"] = None
            if own["predicted_peak_bytes"] and own["peak_bytes"]:
                own["plan_error"] = abs(own["peak_bytes"] / own["predicted_peak_bytes"] - 1)
            own["link_use"] = None
            if link_bytes_per_s and own["copied_bytes_per_s"] is not None:
                own["link_use"] = own["copied_bytes_per_s"] / link_bytes_per_s
            own["times_plain"] = own["largest_loss_difference"] = None
            if "step_s" in plain.get(tokens, {}):
                own["times_plain"] = own["step_s"]["median"] / plain[tokens]["step_s"]["median"]
                pairs = zip(own["losses"], plain[tokens]["losses"], strict=False)  # one may have run out of time
                own["largest_loss_difference"] = max(abs(mine - other) / other for mine, other in pairs)


def judge(contenders: dict[str, Any], checks: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return each bar with the figure that was found and whether it is met; null where nothing was measured."""
    counts = sorted(rows * tokens for rows, tokens in shape.batches)
    smallest, middle, largest = str(counts[0]), str(counts[len(counts) // 2]), str(counts[-1])

    def read(name: str, tokens: str, key: str) -> float | None:
        return contenders.get(name, {}).get("batches", {}).get(tokens, {}).get(key)

    def worst(key: str, *names: str) -> float | None:
        found = [read(name, str(count), key) for name in names for count in counts]
        return max((value for value in found if value is not None), default=None)

    seconds = [read(name, largest, "step_s") for name in ("host", "replicate")]
    host_over_resident = seconds[0]["median"] / seconds[1]["median"] if all(seconds) else None
    own = [*PLACEMENTS, *QUANTIZED]
    differing = [check["differing"] for check in checks.values() if "differing" in check]
    return {
        "resident step / plain PEFT's, worst batch": bar(worst("times_plain", "replicate"), at_most=1.02),
        f"host's use of the link, {smallest} tokens": bar(read("host", smallest, "link_use"), at_least=0.85),
        f"host step / resident's, {largest} tokens": bar(host_over_resident, at_most=1.05),
        f"nf4's unpacking / step, {middle} tokens": bar(read("replicate_nf4", middle, "unpacking_share"), at_most=0.1),
        "device allocations after the first step": bar(worst("allocations_after_first_step", *own), at_most=0),
        "loss difference from plain PEFT": bar(worst("largest_loss_difference", *PLACEMENTS), at_most=LOSS_TOLERANCE),
        "differing gradients in the checks": bar(sum(differing) if differing else None, at_most=0),
        "peak's difference from the plan's, worst batch": bar(worst("plan_error", *own), at_most=PLAN_TOLERANCE),
    }


def bar(found: float | None, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """Return a bar; its limit stands under `at_most` or `at_least`."""
    if at_least is not None:
        return {"found": found, "at_least": at_least, "is_met": None if found is None else found >= at_least}
    return {"found": found, "at_most": at_most, "is_met": None if found is None else found <= at_most}


def make_tables(record: dict[str, Any]) -> str:
    """Return the markdown tables of a record, with a line that says what was measured."""
    config, hardware, link = record["config"], record["hardware"], record["link"]
    header = ["", "tokens a step", "step, s", "tokens/s", "x plain", "exposed wait, s", "use of link"]
    header += ["unpacking", "peak, GiB", "planned, GiB"]
    rows = []
    for name, contender in record["contenders"].items():
        for tokens, own in sorted(contender.get("batches", {}).items(), key=lambda item: int(item[0])):
            cells = [WAYS[name].title, f"{int(tokens):,}"]
            if "step_s" in own:
                cells += [f"{own['step_s']['median']:.3f}", f"{own['tokens_per_s']:,.0f}"]
                cells += [show(own["times_plain"], "{:.2f}"), show(own["exposed_wait_s"], "{:.3f}")]
                cells += [show(own["link_use"], "{:.0%}"), show(own.get("unpacking_share"), "{:.0%}")]
                cells += [show(own["peak_bytes"], "{:.1f}", 2**30)]
                cells += [show(own["predicted_peak_bytes"], "{:.1f}", 2**30)]
            else:
                cells += [own["error"], *[""] * 7]
            rows.append(cells)
        if "error" in contender:
            rows.append([WAYS[name].title, "", contender["error"], *[""] * 7])
    bars = []
    for title, one in record["bars"].items():
        limit = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
        met = {None: "not measured", True: "yes", False: "no"}[one["is_met"]]
        bars.append([title, limit, show(one["found"], "{:.3g}"), met])
    is_cuda = config["device"] == "cuda"
    machine = hardware["gpus"][0] if is_cuda else f"{hardware['cores']} cores of {hardware['cpu']}"
    speed = show(link["host_to_device_bytes_per_s"], "; pinned memory is copied to it at {:.1f} GB/s", 1e9)
    words = (
        f"{config['layers']}-layer Llama, hidden {config['hidden']}, random weights, bf16, LoRA r {config['lora_r']} "
        f"on all linears, activation checkpointing, AdamW; {machine}{speed}. Each contender alone in a process of its "
        f"own; medians of up to {config['measured_steps']} steps after {config['warmup_steps']}."
    )
    checks = [
        f"{name}: {found['error'] if 'error' in found else 'passed' if found['differing'] == 0 else 'FAILED'}"
        for name, found in record["checks"].items()
    ]
    unpacked = [
        [name, f"{one['unpack_s']['median'] * 1e3:.3f}", f"{one['bytes_per_s'] / 1e9:.0f}"]
        for name, one in record["unpacking"].items()
        if name != "error"
    ]
    tables = [format_table(header, rows), format_table(["bar", "limit", "found", "met"], bars)]
    if unpacked:
        tables.append(format_table(["largest linear unpacked", "ms", "GB/s written"], unpacked))
    return "\n\n".join([*tables, words, *checks])


def show(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else form.format(value / unit)


if __name__ == "__main__":
    main()
