"""Rows of files, folders and hub datasets, each with its place: the file and line that a person finds it by.

The readers are lorashard's own where the datasets library's would give columns one type for all rows, and fail as a
whole on a row that is broken: a broken row is named here, and may be skipped.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

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
from .peek import check_exists

_CSV_FIELD_CHARS = 1 << 30
_BATCH_ROWS = 256
_COUNT_CHUNK_BYTES = 1 << 20


class BadRow(Exception):
    """A row that cannot be trained on; `reason` is the kind of problem, by which rows are counted.

    `tokens_before_cut` is given if truncating the row to `max_length` is the problem.
    """

    def __init__(self, reason: str, detail: str, tokens_before_cut: int | None = None) -> None:
        super().__init__(detail)
        self.tokens_before_cut = tokens_before_cut
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it was read: its place, and its columns or the reason why it has none."""

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
        """Return what changes when a file's contents do: its path, size and modification time."""
        stats = [(path, path.stat()) for path in self.paths]
        return [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]

    def count_rows(self, most: int | None = None, end_s: float = math.inf) -> int | None:
        """Return the number of rows, up to `most`; `most` if only parsing the files would find it.

        Args:
            end_s: of `time.monotonic`, when to give up, as if only parsing would find it.
        """
        is_parquet = all(path.suffix == ".parquet" for path in self.paths)
        if not is_parquet and not all(path.suffix == ".jsonl" for path in self.paths):
            return most
        total = 0
        try:
            for number in chain.from_iterable(map(_count_parquet if is_parquet else _count_lines, self.paths)):
                total += number
                if (most is not None and total >= most) or time.monotonic() > end_s:
                    return most
        except (OSError, pa.ArrowException):  # reported when the rows are read
            return most
        return total

    def read(self) -> Iterator[Row]:
        """Yield every row of every file."""
        for path in self.paths:
            try:
                yield from _READERS[path.suffix](path, path.relative_to(self.root).as_posix())
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 text ({error.reason}, byte {error.start})"
                raise DataError(problem, where=path, fix="convert it to UTF-8") from error
            except OSError as error:
                raise DataError(f"cannot be read: {error}", where=path) from error


@dataclass(frozen=True)
class HubSource:
    """Rows of one split of a dataset on the Hugging Face hub, downloaded and cached by the datasets library."""

    name: str
    config: str | None
    split: str
    revision: str | None
    ignored: tuple[str, ...] = ()

    def identify(self) -> list[Any]:
        """Return the dataset's folder in the datasets library's cache, which names the commit.

        Raises:
            DataError: It cannot be loaded, or the hub cannot be reached and the cache holds another revision.
        """
        builder = self._ask(datasets.load_dataset_builder)
        # Offline the datasets library takes the newest rows in its cache, whatever revision was asked for.
        if self.revision is not None and isinstance(builder, Cache) and builder.hash != self._find_cached_commit():
            raise DataError(
                "the hub cannot be reached, and the cache has another revision",
                option="dataset_revision",
                where=self.name,
                expected=builder.hash,
                found=self.revision,
                fix="go online once, or set dataset_revision to the cached one",
            )
        return [str(builder.cache_dir), self.split]

    def _find_cached_commit(self) -> str:
        assert self.revision is not None
        folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=self.name, repo_type="dataset"))
        ref = folder / "refs" / self.revision
        return ref.read_text().strip() if ref.is_file() else self.revision

    def count_rows(self, most: int | None = None, end_s: float = math.inf) -> int | None:
        """Download the split if it is not cached, and return its number of rows, up to `most`."""
        num_rows = len(self._ask(datasets.load_dataset, split=self.split))
        return num_rows if most is None else min(num_rows, most)

    def read(self) -> Iterator[Row]:
        """Download the split if it is not cached, and yield every row."""
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
            fix = "check the spelling; for a private or gated one, log in with `hf auth login` or set HF_TOKEN"
            raise self._describe(error, fix) from error
        except (HTTPError, ConnectionError) as error:
            raise self._describe(error, "try again, or download it and give its folder") from error
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise self._describe(error) from error

    def _describe(self, error: Exception, fix: str | None = None) -> DataError:
        return DataError(
            "no file or folder here, and could not be loaded from the Hugging Face hub (config "
            f"{self.config}, split {self.split}, revision {self.revision}): {_first_line(error).rstrip('.')}",
            where=f"dataset {self.name!r}",
            fix=fix,
        )


Source = FileSource | HubSource


class RowReader(Protocol):
    """What rows are read from: a source, or a part of one."""

    @property
    def name(self) -> str: ...

    def read(self) -> Iterator[Row]: ...


