"""The jobs of a sweep: many adapters that train on each visit of one base. Imports no torch.

Reading order: `read_jobs`, `JOB_OPTIONS` (what may differ from job to job), `SweepStop`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ConfigError, UserError
from .adapter_options import AdapterOptions
from .evaluation import find_eval_steps
from .initialization import is_derived
from .options import GivenOption, find_nearest, to_config_error
from .quantization_options import QuantizationOptions
from .run_config import RunConfig, collect_options, read_known_options
from .sweep_options import SweepOptions
from .trackers import name_trackers

MOST_JOBS = 64  # without `yes`
SWEEP_METHODS = ("sft", "dpo")

_KERNELS = {name for name in AdapterOptions.model_fields if name == "numerics" or name.startswith("torch_compile")}
ADAPTER_JOB_OPTIONS = frozenset(AdapterOptions.model_fields.keys() - QuantizationOptions.model_fields.keys() - _KERNELS)
OPTIMIZER_JOB_OPTIONS = frozenset(
    {
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "optim",
        "optim_args",
        "max_grad_norm",
        "seed",
        "data_seed",
    }
)
LOSS_JOB_OPTIONS = frozenset(
    {"neftune_noise_alpha", "label_smoothing_factor", "label_smoothing", "beta", "f_alpha_divergence_coef"}
    | {"discopop_tau", "ld_alpha"}
)
DATA_JOB_OPTIONS = frozenset(
    {
        "dataset",
        "dataset_config",
        "dataset_revision",
        "dataset_split",
        "dataset_text_field",
        "completion_only_loss",
        "assistant_only_loss",
    }
)
# All else is common to the jobs, since they share the base, its visits, and their number.
JOB_OPTIONS = ADAPTER_JOB_OPTIONS | OPTIMIZER_JOB_OPTIONS | LOSS_JOB_OPTIONS | DATA_JOB_OPTIONS
_WHAT_DIFFERS = "jobs differ in the adapter, optimizer, schedule, seed and dataset"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
_MOST_LETTERS = 200  # of a folder's name, where file systems have 255 bytes
# What else lies in the folder of a sweep.
_TAKEN_NAME = re.compile(r"logs|ranks|profile|stop|checkpoint-.*|[a-z_]+\.(json|jsonl|yaml|safetensors)|readme\.md")


@dataclass(frozen=True)
class Job:
    """One adapter of a sweep.

    Attributes:
        name: Of the job, and of its folder in the sweep's.
        options: What it was given of its own, by canonical name; the rest is the sweep's.
        config: All of its options, with which it can run alone; `output_dir` is its folder.
    """

    name: str
    options: dict[str, Any]
    config: RunConfig


class SweepStop(BaseModel):
    """Successive halving: at each multiple of `every` steps the best `keep` of the jobs continue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str
    keep: float = Field(gt=0, lt=1)
    every: int = Field(ge=1)

    @property
    def is_greater_better(self) -> bool:
        """Whether a larger value is the better one, told as transformers does of `metric_for_best_model`."""
        return not self.metric.endswith("loss")

    def count_kept(self, num_jobs: int) -> int:
        """Return how many of `num_jobs` continue: at least one, and rounded up."""
        return math.ceil(round(num_jobs * self.keep, 9))


@contextmanager
def named_in_errors(name: str, locate: Callable[[str], str] = lambda option: "") -> Iterator[None]:
    """While the body runs, add a job's name to the place of a user's mistake.

    Args:
        name: empty for a run that is no sweep, to whose mistakes nothing is added.
        locate: returns the file and line of an option, for a mistake that has no place.
    """
    try:
        yield
    except UserError as error:
        if not name:
            raise
        where = _join(str(error.where or locate(error.option or "")), f"job {name}")
        raise type(error).of_json(error.to_json() | {"where": where}) from error


