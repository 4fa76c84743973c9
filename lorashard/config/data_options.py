"""The options of the data; names and meanings are TRL's where TRL has them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import ConfigError

# Of the files that examples are read from.
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class ExampleOptions(BaseModel):
    """How examples are read, and become tokens and labels."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    dataset_config: str | None = None
    """The configuration (subset) of a hub dataset."""
    dataset_revision: str | None = None
    """The commit, branch or tag of a hub dataset."""
    dataset_text_field: str = "text"
    """The column of a plain text dataset."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with an example that cannot be trained on: stop and name it, or leave it out and report it."""
    max_length: int | None = Field(default=1024, gt=1)
    """Max sequence length in tokens; longer sequences are truncated. With packing, the length of a packed sequence."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a sequence that is too long is kept."""
    completion_only_loss: bool | None = None
    """Compute the loss on the completion and not on the prompt. Default: yes, for every format that has a prompt."""
    assistant_only_loss: bool | None = None
    """Compute the loss on the assistant's turns alone. Default: yes for conversations (`messages`, `conversations`),
    where TRL's is no; no for prompts with completions, where `completion_only_loss` decides."""


class DataOptions(ExampleOptions):
    """Which examples to train on, and how they become tokens and labels.

    The tokenizer's own choices (chat template, end-of-sequence token) are made by `load_tokenizer`.
    """

    dataset: str = ""
    """A .jsonl, .json, .csv or .parquet file, a folder of such files, or the id of a Hugging Face hub dataset."""
    dataset_split: str = "train"
    """The split of a folder or a hub dataset to train on; a single file has none."""
    eval_dataset: str | None = None
    """The dataset to evaluate on, of the same kinds as `dataset`. If it is the same hub dataset, the same configuration
    and revision are used."""
    eval_dataset_split: str = "test"
    """The split of a folder or a hub dataset to evaluate on."""
    max_train_samples: int | None = Field(default=None, gt=0)
    """Use only the first examples of `dataset`."""
    max_eval_samples: int | None = Field(default=None, gt=0)
    """Use only the first examples of `eval_dataset`."""
    packing: bool = False
    """Pack examples into sequences of up to `max_length` tokens."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """TRL's packing: `bfd` truncates long examples, `bfd_split` continues them in another sequence, `wrapped` ignores
    where examples end."""
    eval_packing: bool | None = None
    """Pack the evaluation examples too. Default: as `packing`."""
    shuffle_dataset: bool = False
    """Shuffle the examples with `seed`, and before packing."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """The seed of `shuffle_dataset`."""

    @model_validator(mode="after")
    def _check_packing(self) -> DataOptions:
        if not (self.packing or self.eval_packing):
            return self
        if self.max_length is None:
            raise ConfigError(
                option="max_length", expected="the length of a packed sequence, with packing", found="null"
            )
        if self.truncation_mode == "keep_end":
            raise ConfigError(option="truncation_mode", expected="keep_start, with packing", found="keep_end")
        return self
