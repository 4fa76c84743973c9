"""The ranks of a command, and the base that it computes with. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import ConfigError

# The one option of a rank that `lorashard.launch` has started: a file of options, resolved before any rank started.
OPTIONS_FILE = "--options_file"

# These take folders, files and hub ids, but no URL.
_PATH_OPTIONS = (
    "model_name_or_path",
    "dataset",
    "eval_dataset",
    "output_dir",
    "resume_from_checkpoint",
    "reward_model_name_or_path",
    "chat_template_path",
    "adapter",
    "base",
    "merged",
    "prompts",
    "out",
    "push_to_hub",
)


class RankOptions(BaseModel):
    """The ranks of a command."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    gpus: int | list[int] | None = None
    """Number of GPUs to use, or their ids among the visible ones: `4`, `0,2`, or `2,` for GPU 2 alone. Default: all."""
    cpu: int | None = Field(default=None, ge=1)
    """Compute on the CPU with this many ranks."""

    def to_file(self, path: Path) -> None:
        """Write the options that were given as JSON, from which `from_file` makes the same object in a rank."""
        path.write_text(json.dumps(self.model_dump(exclude_unset=True)), encoding="utf-8")

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Return what `to_file` wrote, which has been checked already."""
        return cls.model_construct(**json.loads(path.read_text(encoding="utf-8")))

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        for name in _PATH_OPTIONS:
            value = getattr(self, name, None)
            if isinstance(value, str) and "://" in value:  # it may hold a password, so it is not repeated
                raise ConfigError(option=name, expected="a path or a hub id such as org/name", found="a URL with '://'")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.gpus is not None and self.cpu is not None:
            raise ConfigError("gpus and cpu are both given", option="gpus", fix="choose GPU ranks or CPU ranks")
        if isinstance(self.gpus, int) and self.gpus < 1:
            raise ConfigError(option="gpus", expected="a count of 1 or more, or ids such as 0,2", found=self.gpus)
        if isinstance(self.gpus, list) and (
            not self.gpus or min(self.gpus) < 0 or len(set(self.gpus)) < len(self.gpus)
        ):
            raise ConfigError(option="gpus", expected="different ids of 0 or more", found=self.gpus)
        return self


class BaseOptions(RankOptions):
    """How the base is loaded, on the ranks that compute with it."""

    model_revision: str | None = None
    """The commit, branch or tag of the model on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the model or its tokenizer."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The dtype of the base and of the computation. `auto`: bfloat16 where the device has instructions for it, as GPUs
    have since Ampere, else float32. float16 needs a GPU."""
    attn_implementation: str | None = None
    """transformers' attention: `sdpa`, `eager`, `flash_attention_2`, ..."""
    allow_base_mismatch: bool = False
    """Use an adapter although it was trained on another base."""

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.cpu is not None and self.dtype == "float16":
            raise ConfigError(
                "float16 needs a GPU, because its loss scaling has no CPU implementation",
                option="dtype",
                fix="use bfloat16 or float32",
            )
        return self
