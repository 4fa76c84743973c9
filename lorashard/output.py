"""What a command says: progress on stderr, its result on stdout, once, however many ranks there are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT_FILE_VARIABLE = "LORASHARD_RESULT_FILE"


def say(rank: int, line: str) -> None:
    """Tell the person how it goes; rank 0 speaks."""
    if rank == 0:
        print(f"lorashard: {line}", file=sys.stderr, flush=True)


def give(rank: int, result: Mapping[str, Any], text: str, as_json: bool) -> None:
    """Give a command's result: as text, or as JSON and nothing else on stdout; rank 0's counts.

    Ranks of lorashard's own launcher write into logs, so the launcher is handed what it shall print.
    """
    if rank != 0:
        return
    shown = json.dumps(result, indent=1) if as_json else text
    file = os.environ.get(RESULT_FILE_VARIABLE)
    if file:
        Path(file).write_text(shown + "\n", encoding="utf-8")
    else:
        print(shown, flush=True)
