"""What a run is expected to take, before it starts: examples, steps, seconds and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from ..config.run_config import RunConfig
from ..data.survey import Survey
from ..data.trl_tokens import fill_trainer_options
from .auto import plan_training
from .choose import Plan
from .costs import Row
from .hardware import Cluster, HardwareOptions
from .run_plan import describe_base, describe_training, find_cluster, find_planned_device, settle_dtype_here

# Passes of a step that a plan does not count: of the reference, and of KTO's mismatched pairs with and without it.
_MORE_FORWARDS = {"dpo": 1, "kto": 3}
# Of a planned step of a frozen base, which is a forward, a backward without weights' gradients, and where layers are
# recomputed another forward: at least, as expected, and at most.
_FORWARD_SHARES = (1 / 4, 1 / 3, 1 / 2)
# How many times the predicted seconds steps take, at least and at most. On two CPU cores that other programs used too,
# runs of a small model took 0.9, 1.2 and 1.4 times as long. GPUs were not compared with their predictions yet; how much
# of the figures in data sheets programs reach differs by about this.
_SPREADS = {("cpu", "measured"): (0.7, 3.0), ("cuda", "measured"): (0.7, 2.0), ("cuda", "listed"): (0.5, 2.5)}


WhyNoTime = Literal["nothing fits", "generates", "unknown steps", "no steps"]


@dataclass(frozen=True)
class Estimate:
    """What is known of a run before it starts; None is what is not.

    Attributes:
        num_examples, num_sequences, num_tokens, num_supervised_tokens, num_counted, is_complete, job, num_datasets: of
            an epoch, as in `Survey`; all None, 0 or empty without a dataset. Seconds are those of a sweep whose jobs
            all have such examples.
        num_ranks: that share the steps.
        steps_per_epoch, num_steps: optimizer steps.
        num_epochs: that the steps make.
        step_s: expected seconds of a step with sequences of the usual length.
        train_s, least_s, most_s: seconds of all steps, without loading, evaluations and checkpoints: as expected, and
            the range.
        why_no_time: why there are no seconds: nothing fits, completions of unknown length are generated, the steps are
            not known, or the examples are fewer than a step takes.
        speeds: whether the device's were measured here, or come from a list of data sheets.
        peak_bytes, free_bytes: of one rank, on its device; the least that is needed where nothing fits.
    """

    num_examples: int | None
    num_sequences: int | None
    num_tokens: int | None
    num_supervised_tokens: int | None
    num_counted: int
    is_complete: bool
    num_ranks: int
    steps_per_epoch: int | None
    num_steps: int | None
    num_epochs: float | None
    step_s: float | None
    train_s: float | None
    least_s: float | None
    most_s: float | None
    why_no_time: WhyNoTime | None
    speeds: Literal["measured", "listed"]
    peak_bytes: int
    free_bytes: int
    job: str = ""
    num_datasets: int = 0


def estimate(
    config: RunConfig,
    survey: Survey | None,
    plan: Plan,
    wanted: HardwareOptions,
    longest_tokens: int | None = None,
) -> Estimate:
    """Return what a run is expected to take.

    The plan is for the longest sequences. A step takes as long as its longest one asks for, so the model's code is
    traced once more for the length that is expected of it.

    Args:
        survey: of the data; None where there are only `max_steps`.
        plan: of the same run on the same machines, from `forecast`.
        longest_tokens: that the plan was made with.

    Raises:
        UserError: as for `forecast`.
    """
    device = find_planned_device(config, wanted)
    config, _ = settle_dtype_here(config, device)
    cluster, _ = find_cluster(config, wanted)
    method, num_ranks = config.trl_method, cluster.num_ranks
    speeds: Literal["measured", "listed"] = "listed" if device is None else "measured"
    num_sharing = 1 if plan.chosen is None else plan.choice.placement.sequence_parallel_size
    num_sequences = survey.num_sequences if survey else None
    steps_per_epoch, num_steps, num_epochs = count_steps(config, num_sequences, num_ranks, num_sharing)
    why_no_time: WhyNoTime | None = None
    if plan.chosen is None:
        why_no_time = "nothing fits"
    elif method.generates:
        why_no_time = "generates"
    elif not num_steps:
        why_no_time = "unknown steps" if num_steps is None else "no steps"
    step_s = train_s = least_s = most_s = None
    if why_no_time is None and num_steps is not None:
        row = plan.choice
        if survey is not None:
            row = _plan_usual(config, survey, plan, cluster, longest_tokens)
        least, usual, most = (1 + _MORE_FORWARDS.get(method.name, 0) * share for share in _FORWARD_SHARES)
        fast, slow = _SPREADS[cluster.hardware.device_type, speeds]
        step_s = row.step_s * usual
        train_s, least_s, most_s = (num_steps * row.step_s * factor for factor in (usual, least * fast, most * slow))
    return Estimate(
        num_examples=survey.num_examples if survey else None,
        num_sequences=num_sequences,
        num_tokens=survey.num_tokens if survey else None,
        num_supervised_tokens=survey.num_supervised_tokens if survey else None,
        num_counted=survey.num_counted if survey else 0,
        is_complete=survey.is_complete if survey else False,
        num_ranks=num_ranks,
        steps_per_epoch=steps_per_epoch,
        num_steps=num_steps,
        num_epochs=num_epochs,
        step_s=step_s,
        train_s=train_s,
        least_s=least_s,
        most_s=most_s,
        why_no_time=why_no_time,
        speeds=speeds,
        peak_bytes=plan.choice.peak_bytes if plan.chosen is not None else min(row.peak_bytes for row in plan.rows),
        free_bytes=plan.free_bytes,
        job=survey.job if survey else "",
        num_datasets=survey.num_datasets if survey else 0,
    )


def count_steps(
    config: RunConfig, num_sequences: int | None, num_ranks: int, num_sharing: int = 1
) -> tuple[int | None, int | None, float | None]:
    """Return the steps of an epoch, those of the run, and the epochs that these make, as transformers' Trainer does.

    Args:
        num_sequences: of an epoch; None where they are not known.
        num_sharing: ranks that share each sequence.

    Raises:
        ConfigError: `global_batch_size` cannot be divided over the ranks.
    """
    options = fill_trainer_options(config) | config.count_accumulation(num_ranks)
    max_steps = options["max_steps"] if options["max_steps"] > 0 else None
    if num_sequences is None:
        return None, max_steps, None
    batch, drops_last = options["per_device_train_batch_size"], options["dataloader_drop_last"]
    accumulation = options["gradient_accumulation_steps"]
    num_rows = num_sequences
    if config.trl_method.generates:  # as GRPOConfig and GRPOTrainer, whose batches repeat whole groups of prompts
        generation_batch = options["generation_batch_size"]
        per_generation = options["steps_per_generation"] or accumulation
        if generation_batch is not None:
            per_generation = generation_batch // (batch * num_ranks)
        generation_batch = batch * num_ranks * per_generation
        num_prompts = max(1, generation_batch // options["num_generations"])
        num_rows = num_sequences // num_prompts * num_prompts * options["num_generations"]
        num_rows *= options["num_iterations"] * per_generation
        batch *= per_generation
    elif config.global_batch_size is not None and config.method != "kto":  # which draws no random order
        num_steps, num_left = divmod(num_sequences, config.global_batch_size)
        num_rows = (num_steps + (num_left > 0 and not drops_last)) * config.global_batch_size
    num_batches = len(BatchSamplerShard(BatchSampler(range(num_rows), batch, drops_last), num_ranks // num_sharing))
    if not num_batches:  # fewer examples than a batch or a group of prompts, and these are dropped
        return 0, 0, 0.0
    steps_per_epoch = -(-num_batches // accumulation)
    num_steps = max_steps or math.ceil(options["num_train_epochs"] * steps_per_epoch)
    return steps_per_epoch, num_steps, num_steps / steps_per_epoch


def expect_longest(lengths: Sequence[int], num_drawn: int) -> float:
    """Return the expected length of the longest of `num_drawn` sequences, drawn from `lengths` with replacement."""
    count = len(lengths)
    ranked = enumerate(sorted(lengths), 1)
    return sum(length * ((rank / count) ** num_drawn - ((rank - 1) / count) ** num_drawn) for rank, length in ranked)


def _plan_usual(config: RunConfig, survey: Survey, plan: Plan, cluster: Cluster, longest_tokens: int | None) -> Row:
    """Return what the chosen placement costs with sequences as long as the longest of a step is expected to be."""
    options = fill_trainer_options(config)
    is_joined = config.trl_method.is_prepared_here and options["padding_free"]
    num_groups = cluster.num_ranks // plan.choice.placement.sequence_parallel_size
    num_drawn = 1 if is_joined else options["per_device_train_batch_size"] * num_groups
    tokens = math.ceil(expect_longest(survey.lengths, num_drawn))
    known = (tokens, longest_tokens)
    usual, longest = (
        describe_training(config, cluster.hardware.device_type, cluster.num_ranks, length) for length in known
    )
    if usual.microbatch == longest.microbatch:
        return plan.choice
    return plan_training(describe_base(config), usual, cluster, config, given=plan.choice.placement).choice
