"""The options of a run: lorashard's own, the data's, and all of TRL's for the method, in one flat set of names.

Reading order: `RunConfig` (the options and their checks), `RunConfig.resolve` (command line over YAML over defaults),
`collect_options` (names and types). Imports neither torch nor transformers nor TRL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from .adapter_options import AdapterOptions
from .base_options import BaseOptions
from .data_options import DataOptions
from .evaluation import check_saves
from .methods import METHODS, Method, explain_refused
from .names import ALIASES, HINTS, PINNED_OPTIONS, REFUSED_OPTIONS, VALUE_ALIASES
from .options import (
    GivenOption,
    Option,
    find_nearest,
    read_command_line,
    read_own_options,
    read_trainer_options,
    read_yaml_options,
    to_config_error,
)
from .placement import PlacementOptions, check_sequence_parallel_size, parse_steps
from .precision import choose_precision
from .sweep_options import SweepOptions, read_sweep_file
from .trackers import name_trackers

# Defaults that differ from TRL's: values that work for LoRA, and no filter that hides a loss that is not finite. The
# learning rate's is the method's.
TRAINER_DEFAULTS = {
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "report_to": "none",
    "logging_nan_inf_filter": False,
}

_BATCH_SIZE = 8  # transformers' default

_REQUIRED = ("model_name_or_path", "dataset", "output_dir")


class RunConfig(SweepOptions, DataOptions, PlacementOptions, AdapterOptions, BaseOptions):
    """All options of a run. A name that is not lorashard's or the data's is one of TRL's for the method.

    `RunConfig(model_name_or_path=..., max_steps=10)` takes TRL's options by their own names too, and keeps them in
    `trainer`. Mistakes raise `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    model_name_or_path: str
    """A model's folder, or its id on the Hugging Face hub."""
    method: Literal["sft", "dpo", "kto", "reward", "grpo"] = "sft"
    """The training method: it decides TRL's trainer, its options and the dataset's columns (docs/methods.md)."""
    output_dir: str = ""
    """The run's folder: configuration, metrics, logs, checkpoints and the adapter."""
    overwrite_output_dir: bool = False
    """Start a new run in a folder that holds another one."""
    resume_from_checkpoint: str | bool | None = None
    """Resume from a checkpoint: its folder; true for the newest complete one in output_dir; or `auto`, as true, but
    start from the beginning if there is none. `--resume` for short."""
    queue: bool = False
    """Wait until other lorashard runs have released the GPUs asked for, or with --cpu the cores, first come first
    served."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Global batch size: sequences of a step over all ranks. It decides gradient_accumulation_steps."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when the loss or the gradient norm is NaN or infinite: stop the run, or skip the step."""
    max_restarts: int = Field(default=0, ge=0)
    """How often to restart the ranks from the newest complete checkpoint when one of them has died or hangs."""
    heartbeat_timeout: int = Field(default=120, ge=0)
    """Seconds after which a rank without a heartbeat, such as a stopped process, ends the run. 0: never."""

    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a better `metric_for_best_model`; needs `load_best_model_at_end`."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """By how much the metric must improve to count as better."""
    sample_prompts: list[str] | None = None
    """Generate completions of these prompts after each evaluation."""

    reward_funcs: list[str] | None = None
    """For grpo: TRL's reward functions by name, such as `think_format_reward`, or import paths such as
    `my_rewards.is_right`."""
    reward_model_name_or_path: str | None = None
    """For grpo: a reward model's folder or hub id; each rank loads all of it."""

    profile_steps: str | None = None
    """Profile these steps, such as `3-5` or `3`, into output_dir/profile: a trace of each rank, and a summary."""

    chat_template_path: str | None = None
    """A .jinja file, or a folder or hub id whose chat template to use."""
    eos_token: str | None = None
    """The token that ends a turn or a sequence, if it is not the tokenizer's own."""

    task_type: Literal["CAUSAL_LM", "SEQ_CLS"] | None = None
    """PEFT's task type in the adapter's configuration; the method decides it."""

    activation_checkpointing: bool = True
    """Recompute activations in backward instead of keeping them."""
    activation_checkpointing_kwargs: dict[str, Any] | None = None
    """transformers' options for it, such as `{"use_reentrant": false}`."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """The given options of TRL's for the method; not an option itself."""

    @classmethod
    def resolve(
        cls, yaml_path: Path | None, overrides: Sequence[str], required: Sequence[str] = _REQUIRED
    ) -> RunConfig:
        """Build a configuration from the command line, over a YAML file, over the defaults.

        Args:
            yaml_path: A flat file of `option: value` lines, or None.
            overrides: The command line's words, such as `["--lora_r", "8", "--packing"]`.
            required: The options that must be given.

        Raises:
            ConfigError: A wrong name, type or combination, with the file and line that it comes from.
        """
        config = cls(read_yaml_options(yaml_path) if yaml_path else (), read_command_line(overrides))
        for name in required:
            if not getattr(config, name) and not (name == "dataset" and config.sweep):  # its jobs may have their own
                raise ConfigError(
                    "has to be given",
                    option=name,
                    fix=f"give --{name} on the command line, or '{name}: ...' in the --config file",
                )
        return config

    def __init__(self, *sources: Sequence[GivenOption], **values: Any) -> None:
        """Check and keep options.

        Args:
            sources: Options as they were written; those of a later source win.
            values: Options by name, in place of `sources`.
        """
        if not sources:
            given = [*values.items(), *values.get("trainer", {}).items()]
            sources = ([GivenOption(name, value, "") for name, value in given if name != "trainer"],)
        sources = tuple([read_sweep_file(option) for option in source] for source in sources)
        method = find_method([option for source in sources for option in source])
        known = read_known_options(method)
        options: dict[str, Any] = {}
        for source in sources:
            options |= collect_options(source, known, method)
        options |= choose_precision(options)
        own_names = type(self).model_fields.keys() - method.absent_options
        own = {name: value for name, value in options.items() if name in own_names}
        if own.get("output_dir"):  # no shell has expanded what YAML holds
            own["output_dir"] = os.path.expanduser(own["output_dir"])
        try:
            super().__init__(**own | {"trainer": {name: options[name] for name in options if name not in own}})
        except ValidationError as error:
            raise to_config_error(error) from error
        for option in (option for source in sources for option in source if option.name == "sweep"):
            self._sweep_places = {(): option.where} | option.places

    @model_validator(mode="after")
    def _check_checkpointing(self) -> RunConfig:
        every = (self.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
        is_offloading = bool(self.trainer.get("activation_offloading"))
        self.check_num_recomputed(self.activation_checkpointing, every, is_offloading)
        is_precomputing = bool(self.trainer.get("precompute_ref_log_probs"))
        self.check_sequence_parallel(self.method, self.sweep is not None, is_precomputing)
        return self

    @model_validator(mode="after")
    def _check_method(self) -> RunConfig:
        method = self.trl_method
        if self.task_type not in (None, method.task_type):
            raise ConfigError(
                option="task_type", expected=f"{method.task_type} with {method.name}", found=self.task_type
            )
        if method.name == "grpo" and not (self.reward_funcs or self.reward_model_name_or_path):
            raise ConfigError(
                "grpo needs rewards", option="reward_funcs", fix="give reward_funcs, or reward_model_name_or_path"
            )
        losses = self.trainer.get("loss_type") or []
        for loss in [losses] if isinstance(losses, str) else losses:
            if loss not in method.losses:
                raise ConfigError(
                    option="loss_type", expected=f"of {method.name}: {', '.join(method.losses)}", found=repr(loss)
                )
        if method.name == "kto" and self.trainer.get("per_device_train_batch_size") == 1:
            raise ConfigError(
                "kto estimates its KL term from the other examples of a batch",
                option="per_device_train_batch_size",
                expected="2 or more",
                found=1,
            )
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> RunConfig:
        if self.include_input_output_embeddings and self.trainer.get("use_liger_kernel"):
            raise ConfigError(
                "Liger's losses read the LM head's weight in kernels of their own, untested with a quantized one",
                option="include_input_output_embeddings",
                fix="leave it or use_liger_kernel out",
            )
        if self.max_restarts and self.trainer.get("save_only_model"):
            raise ConfigError(
                "restarts resume from checkpoints, and save_only_model keeps the adapter alone",
                option="max_restarts",
                fix="leave it or save_only_model out",
            )
        if self.global_batch_size is not None and "gradient_accumulation_steps" in self.trainer:
            raise ConfigError(
                "decides gradient_accumulation_steps, which is given too",
                option="global_batch_size",
                fix="leave one of them out",
            )
        name_trackers(self.trainer.get("report_to"))
        _ = self.profile_range
        return self

    @property
    def trl_method(self) -> Method:
        """TRL's trainer and what belongs to it."""
        return METHODS[self.method]

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """The first and the last step to trace, counted from 1."""
        return parse_steps(self.profile_steps) if self.profile_steps else None

    @model_validator(mode="after")
    def _check_evaluation(self) -> RunConfig:
        trainer = self._fill_trainer()
        strategy = trainer.get("eval_strategy", "no")
        if strategy != "no" and self.eval_dataset is None:
            raise ConfigError(
                f"{strategy}, but there is no dataset to evaluate on", option="eval_strategy", fix="give eval_dataset"
            )
        chooses_best = trainer.get("load_best_model_at_end", False)
        needs_evaluation = {
            "load_best_model_at_end": chooses_best,
            "save_strategy": trainer.get("save_strategy") == "best",
            "early_stopping_patience": self.early_stopping_patience is not None,
            "sample_prompts": self.sample_prompts is not None,
        }
        for name in (name for name, is_given in needs_evaluation.items() if is_given and strategy == "no"):
            raise ConfigError(
                "needs evaluations", option=name, fix="give an eval_dataset, and eval_strategy: epoch or steps"
            )
        if self.early_stopping_patience is not None and not chooses_best:
            raise ConfigError(
                "training would stop at an adapter that is not the best, and save it",
                option="early_stopping_patience",
                fix="give load_best_model_at_end: true with it",
            )
        if self.early_stopping_patience is None and self.early_stopping_threshold:
            raise ConfigError(
                "has no meaning alone", option="early_stopping_threshold", fix="give early_stopping_patience with it"
            )
        metric = trainer.get("metric_for_best_model")
        if metric is not None and not self.trl_method.has_metric(metric):
            expected = f"one of {', '.join(self.trl_method.metrics)}"
            raise ConfigError(option="metric_for_best_model", expected=expected, found=repr(metric))
        if chooses_best:
            check_saves(trainer)
        return self

    def with_dtype(self, dtype: str) -> RunConfig:
        """Return the configuration with the dtype that `auto` was resolved to."""
        return self.model_copy(update={"dtype": dtype})

    def count_accumulation(self, world_size: int) -> dict[str, int]:
        """Return TRL's gradient_accumulation_steps if `global_batch_size` decides them, else nothing.

        A `sequence_parallel_size` of `auto` counts as 1: planning refuses to choose more with a `global_batch_size`.

        Raises:
            ConfigError: It cannot be divided over the ranks, or these not by `sequence_parallel_size`.
        """
        sharing = 1 if self.sequence_parallel_size == "auto" else self.sequence_parallel_size
        check_sequence_parallel_size(sharing, world_size)
        if self.global_batch_size is None:
            return {}
        batch = self.trainer.get("per_device_train_batch_size", _BATCH_SIZE)
        least = batch * world_size // sharing
        steps, left = divmod(self.global_batch_size, least)
        if left or not steps:
            groups = f"{world_size} ranks" if sharing == 1 else f"{world_size // sharing} groups of {sharing} ranks"
            raise ConfigError(
                f"{groups} have per_device_train_batch_size {batch}",
                option="global_batch_size",
                expected=f"a multiple of {least}",
                found=self.global_batch_size,
            )
        return {"gradient_accumulation_steps": steps}

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Arguments for TRL's configuration class: what was given, lorashard's defaults, and what follows from them.

        Without `output_dir`, and without the options of data that lorashard prepares before the trainer sees it. The
        flags `bf16` and `fp16` follow from the dtype, so they mean nothing before `with_dtype` while it is `auto`.
        """
        options = self._fill_trainer() | {"seed": self.seed}
        for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if options.get(flag) is None:
                options[flag] = self.dtype == dtype
        # By the names that every supported version of transformers has.
        options["gradient_checkpointing"] = self.activation_checkpointing
        if self.activation_checkpointing_kwargs is not None:
            options["gradient_checkpointing_kwargs"] = self.activation_checkpointing_kwargs
        return options

    def tokenizer_options(self) -> dict[str, Any]:
        """Return the arguments of `load_tokenizer`."""
        return {
            "model_name_or_path": self.model_name_or_path,
            "revision": self.model_revision,
            "trust_remote_code": self.trust_remote_code,
            "chat_template_path": self.chat_template_path,
            "eos_token": self.eos_token,
        }

    def data_options(self) -> DataOptions:
        """Return the options of the data alone, on which a prepared dataset depends."""
        return DataOptions(**{name: getattr(self, name) for name in DataOptions.model_fields})

    def lora_options(self) -> dict[str, Any]:
        """Return the arguments of PEFT's `LoraConfig`."""
        return self.describe_lora() | {"task_type": self.trl_method.task_type}

    def to_yaml(self) -> str:
        """Return all options as a flat YAML file, which `resolve` reads back to the same options."""
        own = self.model_dump(exclude={"trainer", *self.trl_method.absent_options})
        quantization = self.resolve_quantization()
        if quantization is not None:  # by one name, whichever was given
            own |= {"quantization": quantization.format, "load_in_4bit": False, "load_in_8bit": False}
        return yaml.safe_dump(own | self._fill_trainer(), sort_keys=False, allow_unicode=True)

    def _fill_trainer(self) -> dict[str, Any]:
        # An evaluation dataset that is never evaluated would be a surprise.
        evaluation = {"eval_strategy": "epoch"} if self.eval_dataset else {}
        filled = {"learning_rate": self.trl_method.learning_rate} | TRAINER_DEFAULTS | evaluation | self.trainer
        if filled.get("load_best_model_at_end"):  # it chooses among checkpoints, which follow the evaluations
            filled.setdefault("save_strategy", filled.get("eval_strategy", "no"))
        return filled


def find_method(given: Sequence[GivenOption]) -> Method:
    """Return the method, which the last of the options that name one decides.

    Raises:
        ConfigError: There is no such method.
    """
    chosen = [option for option in given if _find_canonical(option) == "method"]
    return METHODS[collect_options(chosen[-1:], read_own_options(RunConfig)).get("method", "sft")]


def read_known_options(method: Method = METHODS["sft"]) -> dict[str, Option]:
    """Return every option that a run takes: TRL's, and lorashard's own, which win over TRL's of the same name."""
    own = read_own_options(RunConfig)
    known = {name: option for name, option in own.items() if name not in method.absent_options | {"trainer"}}
    return read_trainer_options(method.config_class) | known


def collect_options(
    given: Sequence[GivenOption], known: Mapping[str, Option], method: Method | None = None
) -> dict[str, Any]:
    """Return the parsed values of options by their canonical names.

    Args:
        given: The options of one source, in which an option that is given twice, or by an alias too, must agree.
        known: The options that may be given.
        method: The run's, which refuses some; None for other commands.

    Raises:
        ConfigError: An unknown, refused or contradictory option, or a value of the wrong type.
    """
    pinned_options = PINNED_OPTIONS | dict(method.pinned) if method else PINNED_OPTIONS
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for option in given:
        written = option.name.replace("-", "_")
        name = _find_canonical(option)
        refusal = _explain_refusal(name, method)
        is_default = option.value in (None, "", "null", [], {})  # as other tools write it out
        if is_default and (refusal or (method and name not in known and _find_methods(name))):
            continue
        if refusal:
            raise ConfigError(f"cannot be chosen here: {refusal}", option=written, where=option.where)
        if name not in known:
            raise _refuse_unknown(option, known, method)
        value = option.value
        if isinstance(value, str):
            value = VALUE_ALIASES.get(name, {}).get(value, value)
        value = known[name].parse(value, option.where)
        if name in pinned_options:
            pinned, reason = pinned_options[name]
            if value not in (None, pinned):
                raise ConfigError(reason, option=name, expected=pinned, found=value, where=option.where)
            continue
        if name in values and values[name] != value:
            also = "" if spellings[name] == written else f", by the name {spellings[name]} too"
            problem = f"given twice{also}, as {values[name]!r} and {value!r}"
            raise ConfigError(problem, option=written, where=option.where, fix="keep one")
        values[name], spellings[name] = value, written
    return values


def _find_canonical(option: GivenOption) -> str:
    written = option.name.replace("-", "_")
    return ALIASES.get(written, written)


def _explain_refusal(name: str, method: Method | None) -> str | None:
    return REFUSED_OPTIONS.get(name) or (explain_refused(method, name) if method else None)


def _find_methods(name: str) -> list[str]:
    return [method.name for method in METHODS.values() if name in read_known_options(method)]


def _refuse_unknown(option: GivenOption, known: Mapping[str, Option], method: Method | None) -> ConfigError:
    name = option.name.replace("-", "_")
    others = _find_methods(_find_canonical(option)) if method else []
    if method and others:
        problem = f"an option of {', '.join(others)}, and the method of this run is {method.name}"
        return ConfigError(problem, option=name, where=option.where, fix="leave it out")
    offered = (one for one in [*known, *ALIASES] if not _explain_refusal(ALIASES.get(one, one), method))
    nearest = find_nearest(name, offered)
    if name in HINTS:
        fix = HINTS[name]
    elif isinstance(option.value, dict):
        fix = "options are flat: write those under it at the top level"
    elif nearest:
        fix = f"did you mean '{ALIASES.get(nearest, nearest)}'?"
    else:
        fix = "lorashard finetune --help lists the options"
    return ConfigError("unknown option", option=name, where=option.where, fix=fix)
