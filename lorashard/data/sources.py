"""Where rows come from: files, folders and hub datasets, read row by row with the place of each."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns
from datasets.packaged_modules.cache.cache import Cache
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.file_download import repo_folder_name

from ..config.data_options import DATA_SUFFIXES
from ..errors import DataError
from ..runs.links import find_link_out

_JSON_CHUNK_CHARS = 1 << 16
_CSV_FIELD_CHARS = 1 << 30
_BATCH_ROWS = 256
_COUNT_CHUNK_BYTES = 1 << 20


class BadRow(Exception):
    """One row that cannot be trained on; `reason` is the kind of problem, under which rows are counted.

    `tokens_before_cut` is given where cutting the row to `max_length` is the problem.
    """

    def __init__(self, reason: str, detail: str, tokens_before_cut: int | None = None) -> None:
        super().__init__(detail)
        self.tokens_before_cut = tokens_before_cut
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it was read: its place, for people to find it, and its columns or why it has none."""

    place: str
    value: dict[str, Any] | BadRow


@dataclass(frozen=True)
class FileSource:
    """Rows of local files, in order."""

    name: str
    paths: tuple[Path, ...]
    root: Path
    ignored: tuple[str, ...] = ()

    def identify(self) -> list[Any]:
        """Return what changes when a file's contents do: its path, size and time of change."""
        stats = [(path, path.stat()) for path in self.paths]
        return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]

    def count_rows(self, most: int | None = None) -> int | None:
        """Return how many rows there are, up to `most`; where parsing alone would tell, `most`."""
        is_parquet = all(path.suffix == ".parquet" for path in self.paths)
        if not is_parquet and not all(path.suffix == ".jsonl" for path in self.paths):
            return most
        total = 0
        try:
            for number in chain.from_iterable(map(_count_parquet if is_parquet else _count_lines, self.paths)):
                total += number
                if most is not None and total >= most:
                    return most
        except (OSError, pa.ArrowException):  # whoever reads the rows says what is wrong
            return most
        return total

    def read(self) -> Iterator[Row]:
        """Yield every row of every file."""
        for path in self.paths:
            try:
                yield from _READERS[path.suffix](path, path.relative_to(self.root).as_posix())
            except UnicodeDecodeError as error:
                raise DataError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}): convert it") from error
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class HubSource:
    """Rows of one split of a dataset on the Hugging Face hub, downloaded and cached by the datasets library."""

    name: str
    config: str | None
    split: str
    revision: str | None
    ignored: tuple[str, ...] = ()

    def identify(self) -> list[Any]:
        """Return the dataset's place in the datasets library's cache: it holds the commit of what is read.

        Raises:
            DataError: It cannot be loaded, or the cache alone is at hand and holds another revision.
        """
        builder = self._ask(datasets.load_dataset_builder)
        # Without the hub the datasets library takes the newest rows in its cache, whatever revision was asked for.
        if self.revision is not None and isinstance(builder, Cache) and builder.hash != self._find_cached_commit():
            raise DataError(
                f"dataset {self.name!r}: revision {self.revision} is not in the cache, and the hub cannot be asked. Go "
                f"online once, or set dataset_revision to what the cache has: {builder.hash}"
            )
        return [str(builder.cache_dir), self.split]

    def _find_cached_commit(self) -> str:
        assert self.revision is not None
        folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=self.name, repo_type="dataset"))
        ref = folder / "refs" / self.revision
        return ref.read_text().strip() if ref.is_file() else self.revision

    def count_rows(self, most: int | None = None) -> int | None:
        """Download the split if it is not yet cached, and return how many rows it has, up to `most`."""
        num_rows = len(self._ask(datasets.load_dataset, split=self.split))
        return num_rows if most is None else min(num_rows, most)

    def read(self) -> Iterator[Row]:
        """Download the split if it is not yet cached, and yield every row."""
        dataset = self._ask(datasets.load_dataset, split=self.split)
        columns = dataset.column_names
        number = 0
        for batch in dataset.iter(batch_size=_BATCH_ROWS):
            for values in zip(*(batch[column] for column in columns), strict=True):
                number += 1
                yield Row(f"{self.name} [{self.split}] row {number}", dict(zip(columns, values, strict=True)))

    def _ask(self, load: Any, **arguments: Any) -> Any:
        try:
            return load(self.name, self.config, revision=self.revision, **arguments)
        except datasets.exceptions.DatasetNotFoundError as error:
            advice = "Check the spelling; for a private or gated one, log in with `hf auth login` or set HF_TOKEN"
            raise DataError(self._explain(error, advice)) from error
        except (HTTPError, ConnectionError) as error:
            raise DataError(self._explain(error, "Try again, or download it and give its folder")) from error
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise DataError(self._explain(error)) from error

    def _explain(self, error: Exception, advice: str = "") -> str:
        reason = _first_line(error)
        return (
            f"dataset {self.name!r} is no file or folder here, and could not be loaded from the Hugging Face hub "
            f"(config {self.config}, split {self.split}, revision {self.revision}): "
            + (f"{reason.rstrip('.')}. {advice}" if advice else reason)
        )


