"""Links in a folder that somebody else made: what they must not lead to. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def find_link_out(folder: Path, paths: Iterable[Path]) -> str | None:
    """Return the first of `paths` in `folder` that leads out of it, with where it leads; None if all stay inside.

    A folder that was downloaded may hold a link to a private file of this machine, which would be trained on, or copied
    beside a merged model and uploaded with it. `folder` may be a link itself, since a person has named it. The hub's
    cache keeps its files in `blobs` beside `snapshots`: these are inside.
    """
    root = Path(os.path.realpath(folder))
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    for path in paths:
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in inside):
            return f"{path.relative_to(folder)} -> {target}"
    return None
