"""How many examples and tokens a run trains on in an epoch: counted, or estimated from some rows in bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import pyarrow.compute as pc
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from ..config.data_options import DataOptions
from ..config.methods import Method
from ..config.run_config import RunConfig
from ..config.sweep import list_data, named_in_errors
from ..errors import DataError
from .encode import IGNORED_LABEL, Encoding, encode_source
from .prepare import Prepared
from .sources import BadRow, Row, Source, open_source
from .tokenizer import load_tokenizer
from .trl_rows import open_rows, tabulate
from .trl_tokens import fill_trainer_options, tokenize_rows, without_bars

_LONGEST_S = 2.0
_NONE = "none of its first rows can be trained on"
# Of the rows that are tokenized.
_MOST_ROWS = 500
_MOST_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Survey:
    """What an epoch consists of.

    Attributes:
        num_examples: that are trained on; None where the rows are too many to be counted in time.
        num_sequences: that the trainer counts: the examples, or what they are packed into.
        num_tokens: of all sequences, without padding; None as for `num_examples`. Of prompts alone, where the method
            generates.
        num_supervised_tokens: None too where the loss is not computed on single tokens of the examples.
        num_counted: examples whose tokens were counted; the others are taken to be like them.
        is_complete: whether these are all.
        lengths: tokens of the longest sequence of each counted example, or of each packed sequence.
        job: the first job of a sweep that trains on this, where others train on other data; empty otherwise.
        num_datasets: that the jobs of a sweep train on.
    """

    num_examples: int | None
    num_sequences: int | None
    num_tokens: int | None
    num_supervised_tokens: int | None
    num_counted: int
    is_complete: bool
    lengths: tuple[int, ...]
    job: str = ""
    num_datasets: int = 1


def survey_run(config: RunConfig, longest_s: float = _LONGEST_S) -> Survey:
    """Return what an epoch of a run consists of; of a sweep's datasets, that of the one that `choose_longest` takes.

    Args:
        longest_s: as for `survey`, of all datasets together.

    Raises:
        DataError, ConfigError: as for `survey` and `list_data`; of a sweep, with the job's name.
    """
    runs = list_data(config)
    tokenizer, options = load_tokenizer(**config.tokenizer_options()), fill_trainer_options(config)
    found = {}
    for job, run in runs.items():
        with named_in_errors(job):
            found[job] = survey(run.data_options(), tokenizer, run.trl_method, options, longest_s / len(runs))
    return choose_longest(found)


def choose_longest(surveys: Mapping[str, Survey]) -> Survey:
    """Return, of a sweep's datasets, the one whose sequences are the longest on average, which take the longest.

    Args:
        surveys: by the name of a job; the only one of a run, or of jobs that share their data, by any name.
    """
    job, found = max(surveys.items(), key=lambda item: sum(item[1].lengths) / len(item[1].lengths))
    return replace(found, job=job, num_datasets=len(surveys)) if len(surveys) > 1 else found


def survey(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    trainer_options: Mapping[str, Any],
    longest_s: float = _LONGEST_S,
) -> Survey:
    """Return what an epoch consists of, from rows that are spread over the dataset, in a few seconds.

    Args:
        trainer_options: from `fill_trainer_options`.
        longest_s: seconds of counting rows, and of reading and tokenizing them after the first, together.

    Raises:
        DataError: the dataset is missing, or none of the rows can be trained on.
        ConfigError: the options do not suit the dataset or the tokenizer.
    """
    source = open_source(options.dataset, options.dataset_split, options.dataset_config, options.dataset_revision)
    sample = _Sample(source, options.max_train_samples, longest_s)
    if method.is_prepared_here:
        _, results = encode_source(sample, options, tokenizer, options.packing)
        encodings = [result for _, result in results if isinstance(result, Encoding)]
        rows = [encoding.input_ids for encoding in encodings]
        supervised = [sum(label != IGNORED_LABEL for label in encoding.labels) for encoding in encodings]
        counts = [(len(ids), len(ids), number) for ids, number in zip(rows, supervised, strict=True)]
        lengths = _pack_lengths(rows, options) if options.packing else [len(ids) for ids in rows]
    else:
        _, checked = open_rows(sample, method, tokenizer.chat_template is not None, None)
        good = [row for _, row in checked if not isinstance(row, BadRow)]
        if not good:
            raise DataError(_NONE, where=f"dataset {source.name!r}")
        table = tabulate(good, source.name)
        counts = list(_count_trl(datasets.Dataset(InMemoryTable(table)), method, tokenizer, trainer_options))
        lengths = [longest for longest, _, _ in counts]
    if not counts:
        raise DataError(_NONE, where=f"dataset {source.name!r}")
    scale = None if sample.num_rows is None else sample.num_rows / sample.num_yielded

    def count_all(number: int) -> int | None:
        return None if scale is None else round(number * scale)

    return Survey(
        num_examples=count_all(len(counts)),
        num_sequences=count_all(len(lengths)),
        num_tokens=count_all(sum(tokens for _, tokens, _ in counts)),
        num_supervised_tokens=count_all(sum(number for *_, number in counts)) if _has_labels(method) else None,
        num_counted=len(counts),
        is_complete=sample.num_yielded == sample.num_rows,
        lengths=tuple(lengths),
    )


def survey_prepared(
    prepared: Prepared, tokenizer: PreTrainedTokenizerBase, method: Method, trainer_options: Mapping[str, Any]
) -> Survey:
    """Return what an epoch of prepared data consists of. What TRL's trainer tokenizes is tokenized, all of it.

    Raises:
        DataError: TRL cannot tokenize the rows, or leaves none.
    """
    report = prepared.report
    if method.is_prepared_here:
        column = prepared.train.data.column("input_ids")
        lengths = tuple(pc.list_value_length(column).to_pylist())
        counted = (report.rows_kept, len(lengths), report.num_tokens, report.num_supervised_tokens, report.rows_kept)
        return Survey(*counted, True, lengths)
    counts = list(_count_trl(prepared.train, method, tokenizer, trainer_options))
    if not counts:
        limit = f"since max_length is {trainer_options.get('max_length')}"
        raise DataError(
            f"TRL's {method.trainer_class} leaves out every row, {limit}", where=f"dataset {report.dataset!r}"
        )
    longest, tokens, supervised = (list(column) for column in zip(*counts, strict=True))
    num_supervised = sum(supervised) if _has_labels(method) else None
    return Survey(len(counts), len(counts), sum(tokens), num_supervised, len(counts), True, tuple(longest))


def _has_labels(method: Method) -> bool:
    return not (method.generates or method.is_classifier)


def _count_trl(
    rows: datasets.Dataset, method: Method, tokenizer: PreTrainedTokenizerBase, trainer_options: Mapping[str, Any]
) -> Iterator[tuple[int, int, int]]:
    """Yield of each example the tokens of its longest sequence, and all and the supervised tokens of its sequences."""
    try:
        for sequences in tokenize_rows(rows, method, tokenizer, trainer_options):
            lengths = [len(sequence.input_ids) for sequence in sequences]
            yield max(lengths), sum(lengths), sum(sum(sequence.is_supervised) for sequence in sequences)
    except Exception as error:  # the chat template's own, of any kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"TRL's {method.trainer_class} cannot tokenize a row: {reason}") from error


def _pack_lengths(rows: Sequence[Sequence[int]], options: DataOptions) -> list[int]:
    from trl.data_utils import pack_dataset

    assert options.max_length is not None
    unpacked = datasets.Dataset.from_dict({"input_ids": rows})
    with without_bars():
        packed = pack_dataset(unpacked, options.max_length, options.packing_strategy)
    return [len(ids) for ids in packed["input_ids"]]


class _Sample:
    """Rows of a source that are spread over it, as a source; read once. Counting them takes half of the time at most.

    Attributes:
        num_yielded: rows that were read from it.
        num_rows: of the source, up to the most; None if they could not be counted in time.
    """

    def __init__(self, source: Source, most: int | None, longest_s: float) -> None:
        self.name = source.name
        self.num_yielded = 0
        begin_s = time.monotonic()
        counted = source.count_rows(None, begin_s + longest_s / 2)
        self.num_rows = counted if counted is None or most is None else min(counted, most)
        self._source, self._most, self._end_s = source, most, begin_s + longest_s

    def read(self) -> Iterator[Row]:
        """Yield every so many rows, until there are enough, and count the rest, until the time is up."""
        stride = max(1, -(-(self.num_rows or 0) // _MOST_ROWS))
        num_characters = num_read = 0
        for row in self._source.read():
            if num_read == self._most or (self.num_yielded and time.monotonic() > self._end_s):
                break
            num_read += 1
            is_enough = self.num_yielded >= _MOST_ROWS or num_characters > _MOST_CHARACTERS
            if not is_enough and (num_read - 1) % stride == 0:
                self.num_yielded += 1
                num_characters += _count_characters(row.value)
                yield row
            elif is_enough and self.num_rows is not None:
                return
        else:
            self.num_rows = num_read  # a file may have lines without a row
            return
        if num_read == self._most:
            self.num_rows = num_read


def _count_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_count_characters, value.values()))
    return sum(map(_count_characters, value)) if isinstance(value, list | tuple) else 0