Source = FileSource | HubSource


def open_source(name: str, split: str, config: str | None, revision: str | None) -> Source:
    """Find the rows that a person named: a file, a split of a folder, or a split of a hub dataset.

    A folder's splits are told from the names of its files as the datasets library does: `train.jsonl`,
    `data/test-00000-of-00001.parquet`, `train/part.csv`; names that say nothing are all `train`.
    """
    if "://" in name:  # it may hold a password, so it is not repeated
        raise DataError("expected a dataset's file, folder or hub id, found an address with '://'")
    path = Path(name).expanduser()
    if path.exists() and (config or revision):
        raise DataError(f"dataset_config and dataset_revision are for hub datasets, but {name!r} is a local path")
    if path.is_file():
        if path.suffix not in _READERS:
            raise DataError(f"{name!r} must be one of {', '.join(_READERS)}, found {path.suffix or 'no suffix'}")
        return FileSource(name, (path,), path.parent)
    if path.is_dir():
        return _open_folder(name, path, split)
    if path.suffix in _READERS or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise DataError(f"dataset {name!r}: no such file or folder")
    return HubSource(name, config, split, revision)


def _open_folder(name: str, folder: Path, split: str) -> FileSource:
    base = folder.resolve().as_posix()
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(base), base, allowed_extensions=list(_READERS))
    except EmptyDatasetError:
        found = DataFilesDict()
    splits = {str(key): sorted(Path(file) for file in files) for key, files in found.items() if files}
    if not splits:
        raise DataError(f"folder {name!r} holds no {', '.join(_READERS)} file")
    files = [path for paths in splits.values() for path in paths]
    compressed = next((path for path in files if path.suffix not in _READERS), None)
    if compressed is not None:
        raise DataError(f"folder {name!r} holds {compressed.name}, which is compressed: unpack it first")
    link = find_link_out(folder.resolve(), files)
    if link is not None:
        raise DataError(
            f"folder {name!r} is expected to hold its files itself, and a link leads out of it: {link}. If that is the "
            "file you mean, copy it there or name it; if the folder is another's, do not trust it"
        )
    if split not in splits:
        raise DataError(f"folder {name!r} has the splits {', '.join(sorted(splits))}, but not {split!r}")
    root = folder.resolve()
    known = {path for paths in splits.values() for path in paths}
    others = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and path not in known)
    ignored = sorted(path.as_posix() for path in others if not any(part.startswith(".") for part in path.parts))
    return FileSource(name, tuple(splits[split]), root, tuple(ignored))


def _count_parquet(path: Path) -> Iterator[int]:
    yield pq.read_metadata(path).num_rows


def _count_lines(path: Path) -> Iterator[int]:
    """Yield how many lines are in each part of a file."""
    with path.open("rb") as file:
        while chunk := file.read(_COUNT_CHUNK_BYTES):
            yield chunk.count(b"\n")


