"""The options of the commands beside those of a run: merge, verify, chat, generate, eval, doctor. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from .base_options import BaseOptions, RankOptions
from .data_options import DataOptions
from .options import read_command_line
from .placement import PlacementOptions, explain_invalid
from .run_config import collect_options, read_own_options


class CommandWords(BaseModel):
    """What a command takes: first its positional words, then options."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

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


class CommandOptions(CommandWords, RankOptions):
    """What a command takes that computes on ranks."""


class UseOptions(PlacementOptions, BaseOptions, CommandOptions):
    """An adapter on its base, which rests anywhere."""

    base: str | None = None
    """The base's folder or hub id, if it is not where the adapter says."""
    quantization: Literal["none", "nf4", "int8", "fp8"] | None = None
    """What the base is quantized to. Not given: what it was when the adapter was trained."""

    def placement_options(self) -> dict[str, Any]:
        """Return the arguments of `load` that say where the base rests."""
        return {name: getattr(self, name) for name in PlacementOptions.model_fields if name in self.model_fields_set}


class MergeOptions(BaseOptions, CommandOptions):
    """`lorashard merge ADAPTER OUT`."""

    positionals = ("adapter", "out")
    num_required = 2

    adapter: str
    """An adapter's folder, a run's, or a hub id."""
    out: str
    """The folder of the merged model, which does not exist yet."""
    base: str | None = None
    """The base's folder or hub id, if it is not where the adapter says."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """What is computed in and written. `auto`, unlike in training: the dtype that the base is stored in."""
    quantization: Literal["none", "nf4", "int8", "fp8"] | None = None
    """What the base is quantized to before it is dequantized and merged. Not given: what it was when the adapter was
    trained; `none` merges into the original weights."""
    requantize: Literal["nf4", "int8"] | None = None
    """Quantize what is merged, and write it as bitsandbytes does, for transformers to load. With nf4, scales are
    quantized too if they were in training."""
    max_shard_size: str = Field(default="5GB", pattern=r"^\d+ ?([KMGT]i?B)?$")
    """The largest file of weights: bytes, or such as 5GB or 500MB."""
    push_to_hub: str | None = None
    """Upload the merged model to this repo of the Hugging Face hub; it is made if it is not there."""
    hub_private_repo: bool | None = None
    """Whether a repo that is made is private; not given: as your account or organization has it."""


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
    as_chat: bool = False
    """Take a `prompt` that is a text as what a user says, and write it with the chat template."""
    batch_size: Literal["auto"] | int = "auto"
    """Rows at once on each rank; `auto` takes as many as memory holds."""

    @model_validator(mode="after")
    def _check(self) -> GenerateOptions:
        _refuse_base_twice(self)
        if self.batch_size != "auto" and self.batch_size < 1:
            raise ConfigError(f"batch_size: expected auto, or 1 or more; found {self.batch_size}")
        return self


Source = Literal["base", "adapter"]


class AnswerOptions(BaseModel):
    """How a chat answers."""

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
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Of the sampling."""


class ChatOptions(AnswerOptions, UseOptions):
    """`lorashard chat ADAPTER`."""

    positionals = ("adapter",)
    num_required = 1

    adapter: str
    """An adapter's folder, a run's, or a hub id."""
    base_only: bool = False
    """Talk to the base, with the adapter off."""
    compare: bool = False
    """Answer with the adapter and without it, one after the other."""
    as_json: bool = False
    """Talk with a program: JSON lines on stdin and stdout."""

    @model_validator(mode="after")
    def _check(self) -> ChatOptions:
        _refuse_base_twice(self)
        return self


class ChatRequest(AnswerOptions):
    """A line that a program writes to `lorashard chat --json`; what it leaves out is as on the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    content: str | None = None
    """What the user says next, in the conversation that is kept for each source."""
    sources: list[Source] | None = Field(default=None, min_length=1)
    """Who answers `content`."""
    conversations: dict[Source, str | list[dict[str, Any]]] | None = Field(default=None, min_length=1)
    """Messages to answer, or a text to go on with, by who answers: as they stand, and without being kept."""
    reset: bool = False
    """Forget the conversations that are kept."""
    cancel: bool = False
    """End the answer that is being made."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        num_asked = sum((self.content is not None, self.conversations is not None, self.reset, self.cancel))
        if num_asked != 1:
            raise ConfigError(
                "expected one of content, conversations, reset and cancel, found "
                + ("none" if num_asked == 0 else "several")
            )
        if self.sources is not None and len(set(self.sources)) < len(self.sources):
            raise ConfigError("sources: expected each once")
        if self.conversations is not None and (self.sources is not None or self.system is not None):
            raise ConfigError("conversations name their sources and hold their system messages: leave these out")
        return self