def read_jobs(config: RunConfig) -> tuple[Job, ...]:
    """Return the jobs of a sweep, the grid's first; none where the configuration has no sweep.

    Raises:
        ConfigError: A job that cannot run as it is written, or not beside the others. The error names the file and
            line, where they are known, and the job.
    """
    if config.sweep is None:
        if config.sweep_stop is not None:
            raise ConfigError(
                "chooses among the jobs of a sweep", option="sweep_stop", fix="give sweep, or leave it out"
            )
        return ()
    _check_common(config)
    read_stop(config)
    given = [*_read_grid(config), *_read_list(config)]
    if not given:
        raise _refuse_part(config, expected="at least one job, in grid or in jobs", found="none")
    _check_names(config, given)
    jobs = tuple(_build_job(config, *parts) for parts in given)
    _check_num_steps(config, jobs)
    return jobs


def check_datasets(jobs: Sequence[Job]) -> None:
    """Refuse a job that has no data to train on; what is planned needs none.

    Raises:
        ConfigError: A job of a sweep has no dataset.
    """
    for job in jobs:
        if not job.config.dataset:
            fix = "give one to all at the top level, or to each job"
            raise ConfigError("has to be given", option="dataset", where=f"job {job.name}", fix=fix)


def list_data(config: RunConfig) -> dict[str, RunConfig]:
    """Return a run for each of the datasets that a sweep's jobs train on, by the name of the first job on it.

    Of a run that is no sweep, that run, by an empty name. The order in which examples come is left aside.

    Raises:
        ConfigError: As for `read_jobs`, or a job has no dataset.
    """
    jobs = read_jobs(config)
    check_datasets(jobs)
    found: dict[str, tuple[str, RunConfig]] = {}
    for job in jobs:
        options = job.config.data_options().model_dump(exclude={"seed"})
        found.setdefault(repr(options), (job.name, job.config))
    return dict(found.values()) if found else {"": config}


def read_stop(config: RunConfig) -> SweepStop | None:
    """Return when jobs of a sweep are given up; None where all run to their end.

    Raises:
        ConfigError: It is misspelled, or asks for what no evaluation tells.
    """
    if config.sweep_stop is None:
        return None
    try:
        stop = SweepStop(**config.sweep_stop)
    except ValidationError as error:
        refused = to_config_error(error)
        names = {"option": f"sweep_stop.{refused.option}", "fix": "give metric, keep and every"}
        raise ConfigError.of_json(refused.to_json() | names) from error
    method, metric = config.trl_method, stop.metric
    if not metric.startswith("eval_") or not method.has_metric(metric):
        known = ", ".join(f"eval_{name}" for name in method.metrics)
        raise ConfigError(option="sweep_stop.metric", expected=f"one of {known}", found=repr(metric))
    trainer = config.trainer_options
    if trainer.get("eval_strategy") != "steps":
        raise ConfigError(
            "compares evaluations at the same steps",
            option="sweep_stop",
            fix="give eval_dataset, eval_strategy: steps and eval_steps",
        )
    eval_steps = find_eval_steps(trainer)
    if eval_steps < 1 or stop.every % eval_steps:
        expected = f"a multiple of eval_steps, {eval_steps:g}"
        expected = expected if eval_steps >= 1 else f"eval_steps as a number of steps, not {eval_steps:g} of all"
        raise ConfigError(option="sweep_stop.every", expected=expected, found=stop.every)
    return stop


