"""Train N adapters on each visit of one base, and compare with a run alone: seconds, bytes that move, memory of a job.

    python benchmarks/sweep.py                       measure, write a record, print its table
    python benchmarks/sweep.py --table RECORD.json   print the table of a record

For each placement the arithmetic (an adapter of `replicate` alone, where the engine has nothing to do), a run alone and
the first N jobs of one base take turns in one process group. A turn is as many steps of a job for each of them, so that
it is as long, and as likely to be disturbed, whatever N is. Of the seconds the fastest turn counts, since another
process can only make one slower; processor seconds are those of all threads of a rank. N runs one after another take,
for each job and step, what a run alone takes. The gradients of the first job are compared with those of the run alone,
bit for bit. Memory is the most that a first step takes above what was held before the base, beside what the plan says.

On a CPU the C library keeps the memory that is freed, as a GPU's allocator does: what it hands back, the next step has
to fault in again, and the more activations there are, the more of them it hands back.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    ROOT,
    Sampler,
    add_step_options,
    count_threads,
    describe_environment,
    format_table,
    in_mib,
    launch,
    make_parser,
    return_free_memory,
    run_command,
)
from contenders import (
    ModelSize,
    build_base,
    fill_adapter,
    held_bytes,
    make_batches,
    run_job,
    synchronize,
    trainable_parameters,
)
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel

from lorashard.config.run_config import RunConfig
from lorashard.planning.choose import SweepCosts
from lorashard.planning.hardware import Cluster, HardwareOptions, find_gpu_type, usable_bytes
from lorashard.planning.run_plan import forecast, plan_run

PLACEMENTS = ("shard", "host", "file")
COUNTS = (1, 2, 4, 8)
ARITHMETIC = "arithmetic"
JOB_STEPS_A_TURN = max(COUNTS)  # one step of all jobs, or as many of a run alone
HEADER = ("placement, jobs", "step, s", "x a run's", "processor, s", "x a run's", "beside the arithmetic", "moved, MiB")
PREDICTED = {"model": "meta-llama/Llama-3.3-70B-Instruct", "gpu_type": "rtx4090", "lora_r": 4, "tokens": 512}
KEPT_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
LORA = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@dataclass
class Job:
    """A model with its optimizer and rows."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    rows: dict[str, torch.Tensor]

    def train(self, backward: Callable[[torch.Tensor], None], num_steps: int) -> None:
        """Run steps on the same rows."""
        for _ in range(num_steps):
            self.optimizer.zero_grad(set_to_none=True)
            backward(self.model(**self.rows).loss)
            self.optimizer.step()


@dataclass
class Turns:
    """What one contender took for each job and step, turn by turn."""

    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    moved_bytes: float = 0.0
    held_bytes: int = 0  # at most in the first step, with the base


def main() -> None:
    parser = make_parser(__doc__)
    add_step_options(parser, steps=5)
    parser.set_defaults(layers=4, hidden=384, intermediate=1056, vocab=2000, sequence=64)
    args = parser.parse_args()
    run_rank = partial(run_job, measures={"all": measure_all})
    run_command(args, f"sweep-{args.device}-{args.world_size}", measure, make_table, run_rank)


