"""On what ranks a command works, and which base it computes with. Imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import ConfigError

# Folders, files and hub ids: nothing that is found under an address.
_PLACES = (
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
    """How many of the visible GPUs, or which: `4`, or `0,2`, or `2,` for the third alone. Not given: all."""
    cpu: int | None = Field(default=None, ge=1)
    """Compute on the CPU with this many ranks."""

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        for name in _PLACES:
            value = getattr(self, name, None)
            if isinstance(value, str) and "://" in value:  # it may hold a password, so it is not repeated
                raise ConfigError(f"{name}: expected a path or a hub id such as org/name, found an address with '://'")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.gpus is not None and self.cpu is not None:
            raise ConfigError("gpus and cpu are both given: choose GPU ranks or CPU ranks")
        if isinstance(self.gpus, int) and self.gpus < 1:
            raise ConfigError(f"gpus: expected a count of 1 or more, or ids such as 0,2; found {self.gpus}")
        if isinstance(self.gpus, list) and (
            not self.gpus or min(self.gpus) < 0 or len(set(self.gpus)) < len(self.gpus)
        ):
            raise ConfigError(f"gpus: expected different ids of 0 or more, found {self.gpus}")
        return self


class BaseOptions(RankOptions):
    """How the base is read, and the ranks that compute with it."""

    model_revision: str | None = None
    """The commit, branch or tag of the model on the hub."""
    trust_remote_code: bool = False
    """Run code that comes with the model or its tokenizer."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The base's dtype and that of the computation. `auto`: bfloat16 where the device has instructions for it, as GPUs
    have since Ampere, and float32 elsewhere. float16 needs a GPU."""
    attn_implementation: str | None = None
    """transformers' attention: `sdpa`, `eager`, `flash_attention_2`, ..."""
    allow_base_mismatch: bool = False
    """Go on with an adapter although it was trained on another base."""

    @model_validator(mode="after")
    def _check_dtype(self) -> Self:
        if self.cpu is not None and self.dtype == "float16":
            raise ConfigError("dtype float16 needs a GPU (its loss scaling has no CPU form): use bfloat16 or float32")
        return self