def _check_common(config: RunConfig) -> None:
    """Refuse what no job of a sweep can have."""
    if config.method not in SWEEP_METHODS:
        raise ConfigError(option="method", expected=f"{' or '.join(SWEEP_METHODS)}, with a sweep", found=config.method)
    if isinstance(config.resume_from_checkpoint, str) and config.resume_from_checkpoint != "auto":
        raise ConfigError(
            "each job of a sweep resumes from its own newest checkpoint",
            option="resume_from_checkpoint",
            expected="auto or true, with a sweep",
            found=repr(config.resume_from_checkpoint),
        )
    if config.profile_steps is not None:
        raise ConfigError(
            "torch profiles a process, in which all jobs run", option="profile_steps", fix="profile a job alone"
        )
    if config.compile_options() is not False or config.numerics == "fused":
        raise ConfigError(
            "what one job compiles may replace another's graph between its forward and its backward",
            option="torch_compile" if config.compile_options() is not False else "numerics",
            fix="leave it out, or train each job alone",
        )
    if config.trainer.get("auto_find_batch_size"):
        raise ConfigError(
            "a job that shrinks its batches would no longer visit the base with the others",
            option="auto_find_batch_size",
            expected="false, with a sweep",
            found="true",
            fix="give a per_device_train_batch_size that fits: lorashard plan tells how many jobs do",
        )
    reported = {*name_trackers(config.trainer.get("report_to")), *_list(config.trainer.get("report_to"))}
    if shared := sorted(reported - {"none", "tensorboard"}):
        raise ConfigError(
            f"{shared[0]} keeps one run for a process, in which all jobs would be mixed",
            option="report_to",
            expected="tensorboard or none, with a sweep",
            found=repr(shared[0]),
        )
    if config.trainer.get("hub_model_id") is not None:
        raise ConfigError(
            "the jobs would overwrite each other there",
            option="hub_model_id",
            fix="leave it out: each job pushes to a repository of its own name",
        )
    for part in config.sweep or {}:
        if part not in ("grid", "jobs"):
            nearest = find_nearest(str(part), ("grid", "jobs"))
            fix = f"did you mean '{nearest}'?" if nearest else "what all jobs share belongs at the top level"
            raise _refuse_part(config, part, expected="grid and jobs", found=repr(part), fix=fix)


_Given = tuple[str, dict[str, Any], tuple[str | int, ...]]  # a name, its options, and where in `sweep` they are


def _read_grid(config: RunConfig) -> Iterator[_Given]:
    """Yield the combinations of the grid's values, the last option's fastest."""
    grid = (config.sweep or {}).get("grid")
    if grid is None:
        return
    if not isinstance(grid, Mapping) or not grid:
        raise _refuse_part(config, "grid", expected="options with lists of values", found=_describe(grid))
    columns: dict[str, list[Any]] = {}
    for written, values in grid.items():
        if not isinstance(values, list) or not values:
            expected = "a list of one or more values, such as [8, 16]"
            raise _refuse_part(config, "grid", written, expected=expected, found=_describe(values))
        for i, value in enumerate(values):
            name, parsed = _read_option(config, written, value, config.locate_in_sweep("grid", written, i), "grid")
            columns.setdefault(name, []).append(parsed)
        if len(columns[name]) > len(values):
            raise _refuse_part(config, "grid", written, problem=f"given twice, as {name} too", fix="keep one")
    _check_count(config, math.prod(map(len, columns.values())))
    for values in itertools.product(*columns.values()):
        options = dict(zip(columns, values, strict=True))
        yield "_".join(f"{name}-{_spell(value)}" for name, value in options.items()), options, ("grid",)


def _read_list(config: RunConfig) -> Iterator[_Given]:
    """Yield the jobs that are listed one by one."""
    listed = (config.sweep or {}).get("jobs")
    if listed is None:
        return
    if not isinstance(listed, list):
        raise _refuse_part(config, "jobs", expected="a list of jobs", found=_describe(listed))
    for i, written in enumerate(listed):
        if not isinstance(written, Mapping) or written.get("name") in (None, ""):
            expected = "a mapping with a name, such as {name: a, lora_r: 4}"
            raise _refuse_part(config, "jobs", i, expected=expected, found=_describe(written))
        job = str(written["name"])
        options: dict[str, Any] = {}
        for key in (key for key in written if key != "name"):
            where = config.locate_in_sweep("jobs", i, key)
            name, value = _read_option(config, key, written[key], where, f"job {job}")
            if name in options:
                raise ConfigError(f"given twice, as {name} too", option=key, where=_join(where, f"job {job}"))
            options[name] = value
        yield job, options, ("jobs", i)


