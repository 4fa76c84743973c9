"""The rows of tokens that models are compared on, their logits, and how far logits are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ...config.data_options import DataOptions
from ...config.use_options import VerifyOptions
from ...data.encode import Encoding, encode_source
from ...data.sources import open_source
from ...errors import ConfigError, DataError, UserError
from ...inference.load import load_saved_tokenizer
from ...runtime import dist
from ...runtime.agreement import raise_on_all_ranks
from ...runtime.dtypes import settle_name
from ...runtime.output import say

_SEED = 0
# A run's options that decide how a row becomes text and tokens. Its others choose rows, and their labels.
_READING_OPTIONS = ("dataset", "dataset_config", "dataset_split", "dataset_revision", "dataset_text_field")


def settle_dtype(options: VerifyOptions, device: torch.device) -> VerifyOptions:
    """Return the options with the dtype that both sides of a comparison compute in, and print it.

    Ranks: collective over all ranks.
    """
    name, sentence = settle_name(options.dtype, device)
    # Loading an adapter prints by itself what an explicit dtype costs.
    if sentence is not None and (options.dtype == "auto" or options.adapter is None):
        say(dist.get_rank(), sentence)
    return options.model_copy(update={"dtype": name})


def make_rows(num_rows: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Return random rows, the same ones each time."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, vocab_size, (num_rows, num_tokens), generator=generator).tolist()


def take_rows(options: VerifyOptions, adapter: Path, vocab_size: int) -> tuple[list[list[int]], str]:
    """Return the same rows on all ranks, and their origin: `--dataset`, the run's own dataset, or random tokens.

    Args:
        adapter: the folder of the adapter; a run's config.yaml is in it or in its parent.

    Raises:
        UserError: the dataset that was asked for cannot be read.

    Ranks: collective over all ranks; rank 0 reads.
    """
    rows = raise_on_all_ranks(lambda: _choose_rows(options, adapter, vocab_size), on_rank=0)
    rows = dist.broadcast_object(rows)
    assert rows is not None
    return rows


def _choose_rows(options: VerifyOptions, adapter: Path, vocab_size: int) -> tuple[list[list[int]], str]:
    if options.dataset is not None:
        return _read_rows({"dataset": options.dataset}, options), f"of {options.dataset}"
    reason = ""
    if of_run := _read_run_options(adapter):
        try:
            return _read_rows(of_run, options), f"of the run's dataset {of_run['dataset']}"
        except UserError as error:
            reason = f" (the run's dataset cannot be read: {error})"
    return make_rows(options.num_rows, options.max_length, vocab_size), f"random tokens{reason}"


def _read_run_options(adapter: Path) -> dict[str, Any]:
    files = [folder / "config.yaml" for folder in (adapter, adapter.parent)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(where=file, expected="valid YAML", found=reason, fix="give --dataset") from error
    known = values if isinstance(values, dict) else {}
    return {name: known[name] for name in _READING_OPTIONS if known.get(name)} if known.get("dataset") else {}


def _read_rows(data: dict[str, Any], options: VerifyOptions) -> list[list[int]]:
    tokenizer = load_saved_tokenizer(str(options.adapter), options)
    given = DataOptions(**data, max_length=None)  # rows are cut below, whatever is supervised
    source = open_source(given.dataset, given.dataset_split, given.dataset_config, given.dataset_revision)
    _, results = encode_source(source, given, tokenizer, packing=False)
    readable = (result.input_ids[: options.max_length] for _, result in results if isinstance(result, Encoding))
    rows = list(islice(readable, options.num_rows))
    if not rows:
        raise DataError("no row can be read", option="dataset", where=source.name, fix="give another --dataset")
    return rows


def compute_logits(model: nn.Module, rows: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Return the logits of each row, [tokens, vocabulary], on the host, from one forward of all rows.

    Padding comes after a row's tokens, which do not attend to it, so no mask is needed.

    Ranks: collective over the shard group where the base is sharded.
    """
    input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)  # [rows, tokens]
    for padded, row in zip(input_ids, rows, strict=True):
        padded[: len(row)] = torch.tensor(row)
    with torch.no_grad():
        logits = model(input_ids=input_ids.to(device), use_cache=False).logits
    return [of_row[: len(row)].cpu() for of_row, row in zip(logits, rows, strict=True)]


@dataclass(frozen=True)
class Distance:
    """How far logits are from expected ones.

    Attributes:
        relative: the root mean square of the difference, divided by that of the expected logits. Each token's logits
            are taken without their mean, which changes no probability.
        num_same: tokens whose most probable successor is the same.
        is_equal: whether all logits are equal bit for bit.
    """

    relative: float
    num_tokens: int
    num_same: int
    is_equal: bool

    @classmethod
    def between(cls, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Distance:
        """Compare the logits of the same rows."""
        squares = norm = 0.0
        num_tokens = num_same = 0
        for of_row, other in zip(found, expected, strict=True):
            a, b = _center(of_row), _center(other)
            squares += float((a - b).square().sum())
            norm += float(b.square().sum())
            num_tokens += len(a)
            num_same += int((of_row.argmax(-1) == other.argmax(-1)).sum())
        is_equal = all(torch.equal(of_row, other) for of_row, other in zip(found, expected, strict=True))
        relative = 0.0 if is_equal else (squares / norm) ** 0.5 if norm else float("inf")
        return cls(relative, num_tokens, num_same, is_equal)

    def describe(self) -> str:
        """Return it in words."""
        return f"{self.relative:.2g} relative, the same most probable token for {self.num_same} of {self.num_tokens}"


def _center(logits: torch.Tensor) -> torch.Tensor:
    wide = logits.double()
    return wide - wide.mean(dim=-1, keepdim=True)
