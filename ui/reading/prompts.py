"""Prompts to try a model with: those of the run's samples, and the first of its dataset's files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lorashard.errors import ConfigError

from .jsonl_tail import parse_line

_MOST_PROMPTS = 8
_MOST_CHARACTERS = 4000
_MOST_BYTES = 1 << 20
_USERS = ("user", "human")


def list_prompts(options: Mapping[str, Any], check: Callable[[str, str], None]) -> list[str]:
    """Return some prompts of a run: its `sample_prompts`, then the questions of its evaluation dataset or its dataset.

    Datasets of the hub, and rows that hold no question, give none.

    Args:
        options: of the run.
        check: refuses a path that may not be read, and the option it is of, by a ConfigError.
    """
    given = options.get("sample_prompts")
    found = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    for option in ("eval_dataset", "dataset"):
        place = options.get(option)
        if isinstance(place, str) and len(found) < _MOST_PROMPTS:
            found += _read_file(place, option, check)
    return list(dict.fromkeys(text for text in found if 0 < len(text) <= _MOST_CHARACTERS))[:_MOST_PROMPTS]


def _read_file(place: str, option: str, check: Callable[[str, str], None]) -> list[str]:
    path = Path(place).expanduser()
    try:
        check(place, option)
        rows = _READERS[path.suffix](path) if path.is_file() and path.suffix in _READERS else []
        return [text for row in islice(rows, _MOST_PROMPTS) if isinstance(row, dict) and (text := _find_question(row))]
    except (ConfigError, OSError, ValueError, csv.Error, RecursionError):  # not to be read, or no such file
        return []


def _read_jsonl(path: Path) -> Iterable[Any]:
    with path.open("rb") as file:
        lines = file.read(_MOST_BYTES).split(b"\n")
    return (row for line in lines if (row := parse_line(line)) is not None)


def _read_json(path: Path) -> Iterable[Any]:
    rows = json.loads(path.read_bytes()) if path.stat().st_size <= _MOST_BYTES else []
    return rows if isinstance(rows, list) else []


def _read_csv(path: Path) -> Iterable[Any]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from islice(csv.DictReader(file), _MOST_PROMPTS)


def _read_parquet(path: Path) -> Iterable[Any]:
    import pyarrow.parquet as parquet  # slow to import, and few need it

    with parquet.ParquetFile(path) as file:
        for batch in islice(file.iter_batches(_MOST_PROMPTS), 1):
            yield from batch.to_pylist()


_READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _find_question(row: Mapping[str, Any]) -> str:
    """Return what a user asks in a row, in one of the sets of columns that `lorashard.data.formats` knows."""
    for name in ("messages", "conversations", "prompt"):
        value = row.get(name)
        for turn in value if isinstance(value, list) else []:
            if isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in _USERS:
                return str(turn.get("content") or turn.get("value") or "")
        if isinstance(value, str):
            return value
    if isinstance(row.get("instruction"), str):
        return "\n\n".join(filter(None, (row["instruction"], str(row.get("input") or ""))))
    return str(row.get("question") or "")
