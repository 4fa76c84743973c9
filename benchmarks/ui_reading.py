"""Measure what the web UI takes to open a long run, and to follow it: seconds, bytes read, memory.

    python benchmarks/ui_reading.py                       measure, write a record, print its table
    python benchmarks/ui_reading.py --table RECORD.json   print the table of a record

The run's folder is made up: a line of metrics and one of each rank for every step, an evaluation now and then, a log
with a progress bar. A fresh process opens it (the files are in the page cache), and then refreshes it again and again,
each time after ten more steps have been written. It imports neither torch nor Gradio: memory is that of the reading.
Seconds are those that the process computes, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import describe_environment, format_table, in_mib, launch, read_memory, report, run_command, summarize

STEPS_BETWEEN_EVALUATIONS = 500
NEW_STEPS = 10
CURVES = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_s")
CHARTS_OF_RANKS = ("memory_bytes", "peak_bytes", "wait_share")
BEGIN_S = 1.7e9
STEP_S = 0.5


def main() -> None:
    args = parse_args()
    run_command(args, f"ui_reading-{args.steps}x{args.world_size}", measure, make_table, run_reader)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="lines of each file")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30, help="refreshes")
    parser.add_argument("--out", type=Path, help="where to write the record")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print what a record says, measure nothing")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Make up a run and have a fresh process read it."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "long")
        make_run(folder, args.steps, args.world_size)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*.jsonl"))
        job = {"root": root, "steps": args.steps, "world_size": args.world_size, "rounds": args.rounds}
        (found,) = launch(Path(__file__), job, 0, "cpu")
    return {
        "benchmark": "ui_reading",
        "config": {"steps": args.steps, "world_size": args.world_size, "rounds": args.rounds, "new_steps": NEW_STEPS},
        "environment": describe_environment(),
        "jsonl_bytes": num_bytes,
        "measured": found,
    }


def make_run(folder: Path, num_steps: int, world_size: int) -> None:
    """Write the folder of a run that trains."""
    for name in ("ranks", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text("model_name_or_path: org/model\ndataset: rows.jsonl\nmethod: sft\n")
    append_steps(folder, range(1, num_steps + 1), world_size)


def append_steps(folder: Path, steps: range, world_size: int) -> None:
    """Write the lines of steps, as a run does."""
    random.seed(steps.start)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps(make_metrics(step)) + "\n")
            if step % STEPS_BETWEEN_EVALUATIONS == 0:
                line = {"step": step, "time": BEGIN_S + step * STEP_S, "eval_loss": 2 / math.log(step + 9)}
                file.write(json.dumps(line) + "\n")
    for rank in range(world_size):
        with (folder / f"ranks/rank_{rank}.jsonl").open("a") as file:
            for step in steps:
                file.write(json.dumps(make_rank_line(step, rank)) + "\n")
    with (folder / "logs/rank_0.log").open("a") as file:
        for step in steps:
            file.write(
                f"\r {step:>9} steps |#########         | {step / 3:.1f}s\r{{'loss': '1.234', 'step': '{step}'}}\n"
            )
    status = {"phase": "train", "step": steps[-1], "max_steps": 2 * steps[-1], "world_size": world_size}
    (folder / "status.json").write_text(json.dumps(status | {"time": time.time(), "begin_s": BEGIN_S}))


def make_metrics(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "time": BEGIN_S + step * STEP_S,
        "loss": 3 / math.log(step + 9) + random.gauss(0, 0.05),
        "grad_norm": abs(random.gauss(1, 0.2)),
        "learning_rate": 2e-4 * (1 - step / 1e6),
        "entropy": random.random(),
        "mean_token_accuracy": random.random(),
        "num_tokens": step * 8192.0,
        "epoch": step / 5e4,
        "tokens_per_s": round(random.gauss(16000, 300), 1),
    }


def make_rank_line(step: int, rank: int) -> dict[str, Any]:
    return {
        "step": step,
        "time": BEGIN_S + step * STEP_S,
        "base_bytes": 16060522496,
        "bytes_at_rest": 2007565312,
        "host_bytes_at_rest": 0,
        "slot_bytes": 1090519040,
        "peak_unsharded_bytes": 1090519040,
        "gathers": step * 64,
        "gathered_bytes": step * 31036489728,
        "copied_bytes": 0,
        "wait_s": round(step * 0.04 * (1 + rank / 10), 4),
        "rss_bytes": 3400000000 + step % 4096,
        "device_peak_bytes": 21474836480 + step % 1024,
        "device_total_bytes": 85899345920,
        "device_used_bytes": 23622320128 + step % 4096,
        "utilization_percent": random.randint(80, 100),
        "temperature_c": random.randint(55, 70),
    }


def run_reader(job_path: str) -> None:
    """Open the run of a job and follow it, as the page of a run does."""
    job = json.loads(Path(job_path).read_text())
    from lorashard_ui.reading.runs import Runs

    runs = Runs(Path(job["root"]))
    before = read_memory()
    opened: dict[str, float] = {}
    timed(opened, "table", lambda: runs.list())
    reader = runs.get("long")
    ways: dict[str, Callable[[], Any]] = {
        "top": lambda: (reader.summary(), reader.progress()),
        "curves": lambda: reader.series(CURVES, 500, 0.6),
        "ranks": lambda: (reader.ranks(), [reader.rank_series(name, 500) for name in CHARTS_OF_RANKS]),
        "alerts": lambda: reader.alerts(),
        "log": lambda: reader.log(0),
        "search": lambda: reader.log(0, "'step': '77'"),
    }
    for name, do in ways.items():
        timed(opened, name, do)
    after = read_memory()
    refreshed: dict[str, list[float]] = {"table": []} | {name: [] for name in ways}
    read_bytes = []
    for number in range(job["rounds"]):
        first = job["steps"] + 1 + number * NEW_STEPS
        append_steps(Path(job["root"], "long"), range(first, first + NEW_STEPS), job["world_size"])
        seconds: dict[str, float] = {}
        begin_bytes = count_read_bytes()
        timed(seconds, "table", lambda: runs.list())
        for name, do in ways.items():
            if name == "log":
                read_bytes.append(count_read_bytes() - begin_bytes)
            timed(seconds, name, do)
        for name, value in seconds.items():
            refreshed[name].append(value)
    result = {
        "first_s": opened,
        "refresh_s": {name: summarize(values) for name, values in refreshed.items()},
        "refresh_read_bytes": summarize(read_bytes),
        "rss_before_bytes": before["RssAnon"],
        "rss_bytes": after["RssAnon"],
        "rss_followed_bytes": read_memory()["RssAnon"],
    }
    report(job_path, result)


def timed(seconds: dict[str, float], name: str, do: Callable[[], Any]) -> None:
    begin_s = time.process_time()
    do()
    seconds[name] = time.process_time() - begin_s


def count_read_bytes() -> int:
    """Return how many bytes this process has asked files for so far."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def make_table(record: dict[str, Any]) -> str:
    """Return what a person waits for, and what it takes."""
    found, config = record["measured"], record["config"]
    names = {
        "table": "table of runs",
        "top": "summary and progress",
        "curves": "five curves, smoothed",
        "ranks": "table and three charts of all ranks",
        "alerts": "alerts",
        "log": "end of a log",
        "search": "search in a log",
    }
    rows = [
        (text, f"{found['first_s'][name] * 1e3:,.1f} ms", f"{found['refresh_s'][name]['median'] * 1e3:,.1f} ms")
        for name, text in names.items()
    ]
    grown = found["rss_followed_bytes"] - found["rss_before_bytes"]
    rows.append(("memory, beside the program", "", f"{in_mib(grown)} MiB"))
    rows.append(("read by a refresh, but for logs", "", f"{found['refresh_read_bytes']['median'] / 2**10:,.0f} KiB"))
    steps, ranks = f"{config['steps']:,} steps", f"{config['world_size']} ranks"
    header = (f"{steps}, {ranks} ({in_mib(record['jsonl_bytes'])} MiB of lines)", "opened", "refreshed")
    return format_table(header, rows)


if __name__ == "__main__":
    main()
