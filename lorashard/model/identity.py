"""What a file holds, told by its hash: taken once and remembered, since weights are large."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants


def find_cache_dir() -> Path:
    """Return the folder for what lorashard derives from models, beside the hub's own cache."""
    return Path(constants.HF_HOME) / "lorashard"


def hash_file(file: Path) -> str:
    """Return the sha256 of a file's content, in hex.

    The hub's cache names weight files so; others are read once, and again when path, size or time of change differ.
    """
    resolved = file.resolve()
    if resolved.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", resolved.name):
        return resolved.name
    status = resolved.stat()
    key = f"{resolved}:{status.st_size}:{status.st_mtime_ns}"
    known_file = find_cache_dir() / "hashes.json"
    known_file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(known_file.with_suffix(".lock")):  # so the ranks of a machine read a file once, not each
        known = json.loads(known_file.read_text(encoding="utf-8")) if known_file.exists() else {}
        if key not in known:
            with resolved.open("rb") as stream:
                known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
            partial = known_file.with_suffix(".partial")
            partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
            os.replace(partial, known_file)
    return known[key]
