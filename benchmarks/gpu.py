"""Time lorashard's placements on one GPU beside TRL, plain PEFT, FSDP2 and DeepSpeed, and hold them to bars.

    python benchmarks/gpu.py --minutes 9 --next           measure an 8B-shaped Llama: the next rows, for so long
    python benchmarks/gpu.py --list                       say which rows are measured, and which are not yet
    python benchmarks/gpu.py --table RECORD.json          print the tables of a record
    python benchmarks/gpu.py --device cpu --shape tiny    try it where no GPU is: the GPU's own figures are null

A call ends within `--minutes`. It begins with the rows that tell most, and the record is complete after each row, so
that a GPU for minutes leaves a record, and `--next` goes on where the call before has ended: with the rows that the
record does not have of this GPU, these versions and this code. Each row has processes, and so a CUDA context, of its
own, and a time after which they are ended; what it has not measured by then, or why it failed, is what the record says
of it. The base has random weights; it is written as safetensors (16 GB) for each call, or once if `--folder` names
where. Beside each of lorashard's rows stands what `lorashard plan` foresees of it with the speeds of this machine.

`finetune` rows are runs of that command (an adapter in fp32, autocast, TRL's loss), and `TRL` rows are TRL's trainer
with its arguments and plain PEFT. All others have a bare loop, an adapter in bf16, and the model's own loss: with
16,384 tokens its float32 logits and their gradients take 25 GB and the whole step 46 GB, by the plan. Then two gloo
ranks share the card, so that shards, slots and streams are exercised (NCCL refuses two ranks on one card), and NCCL
runs with one rank; their gradients are compared bit for bit, in torch's deterministic mode. Of a quantized base it is
measured what unpacking takes of a step, and how fast bitsandbytes' kernel and torch's own operations unpack the largest
linear.

The rows of bare loops need no more than `lorashard.load` does: torch, transformers, peft, accelerate, safetensors,
pydantic, psutil and filelock; those of runs need all that lorashard does. DeepSpeed and bitsandbytes are optional.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from common import RECORDS, Outcome, describe_environment, format_table, try_launch
from contenders import trainable_parameters
from gpu_finetune import RUNS, WARMUP_STEPS, make_words, run_finetune
from gpu_jobs import CHECKPOINTING, CHECKS, PLACEMENTS, QUANTIZED, WAYS, describe, make_lora
from gpu_record import Record, Row, measure_rows
from peft import PeftModel
from random_base import LORA_R, SHAPES, Shape

from lorashard.config.placement import PlacementOptions
from lorashard.config.quantization_options import read_quantization
from lorashard.planning.auto import BaseModel, Training, plan_training
from lorashard.planning.hardware import Cluster, Hardware
from lorashard.planning.trace import Microbatch

UNPACKING = "unpacking"
JOBS = Path(__file__).with_name("gpu_jobs.py")
# The most valuable first; peers that need another package last.
NAMES = [*RUNS, "peft", *PLACEMENTS, *QUANTIZED, UNPACKING, *CHECKS, "fsdp2", "zero3"]
PREPARE_S = 120
CHECK_S = 75
UNPACKING_S = 30
SLACK_S = 15
LOSS_TOLERANCE = 0.01
PLAN_TOLERANCE = 0.1
PLAN_SPEED_TOLERANCE = 0.2
# LoRA of an 8B model in bf16 with 4,096 tokens on one H100, as NeMo AutoModel's authors published it.
NEMO_TOKENS_PER_S = 12_473


def main() -> None:
    args = parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers' Trainer takes all that it sees
    if args.table:
        print(make_tables(json.loads(args.table.read_text())))
        return
    rows, record = make_rows(args), open_record(args)
    if args.list:
        print(list_rows(rows, record))
        return
    left = measure(args, [row for row in rows if not (args.next and record.is_measured(row))], record)
    print(make_tables(record.make()))
    if left:
        print(f"\nno time was left for {', '.join(row.name for row in left)}: --next measures them")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="ROW", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--next", action="store_true", help="leave out what the record has already")
    parser.add_argument("--minutes", type=float, default=9, help="of the whole call")
    parser.add_argument("--steps", type=int, default=5, help="measured steps with each batch")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of each contender, loading included; runs have twice"
    )
    parser.add_argument("--folder", type=Path, help="where the base is written, or is from an earlier call")
    parser.add_argument("--out", type=Path, help="the record, which is added to; by default one for each kind of GPU")
    parser.add_argument("--list", action="store_true", help="say which rows are measured, measure nothing")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print the tables of a record, measure nothing")
    return parser.parse_args()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def make_rows(args: argparse.Namespace) -> list[Row]:
    """Return the rows that are asked for, those that tell most first."""
    shape = {"shape": args.shape, **asdict(SHAPES[args.shape])}
    settings = shape | {"lora_r": LORA_R, "dtype": "bfloat16", "device": args.device, "steps": args.steps}
    rows = []
    for name in NAMES:
        if name in RUNS:
            options = settings | {"options": RUNS[name].options}
            rows.append(Row(name, 2 * args.seconds + SLACK_S, options, is_own=RUNS[name].plain is not None))
        elif name in WAYS:
            is_own = name in PLACEMENTS | QUANTIZED
            rows.append(Row(name, args.seconds + SLACK_S, settings | {"optimizer": "torch.optim.AdamW"}, is_own))
        else:
            rows.append(Row(name, UNPACKING_S if name == UNPACKING else CHECK_S, settings))
    return [row for row in rows if row.name in (args.only or NAMES)]


def open_record(args: argparse.Namespace) -> Record:
    """Return the record that the call adds to; it is a file if a GPU is measured, or where it is said to be."""
    about = describe_environment()
    about.pop("date")
    versions, gpus = about.pop("versions"), about["hardware"]["gpus"]
    name = gpus[0] if args.device == "cuda" and gpus else about["hardware"]["cpu"]
    path = args.out
    if path is None and args.device == "cuda":
        path = RECORDS / f"gpu-{slug(name)}-{args.shape}.json"
    return Record(path, {"device": name, "versions": versions}, about, partial(summarize_rows, args))


def summarize_rows(args: argparse.Namespace, rows: dict[str, Any]) -> dict[str, Any]:
    """Return what the record says of all rows together, and add to each what only shows beside another."""
    add_comparisons(rows)
    shape = SHAPES[args.shape]
    config = {"shape": args.shape, **asdict(shape), "lora_r": LORA_R, "dtype": "bfloat16", "device": args.device}
    config |= {"warmup_steps": WARMUP_STEPS, "measured_steps": args.steps}
    return {"config": config, "bars": judge(rows, shape)}


def list_rows(rows: list[Row], record: Record) -> str:
    """Return a table of which rows are measured, and of what is to be measured again because something differs."""
    lines = []
    for row in rows:
        differences, found = record.find_differences(row), record.rows.get(row.name, {})
        state = "pending" if differences is None else "measured"
        if differences:
            state = f"pending: measured with other {', '.join(differences)}"
        speeds = [batch.get("tokens_per_s") for batch in found.get("batches", {}).values()]
        told = found.get("error") or ", ".join(f"{speed:,.0f} tokens/s" for speed in speeds if speed)
        lines.append([row.name, state, told, found.get("date", ""), f"{record.expect_s(row):.0f}"])
    return format_table(["row", "state", "found", "date", "at most, s"], lines)


def measure(args: argparse.Namespace, rows: list[Row], record: Record) -> list[Row]:
    """Measure the rows that there is time for, and return the others."""
    end_s = time.monotonic() + 60 * args.minutes
    if not rows:
        return rows
    shape = SHAPES[args.shape]
    small = "1b" if args.shape == "8b" else args.shape

    def run(what: str, world_size: int, most_s: float, **job: Any) -> dict[str, Any]:
        job |= {"what": what, "device": args.device, "steps": args.steps, "deadline": time.time() + args.seconds}
        return merge_reports(try_launch(JOBS, job, world_size, args.device, most_s))

    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(1) as beside:
        bases = {shape: str((args.folder or Path(temporary)) / shape) for shape in (args.shape, small)}
        prepared = run("prepare", 0, min(PREPARE_S, 60 * args.minutes), bases=bases, shape=args.shape)
        if "error" in prepared:
            raise SystemExit(f"the base was not written, or the link not measured: {prepared['error']}")
        hardware = Hardware(**prepared.pop("speeds"))
        record.about["link"] = prepared

        @cache
        def plan(quantization: str) -> Future[dict[str, Any]]:
            return beside.submit(plan_contenders, quantization, shape, hardware)  # seconds of a core, not of the GPU

        def measure_row(row: Row, most_s: float) -> dict[str, Any]:
            name = row.name
            print(f"{name} ...", file=sys.stderr)
            missing = explain_missing(name, args.device)
            if missing:
                return {"error": missing}
            if name in RUNS:
                return measure_run(name, most_s)
            if name in CHECKS:
                return run(name, 2 if name == "two_gloo_ranks" else 1, most_s, shape=small, folder=bases[small])
            if name == UNPACKING:
                return run(UNPACKING, 0, most_s, shape=args.shape)
            planned = plan(name.partition("_")[2]) if name in PLACEMENTS | QUANTIZED else None
            job = {"name": name, "shape": args.shape, "folder": bases[args.shape]}
            found = run("contender", int(WAYS[name].needs_ranks), most_s, **job)
            return add_predictions(found, lambda: planned.result().get(name, {})) if planned else found

        def measure_run(name: str, most_s: float) -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as own:
                words = make_words(name, shape, bases[args.shape], Path(own), args.steps, args.device)
                if RUNS[name].plain is None:
                    return run("trl", 0, most_s, words=words)
                return run_finetune(words, Path(own), shape, args.device, most_s)

        return measure_rows(rows, record, measure_row, end_s)


def explain_missing(name: str, device: str) -> str | None:
    """Return why a row cannot be measured here, if it cannot."""
    if device == "cpu" and name in ("nccl_alone", "trl_nf4"):
        return "needs a GPU"
    needed = {"zero3": ["deepspeed"], "trl_nf4": ["trl", "datasets", "bitsandbytes"]}
    packages = needed.get(name, ["trl", "datasets"] if name in RUNS else [])
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Bf16Model(BaseModel):
    """A base whose adapter is in bf16 too, as the contenders train it."""

    def build(self, unit_paths: tuple[str, ...] | None = None) -> PeftModel:
        model = super().build(unit_paths)
        for parameter in trainable_parameters(model):
            parameter.data = parameter.data.to(torch.bfloat16)
        return model


def plan_contenders(quantization: str, shape: Shape, hardware: Hardware) -> dict[str, dict[str, Any]]:
    """Return what the plan foresees of each placement of a base, by the contender's name and the batch's tokens.

    Args:
        quantization: of the base; empty for none.
    """
    cluster = Cluster(hardware, 1, 1, free_bytes=2**50)  # what does not fit is measured all the same
    options = PlacementOptions(resident_layers=0, activation_checkpointing_layers="all")
    suffix = f"_{quantization}" if quantization else ""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape.make_config().save_pretrained(folder)
        base = Bf16Model(folder, make_lora(), quantization=read_quantization(quantization or None))
        for rows, tokens in shape.batches:
            microbatch = Microbatch(
                rows, tokens, hardware.device_type, loss="model", is_autocast=False, checkpointing=CHECKPOINTING
            )
            training = Training(microbatch, optimizer="sgd")
            for row in plan_training(base, training, cluster, options).rows:
                # The plan has the adapter and its gradients; AdamW adds two states in the adapter's dtype.
                predicted = {"peak_bytes": row.peak_bytes + row.adapter_bytes, "tokens_per_s": row.tokens_per_s}
                found.setdefault(row.placement.placement + suffix, {})[str(rows * tokens)] = predicted
    return found


def add_predictions(found: dict[str, Any], plan: Callable[[], dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return what was found, with the plan's figures in each batch; a plan that fails costs nothing that was found."""
    try:
        planned = plan()
    except Exception as error:
        return found | {"unplanned": describe(error)}
    for tokens, batch in found.get("batches", {}).items():
        if "step_s" in batch and tokens in planned:
            batch["predicted"] = planned[tokens]
    return found


