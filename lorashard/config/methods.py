"""The training methods: TRL's trainer of each, and what differs from one to the next. Imports no library."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError

# Only sft is tokenized here, before the ranks form a group; these options say how.
_SFT_DATA = frozenset(
    {
        "dataset_text_field",
        "max_length",
        "truncation_mode",
        "packing",
        "packing_strategy",
        "eval_packing",
        "completion_only_loss",
        "assistant_only_loss",
        "shuffle_dataset",
    }
)
_REWARDS = frozenset({"reward_funcs", "reward_model_name_or_path"})

_PREFERENCE = ("chosen", "rejected")
_UNPAIRED = ("prompt", "completion", "label")
# Columns that TRL's chat templates take beside the messages.
_TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")

# The columns that lorashard itself tokenizes, beside the one of plain texts that `dataset_text_field` names.
SFT_COLUMNS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("question", "answer"),
)
# What columns hold, and the methods that train on it; the first set that a dataset has tells.
_MEANINGS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (_PREFERENCE, "preferences", ("dpo", "kto", "reward")),
    (_UNPAIRED, "completions with a label", ("kto",)),
    (("messages",), "conversations", ("sft",)),
    (("conversations",), "conversations", ("sft",)),
    *((columns, "prompts with completions", ("sft",)) for columns in SFT_COLUMNS[2:]),
    (("prompt",), "prompts alone", ("grpo",)),
    (("text",), "plain texts", ("sft",)),
)

_UNSHARDED_WEIGHTS = "it generates from unsharded weights, and the base is sharded: transformers generates here"
_PEFT_REFERENCE = "with PEFT the reference is the initial adapter, and TRL has no model to synchronize"


@dataclass(frozen=True)
class Method:
    """A training method: TRL's trainer, and what lorashard has to know about it.

    Attributes:
        name: as `method` takes it.
        learning_rate: ten times TRL's default, which is for full fine-tuning, as TRL's documentation advises.
        losses: the values of `loss_type`, which TRL checks in the first step.
        metrics: metrics of an evaluation by which one adapter can be better than another.
        formats: sets of columns that the trainer takes, of which the first that a dataset has decides; empty if
            lorashard tokenizes the rows itself.
        optional_columns: columns that the trainer reads if a dataset has them; None: all.
        rows_per_example: sequences that pass the model for each example of `per_device_train_batch_size`.
        generates: whether the rows are prompts, of which it generates completions.
        is_classifier: whether it trains a head with one output, in place of the LM head.
        uncounted: memory and time that a plan leaves out.
        absent_options: options of lorashard that this method does not have.
        refused: TRL's options that cannot be chosen here, with the reason.
        pinned: TRL's options whose one workable value is TRL's default, with the reason.
    """

    name: str
    config_class: str
    trainer_class: str
    learning_rate: float
    losses: tuple[str, ...]
    metrics: tuple[str, ...]
    formats: tuple[tuple[str, ...], ...] = ()
    optional_columns: tuple[str, ...] | None = _TEMPLATE_COLUMNS
    rows_per_example: int = 1
    generates: bool = False
    is_classifier: bool = False
    uncounted: str = ""
    absent_options: frozenset[str] = _SFT_DATA | _REWARDS
    refused: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def task_type(self) -> str:
        """PEFT's task type."""
        return "SEQ_CLS" if self.is_classifier else "CAUSAL_LM"

    @property
    def is_prepared_here(self) -> bool:
        """Whether lorashard tokenizes the rows, rather than the trainer."""
        return not self.formats

    def takes(self, columns: Collection[str], text_field: str = "text") -> bool:
        """Return whether a dataset with these columns can be trained on."""
        sets = self.formats or (*SFT_COLUMNS, (text_field,))
        return any(set(wanted) <= set(columns) for wanted in sets)

    def has_metric(self, name: str) -> bool:
        """Return whether an evaluation has the metric; `rewards/...` may be named by the user's own functions."""
        name = name.removeprefix("eval_")
        return name in self.metrics or any(name.startswith(m[:-1]) for m in self.metrics if m.endswith("*"))


_PAIR_METRICS = tuple(f"{what}/{which}" for what in ("rewards", "logps", "logits") for which in _PREFERENCE)

