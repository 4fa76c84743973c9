"""What a sweep costs: many adapters on each visit of one base, beside a run for each of them."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config.placement import PlacementOptions, ResolvedPlacement
from .activations import join_activations
from .choose import Plan, SweepCosts, make_plan
from .costs import Row, Workload
from .hardware import Cluster
from .memory import count_trained_bytes
from .size import ModelSize

# One job alone: the base with its adapter, and what its step trains on.
JobCosts = tuple[ModelSize, Workload]

_MOST_JOBS = 4096  # that are looked for


def count_kinds(jobs: Sequence[JobCosts]) -> list[tuple[JobCosts, int]]:
    """Return the jobs that cost differently, and how many there are of each."""
    kinds: list[tuple[JobCosts, int]] = []
    for job in jobs:
        index = next((i for i, (known, _) in enumerate(kinds) if known == job), None)
        if index is None:
            kinds.append((job, 1))
        else:
            kinds[index] = job, kinds[index][1] + 1
    return kinds


def join_jobs(kinds: Sequence[tuple[JobCosts, int]]) -> JobCosts:
    """Return what all jobs of a sweep are together, on one base: the same as it was where there is one job."""
    if sum(count for _, count in kinds) == 1:
        return kinds[0][0]
    size, workload = kinds[0][0]
    saved = [(job.saved_activations, count) for (_, job), count in kinds]
    known_saved = [(activations, count) for activations, count in saved if activations is not None]
    tokens = [(job.dataset_tokens, count) for (_, job), count in kinds]
    known_tokens = [number * count for number, count in tokens if number is not None]
    return replace(
        size,
        adapter_parameters=sum(job.adapter_parameters * count for (job, _), count in kinds),
        adapter_bytes=sum(job.adapter_bytes * count for (job, _), count in kinds),
    ), replace(
        workload,
        activations=join_activations([(job.activations, count) for (_, job), count in kinds]),
        microbatch_tokens=sum(job.microbatch_tokens * count for (_, job), count in kinds),
        saved_activations=join_activations(known_saved) if len(known_saved) == len(kinds) else None,
        dataset_tokens=sum(known_tokens) if len(known_tokens) == len(kinds) else None,
        joined_state_bytes=sum(job.state_bytes_of(alone) * count for (alone, job), count in kinds),
    )


def cost_sweep(
    kinds: Sequence[tuple[JobCosts, int]],
    plan: Plan,
    cluster: Cluster,
    options: PlacementOptions,
    given: ResolvedPlacement | None = None,
) -> SweepCosts:
    """Return what jobs take together, beside runs of their own, each in the placement that is best for it.

    Args:
        kinds: of the jobs, and how many there are of each.
        plan: of all of them together.
        options, given: as for `make_plan`.
    """

    def find_row(job: JobCosts, count: int, asked: PlacementOptions) -> Row | None:
        made = make_plan(*join_jobs([(job, count)]), cluster, asked, given=given)
        return made.choice if made.chosen is not None and made.choice.fits else None

    alone = [(find_row(job, 1, options), count) for job, count in kinds]
    seconds = [row.step_s * count for row, count in alone if row is not None]

    def count_bytes(job: JobCosts, count: int) -> int:
        size, workload = join_jobs([(job, count)])
        trained_bytes = count_trained_bytes(size, workload.state_bytes_of(size), cluster.num_ranks)
        return trained_bytes + workload.activations.peak_bytes

    largest = max((job for job, _ in kinds), key=lambda job: count_bytes(job, 1))
    lean: dict[str, Any] = {"resident_layers": 0} if options.num_resident == "auto" else {}
    lean |= {"activation_checkpointing_layers": "all"} if options.num_recomputed == "auto" else {}
    least = options.model_copy(update=lean)
    fitting = bisect(range(1, _MOST_JOBS + 1), False, key=lambda count: find_row(largest, count, least) is None)
    return SweepCosts(
        num_jobs=sum(count for _, count in kinds),
        step_s=None if plan.chosen is None else plan.choice.step_s,
        in_turn_s=sum(seconds) if len(seconds) == len(kinds) else None,
        job_bytes=count_bytes(largest, 2) - count_bytes(largest, 1),
        most_jobs=fitting,
    )