def merge_reports(outcome: Outcome) -> dict[str, Any]:
    """Return the first rank's report, with the error that ended a rank, if one did."""
    errors = [found["error"] for found in outcome.reports if found and "error" in found]
    error = errors[0] if errors else outcome.error
    return (outcome.reports[0] or {}) | ({"error": error} if error else {})


def add_comparisons(rows: dict[str, Any]) -> None:
    """Add to each row's batches what only shows beside the plan, the link, and the row without lorashard."""
    for name, row in rows.items():
        plain = rows.get((RUNS[name].plain or name) if name in RUNS else "peft", {})
        is_comparable = all(plain.get("key", {}).get(part) == row["key"][part] for part in ("device", "versions"))
        link_bytes_per_s = row.get("link", {}).get("host_to_device_bytes_per_s")
        for tokens, own in row.get("batches", {}).items():
            if "step_s" not in own:
                continue
            predicted = own.get("predicted", {})
            own["plan_error"] = {
                figure: own[figure] / predicted[figure] - 1
                for figure in ("peak_bytes", "tokens_per_s")
                if own.get(figure) and predicted.get(figure)
            }
            own["link_use"] = None
            if link_bytes_per_s and own.get("copied_bytes_per_s") is not None:
                own["link_use"] = own["copied_bytes_per_s"] / link_bytes_per_s
            own["times_plain"] = own["largest_loss_difference"] = None
            other = plain.get("batches", {}).get(tokens, {}) if is_comparable else {}
            if "step_s" in other:
                own["times_plain"] = own["step_s"]["median"] / other["step_s"]["median"]
                pairs = zip(own["losses"], other["losses"], strict=False)  # one may have run out of time
                own["largest_loss_difference"] = max(abs(mine - its) / its for mine, its in pairs)


