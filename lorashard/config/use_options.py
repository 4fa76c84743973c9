"""The options of the commands beside those of a run: merge, verify, chat, generate, eval, doctor. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from .base_options import BaseOptions, RankOptions
from .data_options import DataOptions, ExampleOptions
from .options import read_command_line, to_config_error
from .placement import PlacementOptions
from .run_config import collect_options, read_own_options


class CommandWords(BaseModel):
    """The words of a command: first positional ones, then options."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    positionals: ClassVar[tuple[str, ...]] = ()
    num_required: ClassVar[int] = 0
    short_names: ClassVar[dict[str, str]] = {"as_json": "json"}

    @classmethod
    def find_own_names(cls) -> list[str]:
        """Return the names of the options, without the positional words; those that commands share come last."""
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
            usage = " ".join(cls.positionals).upper()
            raise ConfigError(
                "has to be given", option=cls.positionals[len(plain)], fix=f"give {usage} first, then the options"
            )
        own = read_own_options(cls)
        known = own | {short: own[name] for name, short in cls.short_names.items() if name in own}
        given = collect_options(read_command_line(words[len(plain) :]), known)
        given |= {name: given.pop(short) for name, short in cls.short_names.items() if short in given}
        try:
            return cls(**given | dict(zip(cls.positionals, plain, strict=False)))
        except ValidationError as error:
            raise to_config_error(error) from error


class CommandOptions(CommandWords, RankOptions):
    """The options of a command that runs on ranks."""


class BaseCommandOptions(BaseOptions, CommandOptions):
    """The options of a command whose ranks compute with a base."""


class UseOptions(PlacementOptions, BaseCommandOptions):
    """A base in any placement, and the adapter on it."""

    base: str | None = None
    """The base's folder or hub id, if it is not where the adapter's configuration says."""
    quantization: Literal["none", "nf4", "int8", "fp8"] | None = None
    """How the base is quantized. Default: as when the adapter was trained."""

    @model_validator(mode="after")
    def _check_sequences(self) -> Self:
        if self.sequence_parallel_size not in ("auto", 1):
            raise ConfigError("ranks share a sequence in training alone", option="sequence_parallel_size")
        return self


class AdapterUseOptions(UseOptions):
    """A command whose first word is an adapter to use."""

    positionals = ("adapter",)
    num_required = 1

    adapter: str
    """An adapter's folder, a run's folder, or a hub id."""
    base_only: bool = False
    """Use the base alone, with the adapter disabled."""


class MergeOptions(BaseCommandOptions):
    """`lorashard merge ADAPTER OUT`."""

    positionals = ("adapter", "out")
    num_required = 2

    adapter: str
    """An adapter's folder, a run's folder, or a hub id."""
    out: str
    """The folder of the merged model, which must not exist yet."""
    base: str | None = None
    """The base's folder or hub id, if it is not where the adapter's configuration says."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The dtype of the computation and of the merged model. `auto`, unlike in training: the base's stored dtype."""
    quantization: Literal["none", "nf4", "int8", "fp8"] | None = None
    """Quantize the base, and dequantize it again, before merging. Default: as when the adapter was trained; `none`
    merges into the original weights."""
    requantize: Literal["nf4", "int8"] | None = None
    """Quantize the merged model, and write it as bitsandbytes does, for transformers to load. With nf4, scales are
    quantized too if they were in training."""
    max_shard_size: str = Field(default="5GB", pattern=r"^\d+ ?([KMGT]i?B)?$")
    """The largest file of weights, in bytes or as 5GB or 500MB."""
    push_to_hub: str | None = None
    """Upload the merged model to this repo of the Hugging Face hub, which is created if it does not exist."""
    hub_private_repo: bool | None = None
    """Whether a created repo is private. Default: as your account or organization has it."""


class GenerateOptions(AdapterUseOptions):
    """`lorashard generate ADAPTER --prompts P --out O`."""

    prompts: str
    """A JSON lines file with a `prompt` (text, or messages) or `messages` in each line."""
    out: str
    """The file to write: each line of the prompts with its `completion`."""
    compare: bool = False
    """Answer with the adapter and without it."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Max tokens of an answer."""
    do_sample: bool = False
    """Sample; otherwise the most probable token is taken each time."""
    temperature: float = Field(default=1.0, gt=0)
    """The temperature of sampling."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability."""
    top_k: int = Field(default=50, ge=0)
    """Sample from this many of the most probable tokens; 0 for all."""
    seed: int = 42
    """The seed of sampling."""
    as_chat: bool = False
    """Take a `prompt` that is a text as a user's message, and write it with the chat template."""
    batch_size: Literal["auto"] | int = "auto"
    """Batch size per device; `auto` takes as many prompts as memory holds."""

    @model_validator(mode="after")
    def _check(self) -> GenerateOptions:
        _refuse_base_twice(self)
        if self.batch_size != "auto" and self.batch_size < 1:
            raise ConfigError(option="batch_size", expected="auto, or 1 or more", found=self.batch_size)
        return self


Source = Literal["base", "adapter"]