def open_source(name: str, split: str, config: str | None, revision: str | None) -> Source:
    """Return the rows of a file, of a split of a folder, or of a split of a hub dataset.

    A folder's splits are found from the names of its files as the datasets library does: `train.jsonl`,
    `data/test-00000-of-00001.parquet`, `train/part.csv`. Files whose names have no split are all `train`.
    """
    where = f"dataset {name!r}"
    if "://" in name:  # it may hold a password, so it is not repeated
        raise DataError(expected="a dataset's file, folder or hub id", found="a URL with '://'")
    path = Path(name).expanduser()
    if path.exists() and (config or revision):
        option = "dataset_config" if config else "dataset_revision"
        raise DataError(option=option, where=where, expected="a hub dataset with it", found="a local path")
    if path.is_file():
        if path.suffix not in _READERS:
            raise DataError(where=where, expected=f"one of {', '.join(_READERS)}", found=path.suffix or "no suffix")
        return FileSource(name, (path,), path.parent)
    if path.is_dir():
        return _open_folder(name, path, split)
    check_exists(name)
    return HubSource(name, config, split, revision)


def read_rows(source: RowReader, max_samples: int | None) -> tuple[list[dict[str, Any]], Iterator[Row]]:
    """Return the first readable rows, of which one may lack a column, and all rows.

    Raises:
        DataError: There is no row, or none of the first can be read.
    """
    rows = islice(source.read(), max_samples)
    first = list(islice(rows, _BATCH_ROWS))
    readable = [row.value for row in first if isinstance(row.value, dict)]
    if not readable:
        reason = f", the first because of {first[0].place}: {first[0].value}" if first else ""
        raise DataError(f"no row can be read{reason}", where=f"dataset {source.name!r}")
    return readable, chain(first, rows)


def _open_folder(name: str, folder: Path, split: str) -> FileSource:
    where = f"folder {name!r}"
    base = folder.resolve().as_posix()
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(base), base, allowed_extensions=list(_READERS))
    except EmptyDatasetError:
        found = DataFilesDict()
    splits = {str(key): sorted(Path(file) for file in files) for key, files in found.items() if files}
    if not splits:
        raise DataError(where=where, expected=f"files of {', '.join(_READERS)}", found="none")
    files = [path for paths in splits.values() for path in paths]
    compressed = next((path for path in files if path.suffix not in _READERS), None)
    if compressed is not None:
        raise DataError(f"holds {compressed.name}, which is compressed", where=where, fix="unpack it first")
    link = find_link_out(folder.resolve(), files)
    if link is not None:
        raise DataError(
            f"a link leads out of the folder: {link}",
            where=where,
            fix="if that is the file you mean, copy it there or name it; if the folder is another's, do not trust it",
        )
    if split not in splits:
        raise DataError(where=where, expected=f"one of the splits {', '.join(sorted(splits))}", found=repr(split))
    root = folder.resolve()
    known = {path for paths in splits.values() for path in paths}
    others = (path.relative_to(root) for path in root.rglob("*") if path.is_file() and path not in known)
    ignored = sorted(path.as_posix() for path in others if not any(part.startswith(".") for part in path.parts))
    return FileSource(name, tuple(splits[split]), root, tuple(ignored))


def _count_parquet(path: Path) -> Iterator[int]:
    yield pq.read_metadata(path).num_rows


def _count_lines(path: Path) -> Iterator[int]:
    """Yield the number of lines in each part of a file."""
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
            place = f"{name} line {number}"
            try:
                yield _check_object(place, json.loads(line))
            except (ValueError, RecursionError) as error:
                yield Row(place, BadRow("broken JSON", _explain_json(error)))


def _read_json(path: Path, name: str) -> Iterator[Row]:
    """Yield the items of a JSON list, which is decoded as a whole, or the lines of a file of JSON lines."""
    with path.open(encoding="utf-8-sig") as file:
        while (character := file.read(1)).isspace():
            pass
        if character != "[":
            yield from _read_jsonl(path, name)
            return
        file.seek(0)
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise
            line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(
                f"broken JSON ({_explain_json(error)}), after which no row can be read",
                where=f"{name}{line}",
                fix="fix it, or write one object a line in a .jsonl file, where a broken line spoils no other",
            ) from error
    for number, value in enumerate(values, 1):
        yield _check_object(f"{name} row {number}", value)


def _explain_json(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text at byte {error.start}"
    return _first_line(error)  # a number of thousands of digits, a thousand brackets


def _read_csv(path: Path, name: str) -> Iterator[Row]:
    limit = csv.field_size_limit(_CSV_FIELD_CHARS)  # a document easily exceeds the default of 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if not header:
                raise DataError("has no header line with the names of its columns", where=path)
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
        raise DataError(f"cannot be read as parquet: {_first_line(error)}", where=path) from error


_READERS = dict(zip(DATA_SUFFIXES, (_read_jsonl, _read_json, _read_csv, _read_parquet), strict=True))


def _check_object(place: str, value: Any) -> Row:
    if isinstance(value, dict):
        return Row(place, value)
    return Row(place, BadRow("wrong type", f"expected an object with named fields, found {name_type(value)}"))


def name_type(value: Any) -> str:
    """Return the name of a value's type in JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