def _read_jsonl(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.rstrip()
            if not line:
                continue  # an empty line, most often the last, holds no row
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                yield Row(f"{name} line {number}", BadRow("broken JSON", f"{error.msg} at column {error.colno}"))
            except UnicodeDecodeError as error:
                yield Row(f"{name} line {number}", BadRow("broken JSON", f"not UTF-8 text at byte {error.start}"))
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
                yield Row(f"{name} line {number}", BadRow("broken JSON", _first_line(error)))
            else:
                yield _check_object(f"{name} line {number}", value)


def _read_json(path: Path, name: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        while (character := file.read(1)).isspace():
            pass
        if character == "[":
            for number, value in enumerate(_decode_list(file, name), 1):
                yield _check_object(f"{name} row {number}", value)
            return
    yield from _read_jsonl(path, name)


def _decode_list(file: TextIO, name: str) -> Iterator[Any]:
    """Decode the items of a JSON list one at a time, so that a file of any size takes the memory of an item.

    Args:
        file: Text, open just after the list's first bracket.
        name: How to call the file in an error.
    """
    decoder = json.JSONDecoder()
    text, start, number = "", 0, 0
    while True:
        start = _skip(r"[\s,]*" if number else r"\s*", text, start)
        if text[start : start + 1] == "]":
            return
        try:
            item, end = decoder.raw_decode(text, start)
            end = _skip(r"\s*", text, end)
            is_whole = end < len(text)  # a number may go on in the next chunk
            message = "expected , or ]"
            if is_whole and text[end] not in ",]":
                raise json.JSONDecodeError(message, text, end)
        except json.JSONDecodeError as error:
            # The text may only be cut: then decoding stopped at its end, or in a string that it never saw the end of.
            if not error.msg.startswith("Unterminated string") and error.pos < len(text) - 16:
                raise DataError(_explain_broken_list(name, number, error.msg)) from error
            is_whole, message = False, error.msg
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
            raise DataError(_explain_broken_list(name, number, _first_line(error))) from error
        if is_whole:
            number += 1
            yield item
            start = end
            continue
        more = file.read(max(_JSON_CHUNK_CHARS, len(text) - start))
        if not more:
            raise DataError(_explain_broken_list(name, number, message))
        text, start = text[start:] + more, 0


def _skip(pattern: str, text: str, start: int) -> int:
    found = re.compile(pattern).match(text, start)
    return found.end() if found else start


def _explain_broken_list(name: str, number: int, message: str) -> str:
    return (
        f"{name} is broken JSON after row {number} ({message}), and what follows cannot be told apart into rows: fix "
        "it, or write one object a line in a .jsonl file, where a broken line spoils no other"
    )


def _read_csv(path: Path, name: str) -> Iterator[Row]:
    limit = csv.field_size_limit(_CSV_FIELD_CHARS)  # a document easily exceeds the default of 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if not header:
                raise DataError(f"{path} has no header line with the names of its columns")
            number = 0
            while True:
                try:
                    cells = next(reader, None)
                except csv.Error as error:
                    number += 1
                    yield Row(f"{name} row {number}", BadRow("broken CSV", f"{error}, near line {reader.line_num}"))
                    continue
                if cells is None:
                    return
                if not cells:
                    continue
                number += 1
                place = f"{name} row {number}"
                if len(cells) == len(header):
                    yield Row(place, dict(zip(header, cells, strict=True)))
                else:
                    yield Row(place, BadRow("broken CSV", f"{len(cells)} cells under {len(header)} column names"))
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            features = datasets.Features.from_arrow_schema(file.schema_arrow)
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{name} row {number}", features.decode_example(value))
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as parquet: {_first_line(error)}") from error


_READERS = dict(zip(DATA_SUFFIXES, (_read_jsonl, _read_json, _read_csv, _read_parquet), strict=True))


def _check_object(place: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(place, value)
    return Row(place, BadRow("wrong type", f"expected an object with named fields, found {name_type(value)}"))


def name_type(value: Any) -> str:
    """Name a value's type as people who write JSON know it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
