"""What a run has answered to its sample prompts: samples.jsonl, read as it grows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jsonl_tail import JsonLines
from .series import to_finite

_MOST_SAMPLES = 5000


@dataclass(frozen=True)
class Sample:
    """An answer to a prompt, by the adapter as it was after a step."""

    step: int
    prompt: str
    completion: str


class Samples:
    """Reads samples.jsonl. Of very many, the last ones are kept."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)

    def read(self) -> list[Sample]:
        """Return all, in the order of the steps."""
        rows = self._lines.read()
        if self._lines.was_replaced:
            self._samples.clear()
        for row in rows:
            step = to_finite(row.get("step"))
            if step is not None:
                self._samples.append(Sample(int(step), _to_text(row.get("prompt")), _to_text(row.get("completion"))))
        return list(self._samples)


def _to_text(value: Any) -> str:
    """Return a text, or the turns of a conversation a line each."""
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict)]
        return "\n".join(f"{turn.get('role', '')}: {turn.get('content', '')}" for turn in turns)
    return "" if value is None else str(value)