class AnswerOptions(BaseModel):
    """How a chat answers."""

    system: str | None = None
    """The system message."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Max tokens of an answer."""
    do_sample: bool = True
    """Sample; with false the most probable token is taken each time."""
    temperature: float = Field(default=0.7, gt=0)
    """The temperature of sampling."""
    top_p: float = Field(default=0.9, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability."""
    top_k: int = Field(default=50, ge=0)
    """Sample from this many of the most probable tokens; 0 for all."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """The seed of sampling."""


class ChatOptions(AnswerOptions, AdapterUseOptions):
    """`lorashard chat ADAPTER`."""

    compare: bool = False
    """Answer with the adapter and without it, one after the other."""
    as_json: bool = False
    """Serve a program: JSON lines on stdin and stdout."""

    @model_validator(mode="after")
    def _check(self) -> ChatOptions:
        _refuse_base_twice(self)
        return self


class ChatRequest(AnswerOptions):
    """A line that a program writes to `lorashard chat --json`; what it leaves out is as on the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    content: str | None = None
    """The user's next message, in the conversation that is kept for each source."""
    sources: list[Source] | None = Field(default=None, min_length=1)
    """Which of adapter and base answer `content`."""
    conversations: dict[Source, str | list[dict[str, Any]]] | None = Field(default=None, min_length=1)
    """By source: messages to answer, or a text to continue. They are not kept."""
    reset: bool = False
    """Forget the conversations that are kept."""
    cancel: bool = False
    """End the answer that is being generated."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        num_asked = sum((self.content is not None, self.conversations is not None, self.reset, self.cancel))
        if num_asked != 1:
            raise ConfigError(
                expected="one of content, conversations, reset and cancel", found="several" if num_asked else "none"
            )
        if self.sources is not None and len(set(self.sources)) < len(self.sources):
            raise ConfigError(option="sources", expected="each once", found=self.sources)
        if self.conversations is not None and (self.sources is not None or self.system is not None):
            raise ConfigError(
                "they name their sources and hold their system messages",
                option="conversations",
                fix="leave sources and system out",
            )
        return self


def _refuse_base_twice(options: GenerateOptions | ChatOptions) -> None:
    if options.base_only and options.compare:
        raise ConfigError(
            "compare answers without the adapter already", option="base_only", fix="leave it or compare out"
        )


class EvalOptions(ExampleOptions, AdapterUseOptions):
    """`lorashard eval ADAPTER --dataset D`.

    `dataset_split` is not `train`, as in training: examples that the adapter was trained on would flatter it.
    """

    dataset: str = Field(min_length=1)
    """A .jsonl, .json, .csv or .parquet file, a folder of such files, or the id of a Hugging Face hub dataset."""
    dataset_split: str = "test"
    """The split of a folder or a hub dataset to evaluate on; a single file has none."""
    max_eval_samples: int | None = Field(default=None, gt=0)
    """Use only the first examples."""
    per_device_eval_batch_size: int = Field(default=8, ge=1)
    """Batch size per device; no result depends on it."""
    exact_match: bool | None = None
    """Generate each completion and count exact matches. Default: yes for prompts with completions and conversations."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Max tokens of a generated completion. Default: some more than the longest expected one."""
    as_json: bool = False
    """Print JSON."""

    def data_options(self) -> DataOptions:
        """Return the options by which examples become tokens and labels, as in training."""
        names = self.model_fields_set & DataOptions.model_fields.keys() - {"max_eval_samples"}
        given = {name: getattr(self, name) for name in names} | {"dataset_split": self.dataset_split}
        return DataOptions(max_train_samples=self.max_eval_samples, **given)


class VerifyOptions(UseOptions):
    """`lorashard verify RUN_OR_ADAPTER [--merged DIR]`, or `lorashard verify --model M`."""

    positionals = ("adapter",)

    adapter: str | None = None
    """An adapter's folder, a run's folder, or a hub id."""
    merged: str | None = None
    """A merged model, whose logits must equal those of the adapter on its base."""
    model_name_or_path: str | None = None
    """Compare every adapter gradient of this model, sharded, with those of the unsharded model; with `quantization`,
    of the unsharded model with dequantized weights."""
    dataset: str | None = None
    """Dataset to compare logits on. Default: the run's, if it is still there, else random tokens."""
    num_rows: int = Field(default=4, ge=1)
    """Number of examples."""
    max_length: int = Field(default=64, ge=2)
    """Max sequence length, in tokens."""
    tolerance: float | None = Field(default=None, ge=0)
    """Largest accepted difference of logits, relative to their size. Default: 8 steps of the coarsest dtype involved:
    0.0625 for bfloat16, 0.0078 for float16; 0.0001 for float32."""
    as_json: bool = False
    """Print JSON."""

    @model_validator(mode="after")
    def _check_subject(self) -> Self:
        if (self.adapter is None) == (self.model_name_or_path is None):
            raise ConfigError(
                expected="an adapter (lorashard verify RUN_OR_ADAPTER) or a model (lorashard verify --model M)",
                found="neither" if self.adapter is None else "both",
            )
        for name in ("base", "merged", "dataset", "tolerance"):
            if self.model_name_or_path is not None and getattr(self, name) is not None:
                raise ConfigError(
                    "has no meaning with a model, whose gradients are compared", option=name, fix="leave it out"
                )
        return self


class DoctorOptions(CommandOptions):
    """`lorashard doctor`."""

    output_dir: str = "."
    """The folder that a run will write to; it need not exist yet."""
    model_name_or_path: str | None = None
    """A model's folder or hub id, to check that it can be read from here."""
    model_revision: str | None = None
    """The commit, branch or tag of the model on the hub."""
    timeout_s: int = Field(default=60, ge=1)
    """Seconds that a check may take, and that ranks may wait for one another."""
    as_json: bool = False
    """Print JSON."""
