"""A run's checkpoints, and whether they are whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorashard.errors import CheckpointError
from lorashard.runs.checkpoints import read_manifest, read_step

from .summaries import measure_size


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint.

    Attributes:
        problem: why it cannot be resumed from, as far as the sizes of its files tell; None if it is whole.
    """

    name: str
    step: int
    time_s: float
    size_bytes: int
    problem: str | None


def describe_checkpoints(checkpoints: Sequence[Path]) -> list[CheckpointRow]:
    """Return what there is to say of the checkpoint folders of a run."""
    rows = []
    for checkpoint in checkpoints:
        try:
            time_s = checkpoint.stat().st_mtime
        except OSError:  # it has just been rotated away
            continue
        rows.append(
            CheckpointRow(
                checkpoint.name, read_step(checkpoint), time_s, measure_size(checkpoint), find_problem(checkpoint)
            )
        )
    return rows


def find_problem(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not whole, as far as the sizes of its files tell; None if it is."""
    try:
        read_manifest(checkpoint)
    except CheckpointError as error:
        return str(error)
    return None