METHODS = {
    method.name: method
    for method in (
        Method(
            "sft",
            "SFTConfig",
            "SFTTrainer",
            learning_rate=2e-4,
            losses=("nll", "dft", "chunked_nll"),
            metrics=("loss", "mean_token_accuracy", "entropy", "aux_loss"),
            absent_options=_REWARDS,
            refused={"dataset_num_proc": "lorashard prepares the data itself, once, before the ranks form a group"},
        ),
        Method(
            "dpo",
            "DPOConfig",
            "DPOTrainer",
            learning_rate=1e-5,
            losses=("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot")
            + ("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
            metrics=("loss", "rewards/accuracies", "rewards/margins", *_PAIR_METRICS)
            + ("mean_token_accuracy", "entropy", "aux_loss"),
            formats=(("prompt", *_PREFERENCE), _PREFERENCE),
            optional_columns=(*_TEMPLATE_COLUMNS, "ref_chosen_logps", "ref_rejected_logps"),
            rows_per_example=2,
            uncounted="the forward pass of the reference in the step's time, and its adapter of the same size",
            pinned={"sync_ref_model": (False, _PEFT_REFERENCE)},
        ),
        Method(
            "kto",
            "KTOConfig",
            "KTOTrainer",
            learning_rate=1e-5,
            losses=("kto", "apo_zero_unpaired"),
            metrics=("loss", "kl", "rewards/margins", *_PAIR_METRICS, "entropy", "aux_loss"),
            formats=(_UNPAIRED, ("prompt", *_PREFERENCE), _PREFERENCE),
            optional_columns=(*_TEMPLATE_COLUMNS, "ref_logps", "ref_KL_logps"),
            uncounted="the forward passes of the reference and of the mismatched pairs in the step's time, and the "
            "reference's adapter of the same size",
            pinned={"sync_ref_model": (False, _PEFT_REFERENCE)},
        ),
        Method(
            "reward",
            "RewardConfig",
            "RewardTrainer",
            learning_rate=1e-3,
            losses=(),
            metrics=("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"),
            formats=(("prompt", *_PREFERENCE), _PREFERENCE),
            optional_columns=(*_TEMPLATE_COLUMNS, "margin"),
            rows_per_example=2,
            is_classifier=True,
            absent_options=_SFT_DATA | _REWARDS | {"sample_prompts"},
        ),
        Method(
            "grpo",
            "GRPOConfig",
            "GRPOTrainer",
            learning_rate=1e-5,
            losses=("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
            metrics=("loss", "reward", "reward_std", "kl", "entropy", "rewards/*", "completions/*", "aux_loss"),
            formats=(("prompt",),),
            optional_columns=None,
            generates=True,
            uncounted="generation, neither its seconds nor its key-value cache, and a reward model",
            absent_options=_SFT_DATA,
            refused={
                "ds3_gather_for_generation": "it is DeepSpeed's, and lorashard shards the base: choose with placement",
                "transformers_continuous_batching_config": _UNSHARDED_WEIGHTS,
            },
            pinned={
                "use_vllm": (False, _UNSHARDED_WEIGHTS),
                "use_transformers_continuous_batching": (False, _UNSHARDED_WEIGHTS),
                "use_transformers_paged": (False, _UNSHARDED_WEIGHTS),
                "cast_lm_head_to_fp32": (False, "the base, its head included, computes in dtype: give dtype: float32"),
                "sync_ref_model": (False, _PEFT_REFERENCE),
            },
        ),
    )
}


def explain_refused(method: Method, name: str) -> str | None:
    """Return why TRL's option `name` cannot be chosen with `method`, if it cannot."""
    if name in method.refused:
        return method.refused[name]
    return f"use_vllm is not offered: {_UNSHARDED_WEIGHTS}" if name.startswith("vllm_") else None


def suggest_method(method: Method, columns: Collection[str]) -> tuple[str, str] | None:
    """Return what a dataset's columns are, and the method that trains on them; None if no other one does."""
    found = next((entry for entry in _MEANINGS if set(entry[0]) <= set(columns)), None)
    is_half_a_pair = len(set(_PREFERENCE) & set(columns)) == 1
    if found is None or method.name in found[2] or is_half_a_pair:
        return None
    return found[1], found[2][0]


def refuse_columns(method: Method, columns: Sequence[str], dataset: str, text_field: str = "text") -> DataError:
    """Return the error for columns that the method does not train on, with the method that does."""
    sets = method.formats or (*SFT_COLUMNS, (text_field,))
    suggested = suggest_method(method, columns)
    fix = "name a column of plain text with dataset_text_field" if method.is_prepared_here else None
    return DataError(
        "its columns are not recognized" if method.is_prepared_here else "",
        where=f"dataset {dataset!r}",
        option="method" if suggested else None,
        expected=f"the columns {', or '.join(' + '.join(wanted) for wanted in sets)} for {method.name}",
        found=", ".join(columns) or "none",
        fix=f"these are {suggested[0]}: choose method {suggested[1]}" if suggested else fix,
    )
