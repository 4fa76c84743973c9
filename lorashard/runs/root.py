"""The folder whose subfolders are runs: names that come from a browser stay inside of it. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ConfigError

_NAME = re.compile(r"\w[\w.+=@ -]*")
_MAX_NAME_BYTES = 255  # of most file systems


def find_run(root: Path, name: str) -> Path:
    """Return the folder of the run `name` in `root`, whether it is there already or not.

    Args:
        root: the folder of all runs, as the person who started the server chose it.
        name: of one run, from anybody.

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