def judge(rows: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return each bar with the figure that was found and whether it is met; null where nothing was measured."""
    counts = sorted(num_rows * tokens for num_rows, tokens in shape.batches)
    smallest, middle, largest = str(counts[0]), str(counts[len(counts) // 2]), str(counts[-1])

    def read(name: str, tokens: str, key: str) -> Any:
        return rows.get(name, {}).get("batches", {}).get(tokens, {}).get(key)

    def worst(pick: Callable[[dict[str, Any]], float | None], *names: str) -> float | None:
        found = [pick(batch) for name in names for batch in rows.get(name, {}).get("batches", {}).values()]
        return max((value for value in found if value is not None), default=None)

    def plan_error(figure: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda batch: abs(batch["plan_error"][figure]) if figure in batch.get("plan_error", {}) else None

    def get(key: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda batch: batch.get(key)

    seconds = [read(name, largest, "step_s") for name in ("host", "replicate")]
    host_over_resident = seconds[0]["median"] / seconds[1]["median"] if all(seconds) else None
    loops, runs = [*PLACEMENTS, *QUANTIZED], [name for name, run in RUNS.items() if run.plain]
    differing = [rows[name]["differing"] for name in CHECKS if "differing" in rows.get(name, {})]
    fastest = worst(get("tokens_per_s"), *runs) if shape == SHAPES["8b"] else None
    same_loss = [*PLACEMENTS, *(name for name in runs if not {"quantization", "numerics"} & RUNS[name].options.keys())]
    return {
        "fastest finetune, tokens/s, and NeMo's on an H100": bar(fastest, at_least=NEMO_TOKENS_PER_S),
        "resident finetune's step / TRL's": bar(
            worst(get("times_plain"), "finetune", "finetune_auto", "finetune_fused"), at_most=1.02
        ),
        "resident step / plain PEFT's, worst batch": bar(worst(get("times_plain"), "replicate"), at_most=1.02),
        f"host's use of the link, {smallest} tokens": bar(read("host", smallest, "link_use"), at_least=0.85),
        f"host step / resident's, {largest} tokens": bar(host_over_resident, at_most=1.05),
        f"nf4's unpacking / step, {middle} tokens": bar(read("replicate_nf4", middle, "unpacking_share"), at_most=0.1),
        "device allocations after the first step": bar(worst(get("allocations_after_first_step"), *loops), at_most=0),
        "loss difference from plain PEFT": bar(
            worst(get("largest_loss_difference"), *same_loss), at_most=LOSS_TOLERANCE
        ),
        "differing gradients in the checks": bar(sum(differing) if differing else None, at_most=0),
        "peak's difference from the plan's, worst batch": bar(
            worst(plan_error("peak_bytes"), *loops, *runs), at_most=PLAN_TOLERANCE
        ),
        "tokens/s' difference from the plan's, worst batch": bar(
            worst(plan_error("tokens_per_s"), *loops, *runs), at_most=PLAN_SPEED_TOLERANCE
        ),
    }


def bar(found: float | None, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """Return a bar; its limit stands under `at_most` or `at_least`."""
    if at_least is not None:
        return {"found": found, "at_least": at_least, "is_met": None if found is None else found >= at_least}
    return {"found": found, "at_most": at_most, "is_met": None if found is None else found <= at_most}


def make_tables(record: dict[str, Any]) -> str:
    """Return the markdown tables of a record, with a line that says what was measured."""
    config, found = record["config"], record["rows"]
    header = ["", "tokens a step", "step, s", "tokens/s", "planned", "x plain", "exposed wait, s", "use of link"]
    header += ["unpacking", "peak, GiB", "planned, GiB"]
    rows = []
    titles = {name: each.title for name, each in [*RUNS.items(), *WAYS.items()]}
    for name in (name for name in NAMES if name in found and name in titles):
        for tokens, own in sorted(found[name].get("batches", {}).items(), key=lambda item: int(item[0])):
            cells = [titles[name], f"{int(tokens):,}"]
            if "step_s" in own:
                predicted = own.get("predicted", {})
                cells += [f"{own['step_s']['median']:.3f}", f"{own['tokens_per_s']:,.0f}"]
                cells += [show(predicted.get("tokens_per_s"), "{:,.0f}"), show(own["times_plain"], "{:.2f}")]
                cells += [show(own.get("exposed_wait_s"), "{:.3f}"), show(own["link_use"], "{:.0%}")]
                cells += [show(own.get("unpacking_share"), "{:.0%}"), show(own["peak_bytes"], "{:.1f}", 2**30)]
                cells += [show(predicted.get("peak_bytes"), "{:.1f}", 2**30)]
            else:
                cells += [own["error"], *[""] * 8]
            rows.append(cells)
        if "error" in found[name]:
            rows.append([titles[name], "", found[name]["error"], *[""] * 8])
    bars = []
    for title, one in record["bars"].items():
        limit = f"at least {one['at_least']:,g}" if "at_least" in one else f"at most {one['at_most']:g}"
        met = {None: "not measured", True: "yes", False: "no"}[one["is_met"]]
        bars.append([title, limit, show(one["found"], "{:,.3g}"), met])
    words = (
        f"{config['layers']}-layer Llama, hidden {config['hidden']}, random weights, bf16, LoRA r {config['lora_r']} "
        f"on all linears, activation checkpointing where nothing else is said, AdamW; {describe_machine(record)}. Each "
        f"row alone in processes of its own; medians of up to {config['measured_steps']} steps after "
        f"{config['warmup_steps']}."
    )
    checks = [
        f"{name}: {one['error'] if 'error' in one else 'passed' if one['differing'] == 0 else 'FAILED'}"
        for name, one in found.items()
        if name in CHECKS
    ]
    formats = found.get(UNPACKING, {}).get("formats", {})
    unpacked = [
        [name, f"{one['unpack_s']['median'] * 1e3:.3f}", f"{one['bytes_per_s'] / 1e9:.0f}"]
        for name, one in formats.items()
    ]
    tables = [format_table(header, rows), format_table(["bar", "limit", "found", "met"], bars)]
    if unpacked:
        tables.append(format_table(["largest linear unpacked", "ms", "GB/s written"], unpacked))
    return "\n\n".join([*tables, words, *checks])


def describe_machine(record: dict[str, Any]) -> str:
    """Return what the newest row was measured on."""
    if not record["rows"]:
        return "nothing was measured"
    newest = max(record["rows"].values(), key=lambda row: row["date"])
    speed = show(newest["link"]["host_to_device_bytes_per_s"], "; pinned memory is copied to it at {:.1f} GB/s", 1e9)
    cores = "" if record["config"]["device"] == "cuda" else f"{newest['hardware']['cores']} cores of "
    return f"{cores}{newest['key']['device']}{speed}"


def show(value: float | None, form: str, unit: float = 1) -> str:
    return "" if value is None else form.format(value / unit)


if __name__ == "__main__":
    main()
