"""Prepare a dataset once per machine, however many processes ask for it, and keep the result.

Processes wait for one another at a file lock: no process group is needed, so ranks can prepare before there is one, and
no collective's timeout counts the seconds. The result is in a folder named by a hash of all that it depends on. It is
written beside and renamed when complete, so that a folder of that name is complete even if its writer was killed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from ..config.data_options import DataOptions
from ..config.methods import METHODS, Method
from ..errors import DataError
from ..runtime.atomic_folder import fill_atomically
from ..runtime.launch_env import read_launcher_env
from ..runtime.progress import Progress, told_progress
from .encode import Encoding, encode_source
from .places import find_positions, read_places, write_place
from .report import DataReport, SkippedRows
from .sources import BadRow, Source, open_source
from .trl_rows import find_schema, make_table, open_rows

logger = logging.getLogger(__name__)

# Count up when the same options, rows and tokenizer give other tokens, labels or files than before.
_RECIPE_VERSION = 3
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "datasets", "trl")
_WRITE_ROWS = 1000
_PLACES_SUFFIX = "places"
_SHOWN_TOKENS = 12
_PROGRESS_SUFFIX = ".progress"
_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Prepared:
    """Datasets ready for SFTTrainer with `dataset_kwargs={"skip_prepare_dataset": True}`, or checked for another one.

    Those for SFTTrainer have the columns `input_ids` and `labels`, and `seq_lengths` where rows are packed (not with
    `wrapped`). They are read from disk as they are used, so processes share one copy through the page cache.
    """

    train: datasets.Dataset
    eval: datasets.Dataset | None
    report: DataReport
    eval_report: DataReport | None
    path: Path
    """The folder that holds them; its name is the hash of all that they depend on, equal on all ranks."""
    shuffle_seed: int | None
    """None if the rows were not shuffled."""

    def name_rows(self, indices: Sequence[int], num_rows: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return where a person finds rows of `train`, given by the trainer's indices.

        That is their place in the dataset, or the first words of a packed sequence. Rows that the trainer has made out
        of others have only their index.

        Args:
            num_rows: The number of rows that the trainer has.
        """
        if self.report.num_packed is not None:
            starts = [tokenizer.decode(self.train[index]["input_ids"][:_SHOWN_TOKENS]) for index in indices]
            return [f"packed sequence {n} ({start!r}...)" for n, start in zip(indices, starts, strict=True)]
        if num_rows != len(self.train):
            return [f"row {index} of those that TRL's trainer made from the dataset" for index in indices]
        positions = find_positions(indices, num_rows, self.shuffle_seed)
        return read_places(self.path / f"train.{_PLACES_SUFFIX}", positions)


def prepare(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path | None = None,
    method: Method = METHODS["sft"],
    progress: Progress | None = None,
) -> Prepared:
    """Tokenize, label, truncate, pack and shuffle a dataset, or find it in the cache.

    Any number of processes may call this at once: one does the work, the others wait for it. Rows that the method's
    trainer tokenizes itself are checked, and written where the datasets library caches what the trainer makes of them.

    Args:
        options: The dataset, and how its rows become tokens and labels.
        tokenizer: As `load_tokenizer` returns it.
        cache_dir: The folder of the cache; by default `lorashard` in the datasets library's cache.
        method: The training method.
        progress: Called with the number of rows that are done, their total if that is known, and "rows", whichever
            process does them. By default rank 0 prints it on stderr.

    Raises:
        DataError: A dataset is missing, its columns are not recognized, or rows cannot be trained on.
        ConfigError: The options do not suit the dataset or the tokenizer.
    """
    sources = _open_sources(options)
    cache_dir = cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "lorashard"
    identities = {name: source.identify() for name, source in sources.items()}
    folder = cache_dir / _hash_inputs(options, identities, tokenizer, method)
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        env = read_launcher_env()
        with told_progress("tokenizing", env is None or env.rank == 0, progress) as tell:
            counter = _Counter(folder.with_suffix(_PROGRESS_SUFFIX), tell)
            with counter.wait_for(FileLock(folder.with_suffix(".lock"))):  # the system frees it should this process die
                if not folder.is_dir():
                    _build(folder, sources, identities, options, tokenizer, method, counter)
    return _load(folder, options)


