"""The demo's data and tokenizer on a base that is small."""

from __future__ import annotations

import shutil
from pathlib import Path

from helpers.bases import write_small_base
from helpers.paths import DEMO


def copy_small_demo(folder: Path) -> Path:
    """Copy the demo's files, with a seeded float32 base of two layers in place of its own; its answers mean nothing."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.py", "base"))
    write_small_base(folder / "base", ends_early=False)  # an empty answer ends a conversation
    return folder
