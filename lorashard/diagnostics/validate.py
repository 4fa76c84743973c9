"""Check a run before it takes GPUs: options, devices, the model's files, every row of the data, the memory.

No weights are read. What options alone decide is told before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..config.initialization import is_derived
from ..config.quantization_options import describe_quantization
from ..config.run_config import RunConfig
from ..config.sweep import ADAPTER_JOB_OPTIONS, Job, list_data, named_in_errors, read_jobs
from ..launch.checks import check_data, check_options
from ..launch.launcher import check_output_dir
from ..runs.sweep_file import select_jobs
from ..runtime.devices import find_gpus
from ..runtime.disk import show_bytes
from ..runtime.importing import quick_imports
from ..runtime.plugins import refuse_plugins

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.prepare import Prepared

# Begins a line on what works, but not as one would wish.
WARNING = "warning: "
# Options of an adapter that change neither its size nor what it is put on.
_SCALES = {"lora_alpha", "lora_dropout", "use_rslora", "loraplus_lr_ratio"}


def validate(config: RunConfig) -> Iterator[str]:
    """Yield a line for each check that passes, and one that begins with `WARNING` for each that a person should know.

    Raises:
        UserError: from the first check that fails.
    """
    refuse_plugins(os.environ)
    choice = check_options(config, find_gpus())
    runs = [job.config for job in select_jobs(config)] or [config]
    check_data(runs)
    for each in runs:
        check_output_dir(each)
    yield f"ranks: {choice.num_ranks} on {choice.device_type}"
    with quick_imports():
        import torch

        from ..data.prepare import prepare
        from ..data.tokenizer import load_tokenizer
        from ..planning.run_plan import settle_dtype_here
        from .model_facts import describe_model

    is_asked = config.dtype != "auto"
    config, about_dtype = settle_dtype_here(config, torch.device(choice.device_type))
    yield from (f"{WARNING}{line}" if is_asked else line for line in about_dtype)
    jobs = read_jobs(config)
    for job in jobs:
        with named_in_errors(job.name):
            _check_trainer_options(job.config, choice.device_type, choice.num_ranks)
    if not jobs:
        _check_trainer_options(config, choice.device_type, choice.num_ranks)
    yield "options: accepted by TRL and transformers"
    yield f"model: {describe_model(config.model_name_or_path, config.model_revision)}"
    if (kept := _describe_format(config)) is not None:
        yield f"base: {kept}"
    if config.reward_model_name_or_path is not None:
        yield f"reward model: {describe_model(config.reward_model_name_or_path, None)}"
    tokenizer = load_tokenizer(**config.tokenizer_options())
    if jobs:
        prepared = yield from _check_jobs(jobs, tokenizer)
    else:
        yield f"adapter: {_describe_adapter(config)}"
        alone = prepare(config.data_options(), tokenizer, method=config.trl_method)
        yield f"dataset: {alone.report.summary()}"
        prepared = {"": alone}
    eval_report = next(iter(prepared.values())).eval_report  # of a dataset that jobs share
    if eval_report is not None:
        yield f"eval_dataset: {eval_report.summary()}"
    here = config.model_copy(update={"cpu": choice.num_ranks}) if choice.device_type == "cpu" else config
    yield from _describe_run(here, prepared, tokenizer, about_dtype)


def _check_jobs(jobs: Sequence[Job], tokenizer: PreTrainedTokenizerBase) -> Generator[str, None, dict[str, Prepared]]:
    """Yield a line for each job of a sweep, and one for data that all share; return the data by the first job on it.

    Adapters that are alike are built once, and data that is common is read once.
    """
    from ..data.prepare import prepare

    adapters: dict[str, str] = {}
    datasets: dict[str, Prepared] = {}
    found: dict[str, Prepared] = {}
    lines = []
    for job in jobs:
        options = job.config.data_options()
        data = repr(options.model_dump(exclude=None if options.shuffle_dataset else {"seed"}))
        adapter = repr([getattr(job.config, name) for name in sorted(ADAPTER_JOB_OPTIONS - _SCALES)])
        with named_in_errors(job.name):
            if adapter not in adapters:
                adapters[adapter] = _describe_adapter(job.config)
            if data not in datasets:
                datasets[data] = found[job.name] = prepare(options, tokenizer, method=job.config.trl_method)
        lines.append((f"job {job.name}: {adapters[adapter]}", f"dataset: {datasets[data].report.summary()}"))
    if len(datasets) == 1:
        yield from (*(line for line, _ in lines), lines[0][1])
    else:
        yield from ("; ".join(parts) for parts in lines)
    return found


def _describe_run(
    config: RunConfig, prepared: Mapping[str, Prepared], tokenizer: PreTrainedTokenizerBase, told: Sequence[str]
) -> Iterator[str]:
    """Yield what the plan says of the rows as they are and the memory that is free now, and what the run will take.

    Args:
        prepared: the run's data; of a sweep all data of its jobs, by the first job on it.
        told: the warnings that need not be repeated.

    Raises:
        ConfigError: Nothing fits, where something is left to choose. What a person has chosen is obeyed, as in a run.
    """
    from ..data.survey import choose_longest, survey_prepared
    from ..data.trl_tokens import fill_trainer_options
    from ..planning.choose import PlanError, explained_planning
    from ..planning.estimate import estimate
    from ..planning.estimate_words import render_estimate
    from ..planning.hardware import HardwareOptions
    from ..planning.run_plan import forecast

    method, options = config.trl_method, fill_trainer_options(config)
    surveys = {job: survey_prepared(prepared[job], tokenizer, method, options) for job in list_data(config)}
    survey, longest = choose_longest(surveys), max(max(one.lengths) for one in surveys.values())
    try:
        with explained_planning():
            plan, _ = forecast(config, HardwareOptions(), longest_tokens=longest)
        if config.is_placement_open and not config.queue:  # a run that waits does so until memory is free
            _ = plan.choice
        with explained_planning():
            found = estimate(config, survey, plan, HardwareOptions(), longest)
    except PlanError as error:  # it may run all the same
        yield f"{WARNING}placement: {error}"
        yield "expected time: unknown"
        return
    yield f"{WARNING if plan.chosen is None else ''}placement: {plan.reason}"
    yield from [str(plan.sweep)] if plan.sweep else []
    yield from (f"{WARNING}{warning}" for warning in plan.warnings if warning not in told)
    yield from render_estimate(asdict(found)).splitlines()


def _check_trainer_options(config: RunConfig, device_type: str, num_ranks: int) -> None:
    from ..training.arguments import build_arguments
    from ..training.rewards import load_rewards

    build_arguments(config, device_type == "cpu", num_ranks)
    if config.trl_method.generates:
        load_rewards(config.reward_funcs or [], config.reward_model_name_or_path)


def _describe_format(config: RunConfig) -> str | None:
    """Return the format that the base is trained in, where it is stored quantized or is to be quantized."""
    from ..planning.size import find_stored
    from ..weights.stored_formats import settle_quantization

    name = config.model_name_or_path
    stored = find_stored(name, config.model_revision)
    quantization = settle_quantization(stored, config.resolve_quantization(), name)
    if stored is None:
        return describe_quantization(quantization) if quantization else None
    kept = describe_quantization(quantization) if quantization else f"dequantized to {config.dtype} while it is read"
    return f"stored as {stored.description}; {kept}"


def _describe_adapter(config: RunConfig) -> str:
    """Build the model and its adapter without weights, and find the units that the base is sharded by."""
    from ..export.derived import check_derivable
    from ..model.adapters import check_coverage
    from ..model.loftq import make_lora
    from ..model.stacks import find_layers
    from ..planning.run_plan import describe_base
    from ..weights.derived_from import find_derived_dir

    model = describe_base(config).build(config.unit_paths)
    check_coverage(model, describe_base(config).lora)  # not the one that PEFT has written into
    derived = ""
    if is_derived(config.init_lora_weights):
        check_derivable(model, make_lora(config.lora_options()))
        size = show_bytes(sum(p.nbytes for p in model.get_base_model().parameters() if not p.requires_grad))
        derived = f"; {config.init_lora_weights} keeps a derived base of {size} in {find_derived_dir()}"
    num_parameters, num_layers = model.get_nb_trainable_parameters()[0], len(find_layers(model))
    return f"{num_parameters:,} trainable parameters; {num_layers} layers to shard{derived}"