def _read_option(config: RunConfig, written: Any, value: Any, where: str, owner: str) -> tuple[str, Any]:
    """Return an option of a job by its canonical name, and its value by its type.

    Args:
        owner: The job in words, or the grid.
    """
    where, method = _join(where, owner), config.trl_method
    collected = collect_options([GivenOption(str(written), value, where)], read_known_options(method), method)
    for name, parsed in collected.items():
        if name in JOB_OPTIONS:
            return name, parsed
    raise ConfigError(
        "cannot differ by job", option=str(written), where=where, fix=f"write it at the top level: {_WHAT_DIFFERS}"
    )


def _check_names(config: RunConfig, given: list[_Given]) -> None:
    """Refuse names that are no folders' of their own, on any file system."""
    _check_count(config, len(given))
    seen: dict[str, str] = {}
    for name, _, path in given:
        where = config.locate_in_sweep(*path, "name") if path[0] == "jobs" else config.locate_in_sweep(*path)
        folded = name.casefold()
        if not _NAME.fullmatch(name) or len(name) > _MOST_LETTERS:
            expected = f"a folder's name: letters, digits and ._=+-, at most {_MOST_LETTERS}, the first no sign"
            raise ConfigError(option="name", where=where, expected=expected, found=repr(name))
        if _TAKEN_NAME.fullmatch(folded):
            raise ConfigError("the sweep's folder has its own", option="name", where=where, found=repr(name))
        if folded in seen:
            alike = "" if seen[folded] == name else f", as {seen[folded]!r} is on some disks"
            raise ConfigError(f"two jobs of one name{alike}", option="name", where=where, found=repr(name))
        seen[folded] = name


def _check_count(config: RunConfig, num_jobs: int) -> None:
    if num_jobs > MOST_JOBS and not config.yes:
        raise _refuse_part(
            config, expected=f"at most {MOST_JOBS} jobs", found=f"{num_jobs:,}", fix="give --yes if you want them all"
        )


def _build_job(config: RunConfig, name: str, options: dict[str, Any], path: tuple[str | int, ...]) -> Job:
    """Return a job with all of its options checked, as those of a run of its own."""
    left_out = {"trainer", *SweepOptions.model_fields, *config.trl_method.absent_options}
    values = {option: getattr(config, option) for option in config.model_fields_set - left_out}
    values |= {"output_dir": str(Path(config.output_dir, name))} if config.output_dir else {}
    with named_in_errors(name, lambda option: config.locate_in_sweep(*path, option)):
        job = Job(name, options, RunConfig(**values | config.trainer | options))
        if is_derived(job.config.init_lora_weights):
            raise ConfigError(
                "it rewrites the base, which the jobs share",
                option="init_lora_weights",
                expected="true, false, gaussian, orthogonal or loftq, with a sweep",
                found=repr(job.config.init_lora_weights),
            )
    return job


def _check_num_steps(config: RunConfig, jobs: tuple[Job, ...]) -> None:
    """Refuse jobs that would take different numbers of steps."""
    if config.trainer.get("max_steps", -1) > 0:
        return
    names = sorted(DATA_JOB_OPTIONS | ({"seed"} if config.packing and config.shuffle_dataset else set()))
    for name in names:
        values = [getattr(job.config, name) for job in jobs]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"the jobs take the same number of steps, and may not with another {name} each",
                option="max_steps",
                fix="give max_steps in place of num_train_epochs",
            )


def _spell(value: Any) -> str:
    """Return a value as part of a folder's name."""
    text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, bool | dict) else str(value)
    text = "+".join(map(str, value)) if isinstance(value, list) else text
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []


def _describe(value: Any) -> str:
    return "nothing" if value in (None, [], {}) else repr(value)[:60]


def _join(where: str, owner: str) -> str:
    return f"{where}, {owner}" if where else owner


def _refuse_part(config: RunConfig, *path: str | int, **fields: Any) -> ConfigError:
    """Return the error of a part of `sweep`, by the option that leads to it."""
    option = ".".join(str(key) for key in ("sweep", *path))
    return ConfigError(fields.pop("problem", ""), option=option, where=config.locate_in_sweep(*path), **fields)
