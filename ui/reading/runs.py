"""The runs of a folder as they tell of themselves. Nothing is written here."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from lorashard.errors import ConfigError
from lorashard.runs.root import find_run

from .reader import RunReader
from .summaries import KnownRun, Summary, is_run

__all__ = ["RunReader", "Runs"]

_MOST_READERS = 16


class Runs:
    """The runs of one folder. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._known: dict[str, KnownRun] = {}
        self._readers: OrderedDict[str, RunReader] = OrderedDict()

    def list(self) -> list[Summary]:
        """Return every run in one row, the newest first. Folders that are no runs are left out."""
        names = _list_names(self._root)
        with self._lock:
            self._known = {name: self._known.get(name) or KnownRun(self._root / name) for name in names}
            known = list(self._known.values())
        rows = [row for one in known if (row := one.summarize()) is not None]
        return sorted(rows, key=lambda row: (row.begin_s or row.update_s or 0.0, row.name), reverse=True)

    def get(self, name: str) -> RunReader:
        """Return one run; everybody gets the same reader.

        Raises:
            ConfigError: it is no name of a run, or there is none of that name.
        """
        folder = find_run(self._root, name)
        if not is_run(folder):
            raise ConfigError(f"there is no run {name!r}", where=self._root, fix="choose one of the table of runs")
        with self._lock:
            reader = self._readers.pop(name, None) or RunReader(folder)
            self._readers[name] = reader
            while len(self._readers) > _MOST_READERS:
                self._readers.popitem(last=False)
        return reader


def _list_names(root: Path) -> list[str]:
    names = []
    try:
        paths = sorted(root.iterdir())
    except OSError:
        return []
    for path in paths:
        try:
            if path.is_dir() and is_run(find_run(root, path.name)):
                names.append(path.name)
        except (ConfigError, OSError):  # hidden, a link that leads out, or not to be looked into
            continue
    return names
