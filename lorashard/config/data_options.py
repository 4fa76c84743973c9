"""What can be chosen about the data; names and meanings are TRL's where TRL has them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Of the files that rows are read from.
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class DataOptions(BaseModel):
    """Which rows to train on, what they may look like, and how they become tokens and labels.

    The tokenizer's own choices (chat template, end-of-sequence token) are made by `load_tokenizer`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    dataset: str = ""
    """A .jsonl, .json, .csv or .parquet file, a folder of such files, or the id of a Hugging Face hub dataset."""
    dataset_config: str | None = None
    """The configuration (subset) of a hub dataset."""
    dataset_split: str = "train"
    """The split to train on, for a folder or a hub dataset; a single file is taken whole."""
    dataset_revision: str | None = None
    """The commit, branch or tag of a hub dataset."""
    eval_dataset: str | None = None
    """Rows to evaluate on: the same kinds as `dataset`. When it names the same hub dataset, the same configuration and
    revision are used."""
    eval_dataset_split: str = "test"
    """The split to evaluate on, for a folder or a hub dataset."""
    dataset_text_field: str = "text"
    """The column of a plain text dataset."""
    max_train_samples: int | None = Field(default=None, gt=0)
    """Read only the first rows of `dataset`."""
    max_eval_samples: int | None = Field(default=None, gt=0)
    """Read only the first rows of `eval_dataset`."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be trained on: stop and name it, or leave it out and report it."""

    max_length: int | None = Field(default=1024, gt=1)
    """Longest sequence in tokens; longer rows are cut. With packing, the length of a packed sequence."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a row that is too long stays."""
    packing: bool = False
    """Join rows into sequences of up to `max_length` tokens."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """TRL's packing: `bfd` cuts long rows, `bfd_split` goes on with them in another sequence, `wrapped` ignores where
    rows end."""
    eval_packing: bool | None = None
    """Pack the evaluation rows too; the same as `packing` if not given."""
    completion_only_loss: bool | None = None
    """Learn the completion and not the prompt. Not given: yes, for every format that has a prompt."""
    assistant_only_loss: bool | None = None
    """Learn what the assistant says and nothing else. Not given: yes for conversations (`messages`, `conversations`),
    where TRL's default is no; no for prompts with completions, where `completion_only_loss` decides."""
    shuffle_dataset: bool = False
    """Shuffle the rows with `seed`, before packing too."""
    seed: int = 42
    """The seed of `shuffle_dataset`."""

    @model_validator(mode="after")
    def _check_packing(self) -> DataOptions:
        if not (self.packing or self.eval_packing):
            return self
        if self.max_length is None:
            raise ValueError("packing needs max_length, the length of a packed sequence, but it is null")
        if self.truncation_mode == "keep_end":
            raise ValueError("packing cuts the end of long rows: truncation_mode must be keep_start, not keep_end")
        return self
