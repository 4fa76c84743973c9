"""Rows of methods beside sft as TRL's trainers tokenize them: by the trainers' own functions and collators.

A trainer cannot be made without its model, so its methods are called with an object that has the attributes that they
read. `tests/unit/data/test_data_trl_tokens.py` compares the result with the datasets and batches of whole trainers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import trl
from transformers import PreTrainedTokenizerBase

from ..config.methods import Method
from ..config.run_config import RunConfig

if TYPE_CHECKING:  # half a second, which a plan does not need
    import datasets

_BATCH_ROWS = 256
# What the loss is computed on, by method.
SUPERVISED = {
    "dpo": "chosen and rejected completions",
    "kto": "completions",
    "reward": "the score of the last token",
    "grpo": "the completions that the model generates",
}


@dataclass(frozen=True, slots=True)
class TrlSequence:
    """A sequence that passes the model: what it is of its example, and which of its tokens the loss is computed on."""

    name: str
    input_ids: list[int]
    is_supervised: list[bool]
    num_tokens_before_cut: int


def fill_trainer_options(config: RunConfig) -> dict[str, Any]:
    """Return all options of TRL's trainer: those of a run, and TRL's defaults."""
    defaults = {field.name: field.default for field in fields(getattr(trl, config.trl_method.config_class))}
    return defaults | config.trainer_options


def tokenize_rows(
    rows: datasets.Dataset, method: Method, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> Iterator[list[TrlSequence]]:
    """Yield the sequences of each example that TRL's trainer makes of rows: it splits pairs, and drops what is long.

    Args:
        rows: as `prepare` writes them for the method.
        options: of TRL's trainer, from `fill_trainer_options`.

    Raises:
        Exception: what the chat template, or TRL, raises.
    """
    trainer_class = getattr(trl, method.trainer_class)
    if method.generates:
        trainer = SimpleNamespace(
            processing_class=tokenizer,
            environment_factories=None,
            tools=[],
            chat_template=None,
            chat_template_kwargs=options["chat_template_kwargs"] or {},
            _is_vlm=False,
        )
        for batch in rows.iter(_BATCH_ROWS):
            prompts, *_ = trainer_class._tokenize_prompts(trainer, batch["prompt"])
            for ids in prompts:
                yield [TrlSequence("prompt", ids, [False] * len(ids), len(ids))]
        return
    # The mismatched pairs, from which KTO estimates its KL term, depend on the order of the whole dataset.
    trainer = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    with without_bars():
        made = trainer_class._prepare_dataset(trainer, rows, tokenizer, SimpleNamespace(**options), "shown")
    read = {"dpo": _read_pair, "kto": _read_unpaired, "reward": _read_scored}[method.name]
    for example in made:
        yield read(example, options)


def _read_pair(example: Mapping[str, Any], options: Mapping[str, Any]) -> list[TrlSequence]:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    collate = DataCollatorForPreference(0, options["max_length"], options["truncation_mode"])
    names = ("chosen", "rejected")
    lengths = [len(example["prompt_ids"]) + len(example[f"{name}_ids"]) for name in names]
    return _read_batch(collate([dict(example)]), names, lengths)


def _read_unpaired(example: Mapping[str, Any], options: Mapping[str, Any]) -> list[TrlSequence]:
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    collate = DataCollatorForUnpairedPreference(0, options["max_length"])
    name = "desirable" if example["label"] else "undesirable"
    return _read_batch(collate([dict(example)]), [name], [len(example["prompt_ids"]) + len(example["completion_ids"])])


def _read_scored(example: Mapping[str, Any], options: Mapping[str, Any]) -> list[TrlSequence]:
    return [
        TrlSequence(name, ids, [False] * len(ids), len(ids))
        for name, ids in (("chosen", example["chosen_ids"]), ("rejected", example["rejected_ids"]))
    ]


def _read_batch(batch: Mapping[str, Any], names: Any, lengths: list[int]) -> list[TrlSequence]:
    """Return the sequences of a collator's batch without their padding."""
    columns = (batch[name].tolist() for name in ("input_ids", "completion_mask", "attention_mask"))
    sequences = []
    for name, length, ids, mask, kept in zip(names, lengths, *columns, strict=True):
        num_tokens = sum(kept)  # padding is at the right
        sequences.append(TrlSequence(name, ids[:num_tokens], [bool(is_loss) for is_loss in mask[:num_tokens]], length))
    return sequences


@contextmanager
def without_bars() -> Iterator[None]:
    """Have the datasets library draw no bars in this block."""
    import datasets

    was_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            datasets.enable_progress_bars()
