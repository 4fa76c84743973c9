"""What the form offers to choose from: models, datasets, recipes and earlier runs. Only lists folders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from huggingface_hub import constants

from lorashard.config.data_options import DATA_SUFFIXES
from lorashard.errors import ConfigError

from ..reading.places import write_path
from ..reading.states import ASKED_NAME, STATUS_NAME
from ..reading.summaries import read_options
from .paths import Allowed

_MAX_RUNS = 50
# Of a walk through the folders that may be read: a home with millions of files takes a tenth of a second at most.
MAX_ENTRIES = 20_000
_MAX_DEPTH = 6
_MAX_FOUND = 500
_WALK_EVERY_S = 10.0
_NO_DATA = frozenset(("node_modules", "site-packages", "__pycache__"))
RUN, RECIPE = "run:", "recipe:"


class Choices:
    """What may be chosen; safe to use from several threads.

    Args:
        root: the folder of the runs.
        allowed: which folders may be read; no other one is listed.
    """

    def __init__(self, root: Path, allowed: Allowed) -> None:
        self._root = root
        self._allowed = allowed
        self._found: tuple[float, list[str], list[str]] | None = None

    def sources(self) -> list[tuple[str, str]]:
        """Return what a form can start from: recipes, and earlier runs, the newest first."""
        recipes = [(f"Recipe {name}: {_describe_recipe(path)}", RECIPE + name) for name, path in list_recipes().items()]
        return recipes + [(f"Run {name}", RUN + name) for name in list_runs(self._root)]

    def models(self) -> list[str]:
        """Return the models of the latest runs, those in the folders that may be read, and those of the Hub's cache."""
        used = [read_options(self._root / name).get("model_name_or_path") for name in list_runs(self._root)[:_MAX_RUNS]]
        found, _ = self._walk()
        return list(dict.fromkeys([*(str(model) for model in used if model), *found, *_list_cache("models")]))

    def datasets(self) -> list[str]:
        """Return the uploaded files, the newest first, those in the folders that may be read, and the cached ones."""
        uploads = sorted((self._root / ".uploads").glob("*/[!.]*"), key=_read_time, reverse=True)
        kept = [write_path(str(path)) for path in uploads]
        _, found = self._walk()
        return list(dict.fromkeys([*kept, *found, *_list_cache("datasets")]))

    def complete(self, typed: str, is_model: bool) -> list[str]:
        """Return how a path that is being typed may go on: folders, and files of data where no model is asked for."""
        return [path for path in self._list_folder(typed) if not is_model or path.endswith(os.sep)]

    def _walk(self) -> tuple[list[str], list[str]]:
        """Return the folders of models and the files of data in the folders that may be read."""
        if self._found is None or time.monotonic() - self._found[0] > _WALK_EVERY_S:
            models: list[str] = []
            datasets: list[str] = []
            for folder in self._allowed.browsable:
                for path, is_model in _find_files(folder, self._root):
                    (models if is_model else datasets).append(write_path(path))
            self._found = (time.monotonic(), models, datasets)
        return self._found[1:]

    def _list_folder(self, typed: str) -> list[str]:
        """Return what lies in the folder of a path that is being typed, as it is written there."""
        folder, _, begun = typed.rpartition(os.sep)
        if not folder:
            return []
        with suppress(ConfigError, OSError):
            self._allowed.check(os.path.join(folder, ""), "dataset")
            found = sorted(_scan_seen(os.path.expanduser(folder)), key=lambda entry: entry.name)
            names = [entry.name + (os.sep if entry.is_dir() else "") for entry in found if _is_offered(entry)]
            return [f"{folder}{os.sep}{name}" for name in names if name.startswith(begun)][:_MAX_FOUND]
        return []


def list_runs(root: Path) -> list[str]:
    """Return the names of the runs that have a configuration, the newest first."""
    found = []
    for entry in _scan(root):
        times = [_read_time(Path(entry, name)) for name in (ASKED_NAME, "config.yaml")]
        times = [at for at in times if at]
        if times and not entry.name.startswith("."):
            found.append((max(times), entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def list_recipes() -> dict[str, Path]:
    """Return the recipes by name: the demo where the server was started beside it, and those of `configs/`.

    An installed package has them in its own folder `recipes`, a checkout beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    found = {"demo": Path("examples/demo/demo.yaml")} | {
        path.stem: path
        for folder in (package / "recipes", package.parent / "configs")
        for path in folder.glob("*.yaml")
    }
    return {name: path for name, path in found.items() if path.is_file()}


def _describe_recipe(path: Path) -> str:
    """Return the first sentence of a recipe, which is a comment."""
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").partition(": lorashard")[0].partition("; ")[0].strip(" .\n")
    return path.name


def _find_files(top: str, root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the models' folders and the files of data under a folder, nearest first; True of the former.

    Hidden files, links and runs are left out.
    """
    folders, num_entries, num_found = [(top, 0)], 0, 0
    for folder, depth in folders:  # grows
        try:
            entries = sorted(_scan_seen(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        num_entries += len(entries)
        if num_entries > MAX_ENTRIES or num_found > _MAX_FOUND:
            return
        names = {entry.name for entry in entries}
        if folder == str(root) or names & {ASKED_NAME, STATUS_NAME}:
            continue
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            yield folder, True
            num_found += 1
            continue
        for entry in entries:
            if entry.is_symlink():
                continue
            if entry.is_dir() and depth < _MAX_DEPTH and entry.name not in _NO_DATA:
                folders.append((entry.path, depth + 1))
            elif entry.is_file() and entry.name.endswith(DATA_SUFFIXES):
                yield entry.path, False
                num_found += 1


def _is_offered(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() or entry.name.endswith(DATA_SUFFIXES)


def _list_cache(kind: str) -> list[str]:
    """Return what the Hugging Face cache holds of a kind, `models` or `datasets`."""
    entries = [entry.name for entry in _scan(Path(constants.HF_HUB_CACHE)) if entry.name.startswith(f"{kind}--")]
    return sorted(name.removeprefix(f"{kind}--").replace("--", "/") for name in entries)


def _scan_seen(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden."""
    with os.scandir(folder) as entries:
        return [entry for entry in islice(entries, MAX_ENTRIES) if not entry.name.startswith(".")]


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []


def _read_time(path: Path) -> float:
    """Return when a file was written; 0 if it does not exist."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
