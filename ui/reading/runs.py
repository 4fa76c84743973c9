"""The runs of a folder as they tell of themselves. Nothing is written here."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from lorashard.errors import ConfigError
from lorashard.runs.root import find_run

from .reader import RunReader
from .sanitize import show_safely
from .summaries import KnownRun, Summary, is_run
from .sweeps import JobRow, is_sweep, list_job_names, read_jobs

__all__ = ["RunReader", "Runs"]

_MOST_READERS = 16


class Runs:
    """The runs of one folder. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._known: dict[str, KnownRun] = {}
        self._readers: OrderedDict[str, RunReader] = OrderedDict()

    def list_misnamed(self) -> list[str]:
        """Return the names of the folders that hold a run and are not in `list`, since a browser may not name them."""
        names = [name for name in _list_folders(self._root) if not _is_named(self._root, name)]
        return [show_safely(os.fsencode(name).decode("utf-8", "replace")) for name in names]

    def list(self) -> list[Summary]:
        """Return every run in one row, the newest first. Folders that are no runs are left out; see `list_misnamed`."""
        rows = self._summarize(_list_names(self._root))
        return sorted(rows, key=lambda row: (row.begin_s or row.update_s or 0.0, row.name), reverse=True)

    def list_with_jobs(self) -> Sequence[Summary]:
        """Return every run in one row, the newest first, each sweep with its jobs after it."""
        return [one for row in self.list() for one in (row, *self._summarize(self._list_jobs(row.name)))]

    def list_jobs(self, name: str) -> Sequence[JobRow]:
        """Return the jobs of a sweep, the best first; none of what is no sweep.

        Raises:
            ConfigError: as `get`.
        """
        folder = self.get(name).folder
        rows = {row.name: row for row in self._summarize(self._list_jobs(name))} if is_sweep(folder) else {}
        return read_jobs(folder, name, rows)

    def _list_jobs(self, sweep: str) -> Sequence[str]:
        return [f"{sweep}/{job}" for job in list_job_names(self._root / sweep) if is_run(self._root / sweep / job)]

    def _summarize(self, names: Sequence[str]) -> Sequence[Summary]:
        """Return runs in one row each; those that are being deleted are left out."""
        with self._lock:
            for gone in [name for name in self._known if not is_run(self._root / name)]:
                del self._known[gone]
            known = [self._known.setdefault(name, KnownRun(self._root / name, name)) for name in names]
        return [row for one in known if (row := one.summarize()) is not None]

    def get(self, name: str) -> RunReader:
        """Return one run; everybody gets the same reader.

        Raises:
            ConfigError: it is no name of a run, or there is none of that name.
        """
        folder = find_run(self._root, name)
        if not is_run(folder):
            raise ConfigError(f"there is no run {name!r}", where=self._root, fix="choose one of the table of runs")
        with self._lock:
            reader = self._readers.pop(name, None) or RunReader(folder, name)
            self._readers[name] = reader
            while len(self._readers) > _MOST_READERS:
                self._readers.popitem(last=False)
        return reader


def _list_names(root: Path) -> list[str]:
    return [name for name in _list_folders(root) if _is_named(root, name)]


def _list_folders(root: Path) -> list[str]:
    """Return the names of the folders that hold a run, whatever they are called, but for hidden ones."""
    try:
        return sorted(path.name for path in root.iterdir() if not path.name.startswith(".") and _holds_run(path))
    except OSError:
        return []


def _holds_run(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and is_run(path)  # a link may lead out
    except OSError:  # not to be looked into
        return False


def _is_named(root: Path, name: str) -> bool:
    try:
        find_run(root, name)
    except ConfigError:
        return False
    return True