# -- the parent --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks and return the record."""
    begin_s, predicted = time.monotonic(), predict_streamed()
    sizes = args.layers, args.hidden, args.intermediate, args.vocab, args.lora_r, args.batch, args.sequence
    size = ModelSize(*sizes, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        build_base(size).save_pretrained(folder)
        job = {"measure": "all", "size": asdict(size), "device": args.device, "steps": args.steps, "folder": folder}
        os.environ.update(KEPT_MEMORY)  # which ranks inherit
        ranks = launch(Path(__file__), job, args.world_size, args.device)
        planned = plan_here(folder, size, args)
    config = asdict(size) | {"world_size": args.world_size, "device": args.device, "turns": args.steps}
    config |= {"threads_per_rank": count_threads(args.world_size), "job_steps_a_turn": JOB_STEPS_A_TURN}
    return {
        "benchmark": "sweep",
        **describe_environment(),
        "config": config,
        "duration_s": time.monotonic() - begin_s,
        "placements": {
            placement: {name: join_ranks([rank[placement][name] for rank in ranks]) for name in ranks[0][placement]}
            for placement in ranks[0]
        },
        "planned_job_bytes": planned.job_bytes,
        "predicted": predicted,
    }


def join_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a contender's fastest turn, as slow as its slowest rank, and what a job's step moves on a rank."""
    return {
        "step_s": min(map(max, zip(*(rank["seconds"] for rank in ranks), strict=True))),
        "processor_s": max(min(rank["processor_seconds"]) for rank in ranks),
        "moved_bytes": ranks[0]["moved_bytes"],
        "held_bytes": max(rank["held_bytes"] for rank in ranks),
    }


def plan_here(folder: str, size: ModelSize, args: argparse.Namespace) -> SweepCosts:
    """Return what the plan says of two of these jobs on this machine."""
    options: dict[str, Any] = {
        "model_name_or_path": folder,
        "placement": "shard",
        "dtype": size.dtype,
        "lora_r": size.lora_r,
        "per_device_train_batch_size": size.batch_size,
        "max_length": size.sequence_tokens,
        "activation_checkpointing": False,
        "sweep": {"grid": {"seed": [1, 2]}},
    }
    config = RunConfig(**options | ({"cpu": args.world_size} if args.device == "cpu" else {"gpus": args.world_size}))
    sweep = forecast(config, HardwareOptions())[0].sweep
    assert sweep is not None
    return sweep


def predict_streamed() -> dict[str, Any]:
    """Return what the plan says of jobs on a base that is streamed from host memory to one card."""
    gpu = find_gpu_type(PREDICTED["gpu_type"])
    cluster = Cluster(gpu, 1, 1, usable_bytes(gpu.memory_bytes))
    found = {}
    for count in COUNTS[1:]:
        config = RunConfig(
            model_name_or_path=str(ROOT / "tests/models" / PREDICTED["model"]),
            placement="host",
            dtype="bfloat16",
            lora_r=PREDICTED["lora_r"],
            max_length=PREDICTED["tokens"],
            per_device_train_batch_size=1,
            gpus=1,
            sweep={"grid": {"seed": list(range(count))}},
        )
        sweep = plan_run(config, cluster).sweep
        assert sweep is not None
        found[str(count)] = asdict(sweep)
    return PREDICTED | {"jobs": found}


def make_table(record: dict[str, Any]) -> str:
    """Return the markdown tables of a record, with lines that say what was measured."""
    config, placements = record["config"], record["placements"]
    rows = []
    for placement, contenders in placements.items():
        arithmetic, alone = contenders[ARITHMETIC], contenders["1"]
        for name in map(str, COUNTS):
            found = contenders[name]
            rows.append(
                [
                    f"{placement}, {name}",
                    f"{found['step_s']:.3f}",
                    f"{found['step_s'] / alone['step_s']:.2f}",
                    f"{found['processor_s']:.3f}",
                    f"{found['processor_s'] / alone['processor_s']:.2f}",
                    f"{100 * (found['processor_s'] / arithmetic['processor_s'] - 1):+.1f} %",
                    f"{found['moved_bytes'] / 2**20:,.1f}",
                ]
            )
    most = str(max(COUNTS))
    arithmetic_s = [contenders[ARITHMETIC]["processor_s"] for contenders in placements.values()]
    more = (placements["shard"][most]["held_bytes"] - placements["shard"]["1"]["held_bytes"]) / (max(COUNTS) - 1)
    words = (
        f"{config['num_layers']}-layer Llama, hidden {config['hidden_size']}, fp32, LoRA r {config['lora_r']} on all "
        f"linears, {config['batch_size']} x {config['sequence_tokens']} tokens of each job on each of "
        f"{config['world_size']} ranks; {record['hardware']['cores']} cores of {record['hardware']['cpu']}. All "
        f"figures are of one step of one job on one rank, the fastest of {config['turns']} "
        f"turns of {config['job_steps_a_turn']} such steps; the arithmetic, `replicate` alone, takes "
        f"{min(arithmetic_s):.3f} to {max(arithmetic_s):.3f} s of the processor in the same turns. One more job takes "
        f"{in_mib(more)} MiB on a rank ({most} jobs beside a run alone, `shard`); the plan says "
        f"{in_mib(record['planned_job_bytes'])} MiB."
    )
    predicted = record["predicted"]
    header = ["jobs (predicted)", "step of all, s", "runs in turn, s", "times as fast", "fit"]
    planned = [
        [
            name,
            *(f"{job[key]:,.1f}" if job[key] else "no room" for key in ("step_s", "in_turn_s")),
            f"{job['in_turn_s'] / job['step_s']:.1f}" if job["step_s"] and job["in_turn_s"] else "-",
            f"{job['most_jobs']:,}",
        ]
        for name, job in predicted["jobs"].items()
    ]
    about = (
        f"**A prediction** by `lorashard plan`, run on no GPU: {predicted['model']} in bf16, streamed from host memory "
        f"to one {predicted['gpu_type']}, LoRA r {predicted['lora_r']}, {predicted['tokens']:,} tokens a step for each "
        "job."
    )
    return f"{format_table(HEADER, rows)}\n\n{words}\n\n{format_table(header, planned)}\n\n{about}"


# -- a rank ------------------------------------------------------------------------------------------------------------


def load_jobs(job: dict[str, Any], size: ModelSize, device: torch.device, placement: str, count: int) -> list[Job]:
    """Load `count` jobs on one base; one is a run alone."""
    import lorashard

    lora = LoraConfig(r=size.lora_r, lora_alpha=2 * size.lora_r, **LORA)
    options: dict[str, Any] = {"placement": placement, "dtype": size.torch_dtype, "device": device}
    adapters = {f"job {index}": lora for index in range(count)}
    models = lorashard.load(job["folder"], adapters=adapters, **options)
    batches = make_batches(size, count, dist.get_rank(), device)
    jobs = []
    for model, rows in zip(models.values(), batches, strict=True):
        fill_adapter(model, size.torch_dtype)
        wrapped = DistributedDataParallel(model.train(), broadcast_buffers=False)
        jobs.append(Job(wrapped, torch.optim.AdamW(trainable_parameters(model), lr=1e-4), rows))
    return jobs


def run_jobs(jobs: list[Job], num_steps: int) -> None:
    """Run steps of each of some jobs together; of one without others as a run does."""
    from lorashard.training.jobs import find_turns

    if len(jobs) == 1:
        jobs[0].train(torch.Tensor.backward, num_steps)
        return
    turns = find_turns(jobs[0].model.module)
    turns.run([partial(job.train, turns.backward, num_steps) for job in jobs])


def measure_all(job: dict[str, Any], size: ModelSize, device: torch.device) -> dict[str, Any]:
    """Let a run alone and jobs of one base take turns; return what each took for a job and step, by placement."""
    arithmetic = load_jobs(job, size, device, "replicate", 1)
    return {name: measure_placement(job, size, device, name, arithmetic) for name in PLACEMENTS}


def measure_placement(
    job: dict[str, Any], size: ModelSize, device: torch.device, placement: str, arithmetic: list[Job]
) -> dict[str, Any]:
    import lorashard

    contenders, turns = {ARITHMETIC: arithmetic}, {name: Turns() for name in (ARITHMETIC, *map(str, COUNTS))}
    for count in (1, max(COUNTS)):
        return_free_memory()
        before_bytes = held_bytes(device)
        contenders[str(count)] = own = load_jobs(job, size, device, placement, count)
        return_free_memory()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with Sampler() as sampler:
            run_jobs(own, 1)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else sampler.peak_bytes["RssAnon"]
        turns[str(count)].held_bytes = peak - before_bytes
    alone, together = (trainable_parameters(contenders[str(count)][0].model) for count in (1, max(COUNTS)))
    assert all(torch.equal(mine.grad, other.grad) for mine, other in zip(together, alone, strict=True))
    contenders |= {str(count): contenders[str(max(COUNTS))][:count] for count in COUNTS if count > 1}
    for _ in range(job["steps"]):
        for name, own in contenders.items():
            dist.barrier()
            before = lorashard.stats(own[0].model.module)
            begin_s, processor_s = time.perf_counter(), time.process_time()
            run_jobs(own, JOB_STEPS_A_TURN // len(own))
            synchronize(device)
            turns[name].seconds.append((time.perf_counter() - begin_s) / JOB_STEPS_A_TURN)
            turns[name].processor_seconds.append((time.process_time() - processor_s) / JOB_STEPS_A_TURN)
            after = lorashard.stats(own[0].model.module)
            moved = after.gathered_bytes - before.gathered_bytes + after.copied_bytes - before.copied_bytes
            turns[name].moved_bytes = moved / JOB_STEPS_A_TURN
    return {name: asdict(own) for name, own in turns.items()}


if __name__ == "__main__":
    main()
