"""A look at a local dataset without the libraries that read it, so that a mistake is told before ranks start."""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path

from ..config.data_options import DATA_SUFFIXES
from ..config.methods import Method, refuse_columns, suggest_method
from ..errors import DataError

_NUM_ROWS = 256  # by which the columns are recognized later


def check_exists(name: str) -> None:
    """Refuse the name of a dataset that can only be a local path, and leads to nothing.

    Raises:
        DataError: There is no such file or folder.
    """
    path = Path(name).expanduser()
    is_local = path.suffix in DATA_SUFFIXES or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if is_local and not path.exists():
        raise DataError("no such file or folder", where=f"dataset {name!r}")


def check_columns(name: str, method: Method, text_field: str) -> None:
    """Refuse a file whose columns another method trains on, as far as a look at its first rows tells.

    Raises:
        DataError: With the method to choose.
    """
    columns = _peek_columns(Path(name).expanduser())
    if not method.takes(columns, text_field) and suggest_method(method, columns):
        raise refuse_columns(method, columns, name, text_field)


def _peek_columns(path: Path) -> list[str]:
    """Return the columns of the first rows of lines of JSON or of CSV; none where they cannot be told so."""
    if path.suffix not in (".jsonl", ".csv") or not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                return next(csv.reader(file), [])
            rows = [json.loads(line) for line in islice(file, _NUM_ROWS) if line.strip()]
    except (OSError, ValueError, csv.Error, RecursionError):
        return []  # told with its line when it is read
    return list(dict.fromkeys(column for row in rows if isinstance(row, dict) for column in row))