class _Counter:
    """Counts the rows that are done, also in a file for the processes that wait for this one."""

    def __init__(self, file: Path, progress: Progress) -> None:
        self._file = file
        self._progress = progress
        self._done = 0
        self._total: int | None = None
        self._told_s = time.monotonic()

    @contextmanager
    def wait_for(self, lock: FileLock) -> Iterator[None]:
        """Hold a lock; while waiting for it, report the progress of the process that holds it."""
        while not lock.is_locked:
            try:
                lock.acquire(timeout=_INTERVAL_S)
            except Timeout:
                with suppress(OSError, ValueError):  # it has just begun, or has finished
                    done, total = json.loads(self._file.read_text())
                    self._progress(done, total, "rows")
        try:
            yield
        finally:
            self._file.unlink(missing_ok=True)
            lock.release()

    def expect(self, total: int | None) -> None:
        """Set the total."""
        self._total = total

    def add(self) -> None:
        """Count one that is done."""
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._told_s >= _INTERVAL_S:
            self._told_s = now_s
            self._progress(self._done, self._total, "rows")
            with suppress(OSError):  # a full disk, which writing the rows reports
                self._file.write_text(json.dumps([self._done, self._total]))


def _open_sources(options: DataOptions) -> dict[str, Source]:
    train = open_source(options.dataset, options.dataset_split, options.dataset_config, options.dataset_revision)
    if options.eval_dataset is None:
        return {"train": train}
    is_same = options.eval_dataset == options.dataset
    config, revision = (options.dataset_config, options.dataset_revision) if is_same else (None, None)
    return {"train": train, "eval": open_source(options.eval_dataset, options.eval_dataset_split, config, revision)}


def _build(
    folder: Path,
    sources: dict[str, Source],
    identities: dict[str, list[Any]],
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    counter: _Counter,
) -> None:
    most = {"train": options.max_train_samples, "eval": options.max_eval_samples}
    counts = [source.count_rows(most[name]) for name, source in sources.items()]
    counter.expect(None if None in counts else sum(filter(None, counts)))
    with fill_atomically(folder) as unfinished:
        for name, source in sources.items():
            if method.is_prepared_here:
                report = _encode_split(unfinished, name, source, options, tokenizer, counter)
            else:
                report = _copy_split(unfinished, name, source, options, tokenizer, method, counter)
            (unfinished / f"{name}.json").write_text(json.dumps(asdict(report), indent=1))
            if source.identify() != identities[name]:
                raise DataError("changed while it was read", where=f"dataset {source.name!r}", fix="start again")


def _encode_split(
    folder: Path,
    name: str,
    source: Source,
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    counter: _Counter,
) -> DataReport:
    packing = options.packing
    max_samples = options.max_train_samples
    if name == "eval":
        packing = options.packing if options.eval_packing is None else options.eval_packing
        max_samples = options.max_eval_samples
    encoder, results = encode_source(source, options, tokenizer, packing, max_samples)
    report = DataReport(
        source.name,
        encoder.format.name,
        encoder.mask_method,
        encoder.format.is_chat,
        ignored_files=list(source.ignored),
    )
    logger.info("%s: %s rows, loss on %s", source.name, report.format, report.mask_method)

    path = folder / f"{name}.arrow"
    tokens = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": tokens, "labels": tokens})
    writer = ArrowWriter(features=features, path=str(path), writer_batch_size=_WRITE_ROWS)
    with path.with_suffix(f".{_PLACES_SUFFIX}").open("w", encoding="utf-8") as places:
        for place, result in results:
            counter.add()
            report.add(place, result)
            if isinstance(result, Encoding):
                writer.write({"input_ids": result.input_ids, "labels": result.labels})
                write_place(places, place)
    writer.finalize()
    writer.close()
    _check_report(report, options)
    if packing:
        report.num_packed = _pack(path, options)
    return report


