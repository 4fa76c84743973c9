"""What a file holds, told by its hash: taken once and remembered, since weights are large."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants

_logger = logging.getLogger(__name__)


def find_cache_dir() -> Path:
    """Return the folder for what lorashard derives from models, beside the hub's own cache."""
    return Path(constants.HF_HOME) / "lorashard"


def hash_file(file: Path) -> str:
    """Return the sha256 of a file's content, in hex.

    The hub's cache names weight files so; others are read once, and again when anything that the system says of them
    differs: sizes and times of modification alone are the same for many checkpoints.
    """
    resolved = file.resolve()
    if resolved.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", resolved.name):
        return resolved.name
    status = resolved.stat()
    facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    key = ":".join(map(str, (resolved, *facts)))
    known_file = find_cache_dir() / "hashes.json"
    try:
        known_file.parent.mkdir(parents=True, exist_ok=True)
        return _remember(known_file, key, resolved)
    except PermissionError as error:
        _logger.warning("%s cannot be written (%s), so %s is hashed each time", known_file, error.strerror, resolved)
        return _hash(resolved)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remember(known_file: Path, key: str, resolved: Path) -> str:
    with FileLock(known_file.with_suffix(".lock")):  # so the ranks of a machine read a file once, not each
        known = json.loads(known_file.read_text(encoding="utf-8")) if known_file.exists() else {}
        if key not in known:
            known[key] = _hash(resolved)
            partial = known_file.with_suffix(".partial")
            partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
            os.replace(partial, known_file)
    return known[key]
