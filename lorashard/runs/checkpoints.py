"""Checkpoints that can be verified: written beside their place, listed with sizes and hashes, then renamed.

A run's folder holds `checkpoint-N`, each with a `manifest.json` that was written last. What is being written or deleted
has a name that begins with a dot; what a resumed run continues without has one that begins with `set-aside-`. Whatever
kills the writer, a folder with a manifest whose files have the listed sizes and hashes is what was saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..runtime.atomic_folder import publish_folder

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    `facts` are what a resumed run compares: ranks, rows of a step, data, base. `files` gives bytes and SHA-256 by the
    path inside the checkpoint.
    """

    step: int
    facts: dict[str, Any]
    files: dict[str, tuple[int, str]]


def list_checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoint folders, whole or not, newest first."""
    names = re.compile("checkpoint-(0|[1-9][0-9]*)")
    found = [path for path in run.glob("checkpoint-*") if names.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=read_step, reverse=True)


def read_step(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


def place_partial(checkpoint: Path) -> Path:
    """Return where a checkpoint is written before it is complete: on the same disk."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def publish(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Complete the checkpoint that was written to `place_partial(checkpoint)`, and give it its name.

    Its files and the manifest that lists them are on the disk before it has the name. What has the name already is set
    aside.

    Raises:
        OSError: the disk is full, or cannot be written to; the name is not given.
    """
    partial = place_partial(checkpoint)
    files = {}
    for path in _list_files(partial):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(partial).as_posix()] = (path.stat().st_size, digest)
    content = {"format": _FORMAT} | asdict(Manifest(read_step(checkpoint), facts, files))
    text = json.dumps(content | {"sha256": _hash(content)}, indent=1)
    (partial / MANIFEST_NAME).write_text(text, encoding="utf-8")
    publish_folder(partial, checkpoint, displace=set_aside)


def read_manifest(checkpoint: Path) -> Manifest:
    """Return what a checkpoint says it holds, after a look at the sizes of its files.

    Raises:
        CheckpointError: it has no manifest, or a file is missing or of another size.
    """
    try:
        content = json.loads((checkpoint / MANIFEST_NAME).read_text(encoding="utf-8"))
        if content.get("format") != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, found {content.get('format')}")
        if content.pop("sha256") != _hash(content):
            raise ValueError("its content is not what was saved (SHA-256)")
        manifest = Manifest(content["step"], content["facts"], {k: tuple(v) for k, v in content["files"].items()})
    except FileNotFoundError:
        raise CheckpointError(
            f"no {MANIFEST_NAME}: it was not written to its end, or not by lorashard finetune", where=checkpoint
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"damaged: {error}", where=checkpoint / MANIFEST_NAME) from error
    for name, (size, _) in manifest.files.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise CheckpointError(
                "damaged", expected=f"{size} bytes", found="no file" if found is None else found, where=path
            )
    return manifest


def verify(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest after reading all of its files.

    Raises:
        CheckpointError: a file is not what was saved; it is named.
    """
    manifest = read_manifest(checkpoint)
    for name, (_, digest) in manifest.files.items():
        with (checkpoint / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise CheckpointError("damaged: its content is not what was saved (SHA-256)", where=checkpoint / name)
    return manifest


def find_newest(run: Path) -> Path | None:
    """Return a run's newest checkpoint that is complete as far as the sizes of its files tell."""
    for checkpoint in list_checkpoints(run):
        try:
            read_manifest(checkpoint)
            return checkpoint
        except CheckpointError:
            continue
    return None


def rotate(published: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beside one that was just published until `limit` are left.

    Args:
        published: complete; it stays and counts.
        limit: at least 1; None keeps all.
        best: the checkpoint of the best evaluation, which stays and counts.
    """
    if limit is None:
        return
    checkpoints = list_checkpoints(published.parent)
    kept = {published, *(path for path in checkpoints if best and path.name == Path(best).name)}
    for checkpoint in checkpoints:
        if len(kept) < limit:
            kept.add(checkpoint)
    for checkpoint in reversed(checkpoints):
        if checkpoint not in kept:
            delete(checkpoint)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; a kill in the middle leaves nothing that has its name."""
    going = checkpoint.with_name(f".{checkpoint.name}.deleted")
    shutil.rmtree(going, ignore_errors=True)
    os.rename(checkpoint, going)
    shutil.rmtree(going)


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that its run continues without, so that no later resume takes it; return its new place."""
    place = checkpoint.with_name(f"set-aside-{checkpoint.name}")
    number = 1
    while place.exists():
        number += 1
        place = checkpoint.with_name(f"set-aside-{number}-{checkpoint.name}")
    os.rename(checkpoint, place)
    return place


def clear_leftovers(run: Path) -> None:
    """Remove what a killed process was writing or deleting. No other process may be at work in the run's folder."""
    for pattern in (".checkpoint-*.partial", ".checkpoint-*.deleted", ".adapter.partial"):
        for path in run.glob(pattern):
            shutil.rmtree(path)


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