def _copy_split(
    folder: Path,
    name: str,
    source: Source,
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    counter: _Counter,
) -> DataReport:
    """Check the rows of a source and write the columns that the trainer reads, in two passes over it."""
    max_samples = options.max_eval_samples if name == "eval" else options.max_train_samples
    has_chat_template = tokenizer.chat_template is not None
    found, rows = open_rows(source, method, has_chat_template, max_samples)
    tokenized = f"TRL's {method.trainer_class} tokenizes them"
    if method.name == "kto" and "chosen" in found.columns:
        tokenized += ", after unpairing: it trains on 1000 chosen, then on their 1000 rejected, and so on"
    report = DataReport(source.name, found.name, tokenized, found.is_chat, ignored_files=list(source.ignored))

    def count() -> Iterator[dict[str, Any]]:
        for place, row in rows:
            counter.add()
            if isinstance(row, BadRow):
                report.skip(place, row)
                continue
            report.keep()
            if method.generates:
                report.longest_tokens = max(report.longest_tokens, _count_prompt_tokens(row["prompt"], tokenizer))
            yield row

    schema = find_schema(count(), source.name)
    _check_report(report, options)
    _, rows = open_rows(source, method, has_chat_template, max_samples)
    kept = ((place, row) for place, row in rows if not isinstance(row, BadRow))
    writer = ArrowWriter(schema=schema, path=str(folder / f"{name}.arrow"))
    with (folder / f"{name}.{_PLACES_SUFFIX}").open("w", encoding="utf-8") as places:
        while batch := list(islice(kept, _WRITE_ROWS)):
            writer.write_table(make_table([row for _, row in batch], schema))
            for place, _ in batch:
                write_place(places, place)
    writer.finalize()
    writer.close()
    return report


def _count_prompt_tokens(prompt: str | list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt, verbose=False)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _check_report(report: DataReport, options: DataOptions) -> None:
    where = f"dataset {report.dataset!r}"
    if report.num_skipped and options.on_bad_row == "error":
        fixes = [report.suggest_length(options.max_length), "fix the rows", "or leave them out with --on_bad_row skip"]
        raise DataError(report.explain_skipped(), where=where, fix=", ".join(filter(None, fixes)))
    if not report.rows_kept:
        fix = report.suggest_length(options.max_length)
        raise DataError(f"no row is left to train on: {report.explain_skipped()}", where=where, fix=fix)


def _pack(path: Path, options: DataOptions) -> int:
    from trl.data_utils import pack_dataset

    rows = datasets.Dataset.from_file(str(path))
    if options.shuffle_dataset:
        rows = rows.shuffle(seed=options.seed, keep_in_memory=True)
    packed_path = path.with_suffix(".packed")
    map_kwargs = {"cache_file_name": str(packed_path), "desc": "Packing"}
    assert options.max_length is not None
    packed = pack_dataset(rows, options.max_length, options.packing_strategy, map_kwargs)
    num_packed = len(packed)
    os.replace(packed_path, path)
    return num_packed


def _load(folder: Path, options: DataOptions) -> Prepared:
    found = {}
    for name in ("train", "eval"):
        if (folder / f"{name}.json").exists():
            found[name] = (_load_rows(folder / f"{name}.arrow", options), _load_report(folder / f"{name}.json"))
    train, report = found["train"]
    eval_rows, eval_report = found.get("eval", (None, None))
    shuffle_seed = options.seed if options.shuffle_dataset else None
    return Prepared(train, eval_rows, report, eval_report, folder, shuffle_seed)


def _load_rows(path: Path, options: DataOptions) -> datasets.Dataset:
    rows = datasets.Dataset.from_file(str(path))
    # In memory: otherwise every process would write the indices into the shared folder.
    return rows.shuffle(seed=options.seed, keep_in_memory=True) if options.shuffle_dataset else rows


def _load_report(path: Path) -> DataReport:
    values = json.loads(path.read_text())
    values["rows_skipped"] = {reason: SkippedRows(**skipped) for reason, skipped in values["rows_skipped"].items()}
    return DataReport(**values)


def _hash_inputs(
    options: DataOptions, identities: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, method: Method
) -> str:
    inputs = {
        "recipe": _RECIPE_VERSION,
        "method": method.name,
        "options": options.model_dump(mode="json", exclude=None if options.shuffle_dataset else {"seed"}),
        "sources": identities,
        "tokenizer": _describe_tokenizer(tokenizer),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    description: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "chat_template": tokenizer.chat_template,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return description | {"vocabulary": tokenizer.get_vocab(), "options": str(tokenizer.init_kwargs)}
    # A call leaves its padding and truncation in the backend, which change none of the tokens here.
    state = json.loads(backend.to_str())
    return description | {"backend": {key: state[key] for key in state if key not in ("padding", "truncation")}}
