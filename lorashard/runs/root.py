"""The folder whose subfolders are runs: names that come from a browser stay inside of it. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ConfigError

_NAME = re.compile(r"\w[\w.+=@ -]*")
_MAX_NAME_BYTES = 255  # of most file systems
SWEEP_NAME = "sweep.json"  # in the folder of a sweep, whose subfolders are its jobs
JOB_STOP_NAME = "stop"  # a file in a job's folder that asks it to end alone


def is_job(folder: Path) -> bool:
    """Tell whether a folder is that of a job: one adapter of the sweep whose folder is above it."""
    return (folder.parent / SWEEP_NAME).is_file()


def find_run(root: Path, name: str) -> Path:
    """Return the folder of the run `name` in `root`, whether it is there already or not.

    Args:
        root: the folder of all runs, as the person who started the server chose it.
        name: of one run, from anybody; `SWEEP/JOB` is that of a job, where `SWEEP` is a sweep.

    Raises:
        ConfigError: as `find_place`, or a name with a slash before which no sweep is named.
    """
    sweep, slash, job = name.partition("/")
    if not slash:
        return find_place(root, name)
    above = find_place(root, sweep)
    if not (above / SWEEP_NAME).is_file():
        raise ConfigError(expected="the name of a run, or SWEEP/JOB of a sweep's job", found=repr(name))
    return find_place(above, job)


def find_place(root: Path, name: str) -> Path:
    """Return the folder `name` in `root`, whether it is there already or not: where something new may be put.

    Raises:
        ConfigError: it is not the plain name of a folder in `root`, or it is that of a link which leads out of it.
    """
    is_plain = _NAME.fullmatch(name) is not None and name == name.strip() and len(os.fsencode(name)) <= _MAX_NAME_BYTES
    if not is_plain:
        raise ConfigError(
            expected="the name of a run (letters, digits, '_', and within it '. + = @ -' and spaces)", found=repr(name)
        )
    root = Path(os.path.realpath(root))
    folder = root / name
    if Path(os.path.realpath(folder)) != folder:
        raise ConfigError(expected="the folder of a run", found=f"a link, {name!r}", where=root)
    return folder


def find_existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that is there."""
    return next(place for place in [path, *path.absolute().parents] if place.exists())