def _refuse_base_twice(options: GenerateOptions | ChatOptions) -> None:
    if options.base_only and options.compare:
        raise ConfigError("base_only and compare are both given: compare answers with and without the adapter already")


class EvalOptions(UseOptions):
    """`lorashard eval ADAPTER --dataset D`."""

    positionals = ("adapter",)
    num_required = 1

    adapter: str
    """An adapter's folder, a run's, or a hub id."""
    dataset: str = Field(min_length=1)
    """A .jsonl, .json, .csv or .parquet file, a folder of such files, or the id of a Hugging Face hub dataset."""
    dataset_config: str | None = None
    """The configuration (subset) of a hub dataset."""
    dataset_split: str = "test"
    """The split to measure on, for a folder or a hub dataset; a single file is taken whole. Not `train`, as in
    training: rows that the adapter has learned would flatter it."""
    dataset_revision: str | None = None
    """The commit, branch or tag of a hub dataset."""
    dataset_text_field: str = "text"
    """The column of a plain text dataset."""
    max_eval_samples: int | None = Field(default=None, gt=0)
    """Read only the first rows."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be measured: stop and name it, or leave it out and report it."""
    max_length: int | None = Field(default=1024, gt=1)
    """Longest sequence in tokens whose loss is measured, as in training; longer rows are cut. Exact matches are of
    whole rows."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of a row that is too long stays."""
    completion_only_loss: bool | None = None
    """Measure the completion and not the prompt. Not given: yes, for every format that has a prompt."""
    assistant_only_loss: bool | None = None
    """Measure what the assistant says and nothing else. Not given: yes for conversations, no for prompts with
    completions, where `completion_only_loss` decides."""
    base_only: bool = False
    """Measure the base, with the adapter off."""
    per_device_eval_batch_size: int = Field(default=8, ge=1)
    """Rows at once on each rank; no result depends on it."""
    exact_match: bool | None = None
    """Generate each completion and count those that are right; not given: where rows have a prompt and a completion,
    or are conversations."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """How many tokens a generated completion may have; not given: some more than the longest that is expected."""
    as_json: bool = False
    """Print JSON."""

    def data_options(self) -> DataOptions:
        """Return which rows, and how they become tokens and labels: as in training."""
        names = self.model_fields_set & DataOptions.model_fields.keys() - {"max_eval_samples"}
        given = {name: getattr(self, name) for name in names} | {"dataset_split": self.dataset_split}
        return DataOptions(max_train_samples=self.max_eval_samples, **given)


class VerifyOptions(UseOptions):
    """`lorashard verify RUN_OR_ADAPTER [--merged DIR]`, or `lorashard verify --model M`."""

    positionals = ("adapter",)

    adapter: str | None = None
    """An adapter's folder, a run's, or a hub id."""
    merged: str | None = None
    """A merged model, whose logits are to be those of the adapter on its base."""
    model_name_or_path: str | None = None
    """Compare every adapter gradient of this model, sharded, with those of the model as a whole; with `quantization`,
    of the model as a whole with dequantized weights."""
    dataset: str | None = None
    """Rows to compare logits on; not given: those of the run, if they are still there, else made-up ones."""
    num_rows: int = Field(default=4, ge=1)
    """How many rows."""
    max_length: int = Field(default=64, ge=2)
    """Tokens of a row that are looked at."""
    tolerance: float | None = Field(default=None, ge=0)
    """The largest difference of logits that is accepted, relative to their size. Not given: 8 steps of the coarsest
    dtype that takes part: 0.0625 for bfloat16, 0.0078 for float16; 0.0001 for float32."""
    as_json: bool = False
    """Print JSON."""

    @model_validator(mode="after")
    def _check_subject(self) -> Self:
        if (self.adapter is None) == (self.model_name_or_path is None):
            raise ConfigError(
                "expected an adapter (lorashard verify RUN_OR_ADAPTER) or a model (lorashard verify --model M), found "
                + ("neither" if self.adapter is None else "both")
            )
        for name in ("base", "merged", "dataset", "tolerance"):
            if self.model_name_or_path is not None and getattr(self, name) is not None:
                raise ConfigError(f"{name} has no meaning with a model, whose gradients are compared; leave it out")
        return self


class DoctorOptions(CommandOptions):
    """`lorashard doctor`."""

    output_dir: str = "."
    """The folder where the run will write; it need not be there yet."""
    model_name_or_path: str | None = None
    """A model's folder or hub id: can it be read from here?"""
    model_revision: str | None = None
    """The commit, branch or tag of the model on the hub."""
    timeout_s: int = Field(default=60, ge=1)
    """How many seconds a check may take, and ranks may wait for one another."""
    as_json: bool = False
    """Print JSON."""
