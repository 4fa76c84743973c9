"""Measure how long loading takes and what it holds, against from_pretrained; and how fast the command line answers.

    python benchmarks/load_and_startup.py                       measure, write a record, print its tables
    python benchmarks/load_and_startup.py --table RECORD.json   print the tables of a record

Loading: fresh ranks load one checkpoint, whose files are in the page cache, each way in turn, and run a first forward:
on a CPU from_pretrained only maps the files, and the weights become resident when they are first read. Start-up: fresh
interpreters, in turn; `python -c pass` is what any Python program costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
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
    largest,
    launch,
    make_parser,
    read_memory,
    report,
    return_free_memory,
    run_command,
    summarize,
)
from contenders import ModelSize, build_base, start_ranks
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import lorashard.api

WAYS = {"from_pretrained": "from_pretrained + get_peft_model", "lorashard": "lorashard.load"}
COMMANDS = {
    "python": "`python -c pass`",
    "lorashard": "`lorashard --help`",
    "plain_imports": "`import lorashard.training.train`",
    "imports": "the same in `quick_imports()`, as each rank has it",
}


def main() -> None:
    args = parse_args()
    run_command(args, f"load_and_startup-cpu-{args.world_size}", measure, make_tables, run_rank)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="loads each way")
    parser.add_argument("--starts", type=int, default=10, help="starts of each command")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the record."""
    size = ModelSize(args.layers, args.hidden, args.intermediate, args.vocab, 16, 1, 256)
    config = asdict(size) | {"dtype": "bfloat16", "world_size": args.world_size, "rounds": args.rounds}
    config |= {"threads_per_rank": count_threads(args.world_size), "starts": args.starts}
    return {
        "benchmark": "load_and_startup",
        **describe_environment(),
        "config": config,
        "start": measure_starts(args.starts),
        "load": measure_loads(size, args.world_size, args.rounds),
    }


# -- start-up ----------------------------------------------------------------------------------------------------------


def measure_starts(count: int) -> dict[str, Any]:
    """Return the wall seconds of each command, and whether `lorashard --help` imports torch."""
    script = str(Path(sys.executable).with_name("lorashard"))
    importing = "from lorashard.runtime.importing import quick_imports"
    quickly = f"{importing}\nwith quick_imports(): import lorashard.training.train"
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "lorashard": [script, "--help"],
        "plain_imports": [sys.executable, "-c", "import lorashard.training.train"],
        "imports": [sys.executable, "-c", quickly],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(count + 1):
        for name, command in commands.items():
            begin_s = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - begin_s)
    trace = subprocess.run([sys.executable, "-X", "importtime", script, "--help"], capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in trace.stderr.splitlines()}
    found: dict[str, Any] = {name: {"wall_s": summarize(values[1:])} for name, values in seconds.items()}
    found["lorashard"]["imports_torch"] = "torch" in imported
    return found


# -- loading -----------------------------------------------------------------------------------------------------------


def measure_loads(size: ModelSize, world_size: int, rounds: int) -> dict[str, Any]:
    """Load one checkpoint each way in turn, on fresh ranks; a load takes as long as its slowest rank."""
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        base = build_base(size)
        base.save_pretrained(folder, max_shard_size="100MB")
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        del base
        for _ in range(rounds):
            for way in WAYS:
                job = {"way": way, "folder": folder, "lora_r": size.lora_r}
                results[way].append(largest(launch(Path(__file__), job, world_size, "cpu")))
    summary = {way: {key: summarize(one[key] for one in found) for key in found[0]} for way, found in results.items()}
    return {"checkpoint_bytes": num_bytes, **summary}


def run_rank(job_path: str) -> None:
    """Load one way and report seconds and memory to the parent."""
    job = json.loads(Path(job_path).read_text())
    device = start_ranks("cpu")
    lora = LoraConfig(r=job["lora_r"], target_modules="all-linear", task_type="CAUSAL_LM")
    before = read_memory()
    dist.barrier()
    with Sampler() as sampler:
        begin_s = time.perf_counter()
        model = load(job["way"], job["folder"], lora, device)
        load_s = time.perf_counter() - begin_s
        peak_load_bytes = sampler.peak_bytes["RssAnon"]
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device=device))
        ready_s = time.perf_counter() - begin_s
    return_free_memory()
    after = read_memory()
    found = {
        "load_s": load_s,
        "ready_s": ready_s,
        "peak_load_anonymous_bytes": peak_load_bytes - before["RssAnon"],
        "anonymous_bytes": after["RssAnon"] - before["RssAnon"],
        "peak_anonymous_bytes": sampler.peak_bytes["RssAnon"] - before["RssAnon"],
        "peak_file_bytes": sampler.peak_bytes["RssFile"] - before["RssFile"],
        "peak_rss_bytes": after["VmHWM"],
        "rss_before_bytes": sum(before[name] for name in ("RssAnon", "RssFile", "RssShmem")),
    }
    report(job_path, found)
    dist.barrier()
    dist.destroy_process_group()


def load(way: str, folder: str, lora: LoraConfig, device: torch.device) -> torch.nn.Module:
    """Return a PeftModel from `folder`."""
    if way == "lorashard":
        return lorashard.api.load(folder, lora=lora, placement="shard", dtype=torch.bfloat16)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device), lora)


# -- tables ------------------------------------------------------------------------------------------------------------


def make_tables(record: dict[str, Any]) -> str:
    """Return the markdown tables of a record."""
    load, start, config = record["load"], record["start"], record["config"]
    columns = {
        "load, s": lambda found: f"{found['load_s']['median']:.2f}",
        "load and first forward, s": lambda found: f"{found['ready_s']['median']:.2f}",
        "peak anonymous memory, MiB": lambda found: in_mib(found["peak_anonymous_bytes"]["median"]),
        "peak mapped files, MiB": lambda found: in_mib(found["peak_file_bytes"]["median"]),
        "peak RSS, MiB": lambda found: in_mib(found["peak_rss_bytes"]["median"]),
    }
    rows = [[f"`{title}`", *(show(load[way]) for show in columns.values())] for way, title in WAYS.items()]
    starts = [[title, f"{start[name]['wall_s']['median']:.2f}"] for name, title in COMMANDS.items()]
    caption = (
        f"A checkpoint of {in_mib(load['checkpoint_bytes'])} MiB on {config['world_size']} CPU ranks, page cache warm; "
        f"medians of {config['rounds']} loads, the largest rank. Anonymous memory and mapped files are counted above "
        "what the process held before; RSS is all of it. On a CPU from_pretrained maps the files and reads nothing."
    )
    return f"{format_table(['', *columns], rows)}\n\n{caption}\n\n{format_table(['command', 'seconds'], starts)}"


if __name__ == "__main__":
    main()
