"""Which checkpoint a run resumes from, and whether it can: what the two must have in common for the steps to continue.

A checkpoint is independent of the number of ranks and of the placement. What decides the rows of a step is not: the
data, their order, and how many rows make a step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from ..config.run_config import RunConfig
from ..data.prepare import Prepared
from ..errors import CheckpointError, ConfigError
from ..model.fusing import Numerics
from ..runs.checkpoints import MANIFEST_NAME, Manifest, list_checkpoints, read_manifest, read_step, verify
from ..runtime import dist
from .resume_request import check_afresh

# What the saved states of the optimizer and the schedule continue with, whatever the options say.
_SCHEDULE = ("learning_rate", "max_steps", "num_train_epochs", "warmup_steps", "weight_decay")
_NO_MANIFEST = "has no manifest, so nothing tells whether it is whole, nor whether this run has the same data and steps"


@dataclass(frozen=True)
class Facts:
    """What decides which rows a step of the run has, and what a checkpoint holds.

    `rows_per_epoch` are those that all ranks together draw, with what fills the last batches; None where TRL's own
    sampler draws prompts. `dtype` is None in checkpoints from before `dtype: auto`, `numerics` in those from before it.
    """

    method: str
    world_size: int
    rows_per_step: int
    rows_per_epoch: int | None
    num_rows: int
    data_sha256: str
    order: str
    lora: dict[str, Any]
    schedule: dict[str, Any]
    is_resumable: bool
    dtype: str | None = None
    numerics: str | None = None

    @classmethod
    def read(cls, manifest: Manifest) -> Facts:
        """Return what a checkpoint says of the run that wrote it.

        Raises:
            CheckpointError: another version of lorashard wrote it.
        """
        try:
            return cls(**manifest.facts)
        except TypeError as error:
            raise CheckpointError(
                "it was written by another version of lorashard", where=f"checkpoint-{manifest.step}"
            ) from error


def describe_run(
    config: RunConfig, arguments: TrainingArguments, prepared: Prepared, numerics: str, num_sequence_ranks: int
) -> Facts:
    """Return what the checkpoints of this run say about it.

    Args:
        numerics: from `name_kernels`.
        num_sequence_ranks: ranks that share each row.

    Ranks: collective over all ranks: rank 0 reads the prepared rows.
    """
    sha256 = ""
    if dist.get_rank() == 0:
        with (prepared.path / "train.arrow").open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    lengths = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    sampling = arguments.train_sampling_strategy
    order = f"{sampling}, seed {arguments.seed if arguments.data_seed is None else arguments.data_seed}"
    order += f", shuffled with seed {config.seed}" if config.shuffle_dataset else ""
    order += f", in groups of {lengths} rows" if sampling == "group_by_length" else ""
    num_groups = arguments.world_size // num_sequence_ranks
    return Facts(
        method=config.method,
        world_size=arguments.world_size,
        rows_per_step=lengths * num_groups,
        rows_per_epoch=None
        if config.trl_method.generates
        else _count_epoch(config, arguments, len(prepared.train), num_groups),
        num_rows=len(prepared.train),
        data_sha256=dist.broadcast_object(sha256),
        order=order,
        lora={name: value for name, value in config.lora_options().items() if name != "lora_dropout"},
        schedule={name: getattr(arguments, name) for name in _SCHEDULE} | {"optim": str(arguments.optim)},
        is_resumable=not arguments.save_only_model,
        dtype=config.dtype,
        numerics=numerics,
    )


def _count_epoch(config: RunConfig, arguments: TrainingArguments, num_rows: int, num_groups: int) -> int:
    """Count the rows of an epoch as all ranks together draw them.

    One rank, or one group of ranks that share rows, takes a short last batch as it is; several fill the last round of
    batches with the first rows, as accelerate's `even_batches` does. `global_batch_size` fills the last step, where the
    order is random.
    """
    round_rows = arguments.per_device_train_batch_size * num_groups
    if _fills_steps(config, arguments):
        round_rows *= arguments.gradient_accumulation_steps
    if arguments.dataloader_drop_last:
        return num_rows // round_rows * round_rows
    if num_groups == 1 and not _fills_steps(config, arguments):
        return num_rows
    return -(-num_rows // round_rows) * round_rows


def _fills_steps(config: RunConfig, arguments: TrainingArguments) -> bool:
    return config.global_batch_size is not None and arguments.train_sampling_strategy == "random"


def choose_checkpoint(
    config: RunConfig, is_writer: bool, emit: Callable[..., None], log: Callable[[str], None]
) -> Path | None:
    """Return the checkpoint to resume from, whole on every node, or None to start afresh.

    Args:
        is_writer: whether this rank is the one of its node that reads all of the files.
        emit: records why newer checkpoints are skipped, on one rank.
        log: prints a line, on one rank.

    Raises:
        ConfigError: there is no complete one, and the run was not told to start afresh then.
        CheckpointError: the one that was asked for is damaged, or holds an adapter alone.

    Ranks: collective over all ranks; all get the same.
    """
    # Where a node has a disk of its own, one whose run had not begun does not know that it is started again.
    asked = dist.gather_objects(config.resume_from_checkpoint)
    wanted = asked[0] if all(one == asked[0] for one in asked) else "auto"
    if not wanted:
        return None
    if isinstance(wanted, str) and wanted != "auto":
        checkpoint = Path(wanted)
        problem = _find_problem(checkpoint, is_writer)
        if problem is not None and not (checkpoint / MANIFEST_NAME).exists():
            log(f"{checkpoint} {_NO_MANIFEST}")
        elif problem is not None:
            raise CheckpointError(problem)
        return checkpoint
    run = Path(config.output_dir)
    everyone = dist.gather_objects([read_step(path) for path in list_checkpoints(run)] if is_writer else None)
    for step in sorted(set().union(*filter(None, everyone)), reverse=True):
        problem = _find_problem(run / f"checkpoint-{step}", is_writer)
        if problem is None:
            return run / f"checkpoint-{step}"
        emit("checkpoint_skipped", step=step, checkpoint=f"checkpoint-{step}", problem=problem)
    check_afresh(config)
    return None


def _find_problem(checkpoint: Path, is_writer: bool) -> str | None:
    """Return why a checkpoint cannot be resumed from on some node, or None.

    Ranks: collective over all ranks.
    """
    problem = None
    if is_writer:
        try:
            if not Facts.read(verify(checkpoint)).is_resumable:
                problem = f"{checkpoint} holds the adapter alone (save_only_model), so no run can resume from it"
        except (CheckpointError, OSError) as error:
            problem = str(error)
    return next((problem for problem in dist.gather_objects(problem) if problem), None)


def read_saved_facts(checkpoint: Path | None) -> dict[str, Any]:
    """Return the fields of `Facts` of a checkpoint; none where there is no checkpoint, or it does not say."""
    if checkpoint is None or not (checkpoint / MANIFEST_NAME).exists():
        return {}
    return asdict(Facts.read(read_manifest(checkpoint)))


def name_kernels(config: RunConfig, numerics: Numerics) -> str:
    """Return the kernels of decoder layers, as `Numerics` names them, whether chosen by hand or by `fused`."""
    by_hand = {
        "compile": config.compile_options() is not False,
        "liger": bool(config.trainer_options.get("use_liger_kernel")),
    }
    return " and ".join(name for name, is_chosen in by_hand.items() if is_chosen) or numerics.kernels


def check_resume(
    config: RunConfig, arguments: TrainingArguments, checkpoint: Path, facts: Facts, log: Callable[[str], None]
) -> int | None:
    """Return how many ranks wrote a checkpoint, None where it does not say.

    Args:
        log: shows what is not as it was, where the person has asked for that.

    Raises:
        ConfigError: the steps that follow would not be those of the run that wrote it.
    """
    if not (checkpoint / MANIFEST_NAME).exists():
        return None
    manifest = read_manifest(checkpoint)
    saved = Facts.read(manifest)
    name = checkpoint.name
    if saved.method != facts.method:
        raise ConfigError(option="method", expected=f"{saved.method}, as {name} was written by", found=facts.method)
    different = [key for key, value in facts.lora.items() if saved.lora.get(key, value) != value]
    if different:
        key = different[0]
        raise ConfigError(
            "an adapter cannot be changed on the way",
            option=key,
            expected=f"{saved.lora.get(key)}, as {name} was trained with",
            found=facts.lora[key],
        )
    changed = [
        f"{key} {value} for {saved.schedule[key]}"
        for key, value in facts.schedule.items()
        if saved.schedule.get(key, value) != value
    ]
    if changed:
        log(
            f"{', '.join(changed)}: the optimizer and the schedule continue from their states in {name}, so of these "
            "the number of steps alone counts from here on, and the learning rate bends there"
        )
    for option, before, now in (("dtype", saved.dtype, facts.dtype), ("numerics", saved.numerics, facts.numerics)):
        if before not in (None, now):
            log(f"{option} {now} for {before}, as asked: the steps after {name} are not those that it would have")
    if arguments.ignore_data_skip:
        return saved.world_size
    if (saved.data_sha256, saved.num_rows) != (facts.data_sha256, facts.num_rows):
        raise ConfigError(
            f"the data have changed since {name} (dataset, tokenizer and the options of the data decide)",
            option="dataset",
            expected=f"{saved.num_rows} examples with SHA-256 {saved.data_sha256[:12]}",
            found=f"{facts.num_rows} with {facts.data_sha256[:12]}",
            fix="give the same data, or ignore_data_skip: true to resume at the beginning of the data as they are now",
        )
    if saved.order != facts.order:
        raise ConfigError(
            "the order of the examples has changed",
            expected=f"{saved.order}, as of {name}",
            found=facts.order,
            fix="give the same, or ignore_data_skip: true",
        )
    if saved.rows_per_step != facts.rows_per_step:
        raise ConfigError(
            option="global_batch_size",
            expected=f"{saved.rows_per_step}, as of {name} on {saved.world_size} ranks",
            found=f"{facts.rows_per_step} on {facts.world_size}",
            fix=f"give --global_batch_size {saved.rows_per_step}, which sets the accumulation",
        )
    if saved.rows_per_epoch != facts.rows_per_epoch:
        _check_epoch_ends(config, arguments, manifest, saved, facts, log)
    return saved.world_size


def _check_epoch_ends(
    config: RunConfig,
    arguments: TrainingArguments,
    manifest: Manifest,
    saved: Facts,
    facts: Facts,
    log: Callable[[str], None],
) -> None:
    """Refuse to resume where the last step of a later epoch would have other examples, unless that was asked."""
    if saved.rows_per_epoch is None or facts.rows_per_epoch is None:
        return
    name = f"checkpoint-{manifest.step}"
    saved_steps = max(1, -(-saved.rows_per_epoch // saved.rows_per_step))
    num_steps = max(1, -(-facts.rows_per_epoch // facts.rows_per_step))
    max_steps = arguments.max_steps
    if max_steps <= 0:
        max_steps = math.ceil(arguments.num_train_epochs * num_steps)
    if saved_steps == num_steps and max_steps // num_steps == manifest.step // num_steps:
        return  # no epoch ends any more
    if saved_steps == num_steps and _fills_steps(config, arguments):
        log(
            f"global_batch_size fills the last step of each epoch from here on: {facts.rows_per_epoch} rows an epoch, "
            f"{saved.rows_per_epoch} before {name}"
        )
        return
    raise ConfigError(
        "the last step of an epoch would have other examples",
        option="global_batch_size",
        expected=f"{saved.rows_per_epoch} examples an epoch, as of {name} on {saved.world_size} ranks",
        found=f"{facts.rows_per_epoch} on {facts.world_size}",
        fix=f"resume with {saved.world_size} ranks, or give --global_batch_size {saved.rows_per_step}, which fills the "
        "last step of each epoch on any number of ranks",
    )
