"""Choices that the form offers: local models and datasets, and earlier runs. Only lists folders."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from ..reading.states import ASKED_NAME
from ..reading.summaries import read_options

_MAX_RUNS = 50


def list_runs(root: Path) -> list[str]:
    """Return the names of the runs that have a configuration, the newest first."""
    found = []
    for entry in _scan(root):
        times = [_read_time(Path(entry, name)) for name in (ASKED_NAME, "config.yaml")]
        times = [at for at in times if at]
        if times and not entry.name.startswith("."):
            found.append((max(times), entry.name))
    return [name for _, name in sorted(found, reverse=True)]


def list_models(root: Path) -> list[str]:
    """Return the models of the latest runs, then those of the Hugging Face cache."""
    used = [read_options(root / name).get("model_name_or_path") for name in list_runs(root)[:_MAX_RUNS]]
    cached = [
        entry.name.removeprefix("models--").replace("--", "/")
        for entry in _scan(Path(constants.HF_HUB_CACHE))
        if entry.name.startswith("models--")
    ]
    return list(dict.fromkeys([*(str(model) for model in used if model), *sorted(cached)]))


def list_datasets(root: Path) -> list[str]:
    """Return the files that were uploaded, the newest first, then the datasets of the Hugging Face cache."""
    uploads = sorted((root / ".uploads").glob("*/[!.]*"), key=_read_time, reverse=True)
    cached = [
        entry.name.removeprefix("datasets--").replace("--", "/")
        for entry in _scan(Path(constants.HF_HUB_CACHE))
        if entry.name.startswith("datasets--")
    ]
    return [*map(str, uploads), *sorted(cached)]


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
