"""The options of a run: lorashard's own, the data's, and all of TRL's for the method, in one flat set of names.

Reading order: `RunConfig` (what can be chosen), `RunConfig.resolve` (command line over YAML over defaults), then the
tables of other tools' spellings and of options that cannot be chosen here. Imports neither torch nor transformers nor
TRL.
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
)
from .placement import PlacementOptions, explain_invalid, parse_steps
from .precision import choose_precision

# Where lorashard's defaults are not TRL's: what works for LoRA, and no loss hidden that is not finite. The
# learning rate is the method's.
TRAINER_DEFAULTS = {
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "report_to": "none",
    "logging_nan_inf_filter": False,
}


_SAVE_STEPS = 500  # transformers' default
_BATCH_ROWS = 8  # likewise

_REQUIRED = ("model_name_or_path", "dataset", "output_dir")


class RunConfig(DataOptions, PlacementOptions, AdapterOptions, BaseOptions):
    """Everything that decides a run. A key that is not lorashard's or the data's is one of TRL's for the method.

    `RunConfig(model_name_or_path=..., max_steps=10)` takes TRL's options by their own names too, and keeps them in
    `trainer`. Mistakes raise `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    model_name_or_path: str
    """A model's folder, or its id on the Hugging Face hub."""
    method: Literal["sft", "dpo", "kto", "reward", "grpo"] = "sft"
    """TRL's trainer, and with it the options and the dataset's columns: docs/methods.md."""
    output_dir: str = ""
    """The run's folder: configuration, metrics, logs, checkpoints and the adapter."""
    overwrite_output_dir: bool = False
    """Start anew in a folder that holds another run."""
    resume_from_checkpoint: str | bool | None = None
    """Go on from a checkpoint: its folder, true for the newest complete one of output_dir, or `auto`: the same, and
    start afresh where there is none. `--resume` for short."""
    queue: bool = False
    """Wait until the GPUs asked for, or with --cpu the cores, are free of other lorashard runs, first come first
    served."""
    global_batch_size: int | None = Field(default=None, ge=1)
    """Rows of a step, over all ranks; gradient_accumulation_steps follows from it, whatever the number of ranks."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do where a loss or the gradient's norm is NaN or infinite: stop the run, or leave that step out."""
    max_restarts: int = Field(default=0, ge=0)
    """How often to start the ranks again, from the newest complete checkpoint, where one has died or hangs."""
    heartbeat_timeout: int = Field(default=120, ge=0)
    """Seconds after which a rank that gives no sign of life, such as a stopped process, ends the run; 0: never."""

    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a better `metric_for_best_model`; needs `load_best_model_at_end`."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """By how much it must be better to count."""
    sample_prompts: list[str] | None = None
    """Answer these prompts after each evaluation."""

    reward_funcs: list[str] | None = None
    """Of grpo: TRL's reward functions by name, such as `think_format_reward`, or import paths such as
    `my_rewards.is_right`."""
    reward_model_name_or_path: str | None = None
    """Of grpo: a reward model's folder or hub id; it is loaded whole on each rank."""

    profile_steps: str | None = None
    """Trace these steps on each rank, and say where their time went, in output_dir/profile: `3-5`, or `3`."""

    chat_template_path: str | None = None
    """A .jinja file, or a folder or hub id whose chat template to use."""
    eos_token: str | None = None
    """The token that ends a turn or a sequence, if it is not the tokenizer's own."""

    task_type: Literal["CAUSAL_LM", "SEQ_CLS"] | None = None
    """What PEFT writes into the adapter's configuration; the method decides."""

    activation_checkpointing: bool = True
    """Recompute activations in backward instead of keeping them."""
    activation_checkpointing_kwargs: dict[str, Any] | None = None
    """transformers' options for it, such as `{"use_reentrant": false}`."""
    trainer: dict[str, Any] = Field(default_factory=dict)
    """What was given of TRL's options for the method; not an option itself."""

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
        in_file = read_yaml_options(yaml_path) if yaml_path else []
        on_command_line = read_command_line(overrides)
        method = find_method([*in_file, *on_command_line])
        known = read_known_options(method)
        values = collect_options(in_file, known, method) | collect_options(on_command_line, known, method)
        for name in required:
            if not values.get(name):
                raise ConfigError(
                    f"no {name}: give --{name} on the command line, or '{name}: ...' in the --config file"
                )
        return cls(**values)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain_invalid(error)) from error

    @model_validator(mode="before")
    @classmethod
    def _sort_options(cls, values: dict[str, Any]) -> dict[str, Any]:
        given = [GivenOption(name, value, "") for name, value in values.items() if name != "trainer"]
        given += [GivenOption(name, value, "") for name, value in values.get("trainer", {}).items()]
        method = find_method(given)
        options = collect_options(given, read_known_options(method), method)
        options |= choose_precision(options)
        own_names = cls.model_fields.keys() - method.absent_options
        own = {name: value for name, value in options.items() if name in own_names}
        trainer = {name: value for name, value in options.items() if name not in own}
        if own.get("output_dir"):  # no shell has seen what YAML holds
            own["output_dir"] = os.path.expanduser(own["output_dir"])
        return own | {"trainer": trainer}

    @model_validator(mode="after")
    def _check_checkpointing(self) -> RunConfig:
        every = (self.activation_checkpointing_kwargs or {}).get("every_n_layers", 1)
        if every != 1 and self.activation_checkpointing_layers != "all":
            raise ConfigError(
                f"activation_checkpointing_layers: {self.activation_checkpointing_layers} and every_n_layers: {every} "
                "both say which layers are recomputed; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_method(self) -> RunConfig:
        method = self.trl_method
        if self.task_type not in (None, method.task_type):
            raise ConfigError(
                f"task_type: {method.name} trains {method.task_type}, found {self.task_type}: leave it out"
            )
        if method.name == "grpo" and not (self.reward_funcs or self.reward_model_name_or_path):
            raise ConfigError("grpo needs rewards: give reward_funcs, or reward_model_name_or_path")
        losses = self.trainer.get("loss_type") or []
        for loss in [losses] if isinstance(losses, str) else losses:
            if loss not in method.losses:
                raise ConfigError(f"loss_type: {method.name} has {', '.join(method.losses)}; found '{loss}'")
        if method.name == "kto" and self.trainer.get("per_device_train_batch_size") == 1:
            raise ConfigError(
                "per_device_train_batch_size: kto estimates its KL term from the other rows of a batch, so expected 2 "
                "or more, found 1"
            )
        return self

    @model_validator(mode="after")
    def _check_head(self) -> RunConfig:
        if self.include_input_output_embeddings and self.trainer.get("use_liger_kernel"):
            raise ConfigError(
                "include_input_output_embeddings: Liger's losses hand the LM head's weight to kernels of their own, "
                "which was not tried with a quantized one: leave it or use_liger_kernel out"
            )
        return self

    @model_validator(mode="after")
    def _check_restarts(self) -> RunConfig:
        if self.max_restarts and self.trainer.get("save_only_model"):
            raise ConfigError(
                "max_restarts needs checkpoints that can be gone on from, and save_only_model keeps the adapter alone: "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> RunConfig:
        if self.global_batch_size is not None and "gradient_accumulation_steps" in self.trainer:
            raise ConfigError(
                "global_batch_size sets gradient_accumulation_steps, by the number of ranks: leave one of them out"
            )
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
    def _check_profile_steps(self) -> RunConfig:
        _ = self.profile_range
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> RunConfig:
        trainer = self._fill_trainer()
        strategy = trainer.get("eval_strategy", "no")
        if strategy != "no" and self.eval_dataset is None:
            raise ConfigError(f"eval_strategy is {strategy}, but there is no eval_dataset to evaluate on: give one")
        chooses_best = trainer.get("load_best_model_at_end", False)
        needy = {
            "load_best_model_at_end": chooses_best,
            "save_strategy: best": trainer.get("save_strategy") == "best",
            "early_stopping_patience": self.early_stopping_patience is not None,
            "sample_prompts": self.sample_prompts is not None,
        }
        for name in (name for name, is_given in needy.items() if is_given and strategy == "no"):
            raise ConfigError(f"{name} needs evaluations: give an eval_dataset, and eval_strategy: epoch or steps")
        if self.early_stopping_patience is not None and not chooses_best:
            raise ConfigError(
                "early_stopping_patience needs load_best_model_at_end: true: the adapter of the last step would be "
                "saved, and training stops because it is not the best"
            )
        if self.early_stopping_patience is None and self.early_stopping_threshold:
            raise ConfigError("early_stopping_threshold says nothing without early_stopping_patience: give both")
        metric = trainer.get("metric_for_best_model")
        if metric is not None and not self.trl_method.has_metric(metric):
            expected = ", ".join(self.trl_method.metrics)
            raise ConfigError(f"metric_for_best_model: expected one of {expected}, found {metric!r}")
        if chooses_best:
            _check_saves(trainer)
        return self

    def with_dtype(self, dtype: str) -> RunConfig:
        """Return the configuration with what `dtype: auto` became."""
        return self.model_copy(update={"dtype": dtype})

    def count_accumulation(self, world_size: int) -> dict[str, int]:
        """Return TRL's option for how many microbatches make a step, where `global_batch_size` decides it.

        Raises:
            ConfigError: It cannot be divided over the ranks.
        """
        if self.global_batch_size is None:
            return {}
        batch = self.trainer.get("per_device_train_batch_size", _BATCH_ROWS)
        steps, left = divmod(self.global_batch_size, batch * world_size)
        if left or not steps:
            raise ConfigError(
                f"global_batch_size: expected a multiple of {batch * world_size}, {world_size} ranks with "
                f"per_device_train_batch_size {batch}, found {self.global_batch_size}"
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
        known = read_trainer_options(self.trl_method.config_class)
        prefix = "activation" if "activation_checkpointing" in known else "gradient"
        options[f"{prefix}_checkpointing"] = self.activation_checkpointing
        if self.activation_checkpointing_kwargs is not None:
            options[f"{prefix}_checkpointing_kwargs"] = self.activation_checkpointing_kwargs
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

    def data_options(self) -> dict[str, Any]:
        """Return the arguments of `DataOptions`."""
        return {name: getattr(self, name) for name in DataOptions.model_fields}

    def placement_options(self) -> dict[str, Any]:
        """Return the arguments of `load` that say where the base rests."""
        return {name: getattr(self, name) for name in PlacementOptions.model_fields if name in self.model_fields_set}

    def lora_options(self) -> dict[str, Any]:
        """Return the arguments of PEFT's `LoraConfig`."""
        return self.describe_lora() | {"task_type": self.trl_method.task_type}

    def to_yaml(self) -> str:
        """Return the whole configuration as a flat YAML file that `resolve` reads back to the same options."""
        own = self.model_dump(exclude={"trainer", *self.trl_method.absent_options})
        quantization = self.resolve_quantization()
        if quantization is not None:  # by one name, whichever was given
            own |= {"quantization": quantization.format, "load_in_4bit": False, "load_in_8bit": False}
        return yaml.safe_dump(own | self._fill_trainer(), sort_keys=False, allow_unicode=True)

    def _fill_trainer(self) -> dict[str, Any]:
        # Rows to evaluate on that nobody evaluates would be a surprise.
        evaluation = {"eval_strategy": "epoch"} if self.eval_dataset else {}
        filled = {"learning_rate": self.trl_method.learning_rate} | TRAINER_DEFAULTS | evaluation | self.trainer
        if filled.get("load_best_model_at_end"):  # it chooses among checkpoints, which follow the evaluations
            filled.setdefault("save_strategy", filled.get("eval_strategy", "no"))
        return filled


def find_method(given: Sequence[GivenOption]) -> Method:
    """Return the method that was chosen, by the last of the options that names one.

    Raises:
        ConfigError: There is no such method.
    """
    chosen = [option for option in given if _name_truly(option) == "method"]
    return METHODS[collect_options(chosen[-1:], read_own_options(RunConfig)).get("method", "sft")]


def read_known_options(method: Method = METHODS["sft"]) -> dict[str, Option]:
    """Return every option that a run takes: lorashard's own, the data's and TRL's, the first meaning wins."""
    own = read_own_options(RunConfig)
    known = {name: option for name, option in own.items() if name not in method.absent_options | {"trainer"}}
    return read_trainer_options(method.config_class) | known


def collect_options(
    given: Sequence[GivenOption], known: Mapping[str, Option], method: Method | None = None
) -> dict[str, Any]:
    """Return the values of options by their true names, parsed.

    Args:
        given: From one source: an option, or it and its alias, given twice must agree.
        known: What may be given.
        method: Of the run, if it is one: what it refuses.

    Raises:
        ConfigError: An unknown, refused or contradictory option, or a value of the wrong type.
    """
    pinned_options = PINNED_OPTIONS | dict(method.pinned) if method else PINNED_OPTIONS
    values: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for option in given:
        written = option.name.replace("-", "_")
        name = _name_truly(option)
        place = f" ({option.where})" if option.where else ""
        refusal = REFUSED_OPTIONS.get(name) or (method and explain_refused(method, name))
        is_default = option.value in (None, "", "null", [], {})  # as other tools write it out
        if is_default and (refusal or (method and name not in known and _find_methods(name))):
            continue
        if refusal:
            raise ConfigError(f"{written} is not an option here{place}: {refusal}")
        if name not in known:
            raise ConfigError(_explain_unknown(option, known, method))
        spoken = VALUE_ALIASES.get(name, {}).get(option.value, option.value) if isinstance(option.value, str) else None
        value = known[name].parse(option.value if spoken is None else spoken, option.where)
        if name in pinned_options:
            pinned, reason = pinned_options[name]
            if value not in (None, pinned):
                raise ConfigError(f"{name} must be {pinned}{place}: {reason}")
            continue
        if name in values and values[name] != value:
            first = spellings[name]
            names = f"{written} is given twice" if first == written else f"{first} and {written} are the same option"
            raise ConfigError(f"{names}, with two values, {values[name]!r} and {value!r}{place}: keep one")
        values[name], spellings[name] = value, written
    return values


def _name_truly(option: GivenOption) -> str:
    written = option.name.replace("-", "_")
    return ALIASES.get(written, written)


def _find_methods(name: str) -> list[str]:
    return [method.name for method in METHODS.values() if name in read_known_options(method)]


def _explain_unknown(option: GivenOption, known: Mapping[str, Option], method: Method | None) -> str:
    name, place = option.name.replace("-", "_"), f" ({option.where})" if option.where else ""
    if method is not None:
        others = _find_methods(_name_truly(option))
        if others:
            return f"{name} is an option of {', '.join(others)}, and this run is {method.name}{place}: leave it out"
    nearest = find_nearest(name, [*known, *ALIASES])
    if name in HINTS:
        hint = HINTS[name]
    elif isinstance(option.value, dict):
        hint = "the options are flat, write those under it at the top level"
    elif nearest:
        hint = f"did you mean '{ALIASES.get(nearest, nearest)}'?"
    else:
        hint = "lorashard finetune --help lists the options"
    return f"unknown option '{name}'{place}: {hint}"


def _check_saves(trainer: Mapping[str, Any]) -> None:
    """Refuse what leaves an evaluated adapter without a checkpoint; transformers does so too, in each rank."""
    saves, evaluates = trainer["save_strategy"], trainer["eval_strategy"]
    if saves not in ("best", evaluates):
        raise ConfigError(
            f"load_best_model_at_end needs a checkpoint of each evaluation, but save_strategy is {saves} and "
            f"eval_strategy is {evaluates}: give the same, or save_strategy: best"
        )
    save_steps = trainer.get("save_steps", _SAVE_STEPS)
    eval_steps = trainer.get("eval_steps") or trainer["logging_steps"]
    if saves == "steps" and min(save_steps, eval_steps) >= 1 and save_steps % eval_steps:
        raise ConfigError(
            f"load_best_model_at_end needs save_steps that are a multiple of eval_steps, found {save_steps} and "
            f"{eval_steps}"
        )
