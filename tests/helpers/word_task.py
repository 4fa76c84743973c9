"""A tiny model of words, and rows of them, for runs that are real but short."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import Trainer, set_seed

from helpers.tiny import build_base
from helpers.words import make_tokenizer
from lorashard import api
from lorashard.config.run_config import RunConfig
from lorashard.data.prepare import prepare
from lorashard.data.tokenizer import load_tokenizer
from lorashard.runs.events import describe_event
from lorashard.runtime.signals import StopRequest
from lorashard.training.arguments import build_arguments
from lorashard.training.nonfinite import NonfiniteRule
from lorashard.training.one_run import build_trainer
from lorashard.training.trainer import RunHooks

WORDS = [f"w{number}" for number in range(60)]
POISON = "poison"
OPTIONS = {
    "dtype": "float32",
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    "lora_dropout": 0.0,
    "save_strategy": "no",
    "placement": "shard",
    "disable_tqdm": "true",
    "activation_checkpointing": "false",
}


def write_model(folder: Path, **sizes: int) -> None:
    """Write a model whose embedding of the word POISON is infinite, and its tokenizer."""
    words = ["<pad>", "<s>", "</s>", *WORDS, POISON]
    make_tokenizer(words).save_pretrained(folder)
    base = build_base(vocab_size=len(words), eos_token_id=2, **{"num_hidden_layers": 2} | sizes)
    with torch.no_grad():
        base.get_input_embeddings().weight[words.index(POISON)] = torch.inf
    base.save_pretrained(folder)


def make_texts(num_rows: int, poisoned: Iterable[int] = ()) -> list[str]:
    """Return texts of four to eight words, each another one; those of the numbers `poisoned` hold POISON."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(4, 8))) for _ in range(num_rows)]
    assert len(set(texts)) == num_rows
    for number in poisoned:
        texts[number] += f" {POISON}"
    return texts


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write rows as JSON lines; a string is the text of one."""
    path.write_text("".join(json.dumps({"text": row} if isinstance(row, str) else row) + "\n" for row in rows))


def make_words(**options: Any) -> list[str]:
    """Return options as the command line takes them."""
    return [word for key, value in (OPTIONS | options).items() for word in (f"--{key}", str(value))]


def build(folder: Path, told: list[str] | None = None, noted: list[dict] | None = None, **options: Any) -> Trainer:
    """Return the trainer that `finetune` makes in this rank, for `folder/model`.

    Args:
        told: Gets the lines for the person.
        noted: Gets the fields of the rank's events about values that are not finite.
    """
    config = RunConfig.resolve(None, make_words(**{"model": folder / "model", "output_dir": folder / "out"} | options))
    tokenizer = load_tokenizer(config.model_name_or_path)
    prepared = prepare(config.data_options(), tokenizer, folder / "cache", config.trl_method)
    arguments = build_arguments(config, use_cpu=True)
    log = ([] if told is None else told).append
    hooks = RunHooks(
        stop=StopRequest(),
        facts={},
        nonfinite=NonfiniteRule(
            skips=config.on_nonfinite == "skip",
            name_rows=lambda rows, num_rows: prepared.name_rows(rows, num_rows, tokenizer),
            log=log,
            emit=lambda kind, **fields: None if noted is None else noted.append(fields),
        ),
        rows_per_step=config.global_batch_size,
        saved_world_size=None,
        log=log,
        emit=lambda kind, **fields: log(describe_event(kind, fields)),
        enter=lambda phase, step: None,
    )
    set_seed(arguments.seed)
    model = api.load(
        config.model_name_or_path,
        LoraConfig(**config.lora_options()),
        dtype=torch.float32,
        placement=config,
    )
    return build_trainer(config, model, tokenizer, arguments, prepared, [], hooks)
