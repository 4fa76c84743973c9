"""The options of the commands that use a trained adapter: merge, verify, chat, generate, eval. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError

from .base_options import BaseOptions
from .config import collect_options, read_own_options
from .data.options import DataOptions
from .errors import ConfigError
from .options import read_command_line
from .placement import PlacementOptions, explain_invalid


class CommandOptions(BaseOptions):
    """What a command takes: first its positional words, then options as in a run."""

    positionals: ClassVar[tuple[str, ...]] = ()
    num_required: ClassVar[int] = 0
    short_names: ClassVar[dict[str, str]] = {"as_json": "json"}

    @classmethod
    def find_own_names(cls) -> list[str]:
        """Return the names of the options, without the positional words; those of all commands last."""
        shared = [*PlacementOptions.model_fields, *BaseOptions.model_fields]
        own = [name for name in cls.model_fields if name not in shared and name not in cls.positionals]
        return own + [name for name in shared if name in cls.model_fields]

    @classmethod
    def read(cls, words: Sequence[str]) -> Self:
        """Return the options that a command line gives.

        Raises:
            ConfigError: a wrong or missing word.
        """
        plain: list[str] = []
        for word in words[: len(cls.positionals)]:
            if word.startswith("-"):
                break
            plain.append(word)
        if len(plain) < cls.num_required:
            missing = cls.positionals[len(plain)]
            raise ConfigError(f"no {missing}: give {' '.join(cls.positionals).upper()} first, then the options")
        known = read_own_options(cls)
        known |= {short: known[name] for name, short in cls.short_names.items() if name in known}
        given = collect_options(read_command_line(words[len(plain) :]), known)
        given |= {name: given.pop(short) for name, short in cls.short_names.items() if short in given}
        try:
            return cls(**given | dict(zip(cls.positionals, plain, strict=False)))
        except ValidationError as error:
            raise ConfigError(explain_invalid(error)) from error


class UseOptions(PlacementOptions, CommandOptions):
    """An adapter on its base, which rests anywhere."""

    base: str | None = None
    """The base's folder or hub id, if it is not where the adapter says."""

    def placement_options(self) -> dict[str, Any]:
        """Return the arguments of `load` that say where the base rests."""
        return {name: getattr(self, name) for name in PlacementOptions.model_fields if name in self.model_fields_set}


class GenerateOptions(UseOptions):
    """`lorashard generate ADAPTER --prompts P --out O`."""

    positionals = ("adapter",)
    num_required = 1

    adapter: str
    """An adapter's folder, a run's, or a hub id."""
    prompts: str
    """A JSON lines file with a `prompt` (text, or messages) or `messages` in each row."""
    out: str
    """The file to write: each row of the prompts with its `completion`."""
    base_only: bool = False
    """Answer with the adapter off."""
    compare: bool = False
    """Answer with the adapter and without it."""
    max_new_tokens: int = Field(default=256, ge=1)
    """How many tokens an answer may have."""
    do_sample: bool = False
    """Sample; otherwise the most probable token is taken each time."""
    temperature: float = Field(default=1.0, gt=0)
    """What sampling divides the logits by."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability."""
    top_k: int = Field(default=50, ge=0)
    """Sample from this many of the most probable tokens; 0 for all."""
    seed: int = 42
    """Of the sampling."""
    batch_size: Literal["auto"] | int = "auto"
    """Rows at once on each rank; `auto` takes as many as memory holds."""


class ChatOptions(UseOptions):
    """`lorashard chat ADAPTER`."""

    positionals = ("adapter",)
    num_required = 1

    adapter: str
    """An adapter's folder, a run's, or a hub id."""
    base_only: bool = False
    """Talk to the base, with the adapter off."""
    compare: bool = False
    """Answer with the adapter and without it, one after the other."""
    system: str | None = None
    """The system's message."""
    max_new_tokens: int = Field(default=512, ge=1)
    """How many tokens an answer may have."""
    do_sample: bool = True
    """Sample; with false the most probable token is taken each time."""
    temperature: float = Field(default=0.7, gt=0)
    """What sampling divides the logits by."""
    top_p: float = Field(default=0.9, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability."""
    top_k: int = Field(default=50, ge=0)
    """Sample from this many of the most probable tokens; 0 for all."""
    seed: int = 42
    """Of the sampling."""


class EvalOptions(DataOptions, UseOptions):
    """`lorashard eval ADAPTER --dataset D`."""

    positionals = ("adapter",)
    num_required = 1

    adapter: str
    """An adapter's folder, a run's, or a hub id."""
    base_only: bool = False
    """Measure the base, with the adapter off."""
    per_device_eval_batch_size: int = Field(default=8, ge=1)
    """Rows at once on each rank."""
    exact_match: bool | None = None
    """Generate each completion and count those that are right; not given: for prompts with completions."""
    max_new_tokens: int = Field(default=256, ge=1)
    """How many tokens a generated completion may have."""
    as_json: bool = False
    """Print JSON."""


class VerifyOptions(UseOptions):
    """`lorashard verify RUN_OR_ADAPTER [--merged DIR]`, or `lorashard verify --model M`."""

    positionals = ("adapter",)

    adapter: str | None = None
    """An adapter's folder, a run's, or a hub id."""
    merged: str | None = None
    """A merged model, whose logits are to be those of the adapter on its base."""
    model_name_or_path: str | None = None
    """Compare every adapter gradient of this model, sharded, with those of the model as a whole."""
    dataset: str | None = None
    """Rows to compare on; not given: made-up ones."""
    num_rows: int = Field(default=4, ge=1)
    """How many rows."""
    max_length: int = Field(default=64, ge=2)
    """Tokens of a row that are looked at."""
    tolerance: float = Field(default=1e-2, ge=0)
    """The largest difference of logits that is accepted, relative to the largest logit."""
    as_json: bool = False
    """Print JSON."""
