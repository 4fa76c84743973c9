"""An alert, and what is looked at to find one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .checkpoints import CheckpointRow
from .ranks import RankLog
from .states import State


@dataclass(frozen=True)
class Alert:
    """Something that a person should know of a run.

    Attributes:
        kind: failed, stopped, dead, nan, stall, slow, disk, restart, memory, checkpoint or temperature.
        severity: `error` where the run has ended or learns nothing, `warning` where it may come to that, `info`.
        rank: whom it concerns; None: all, or nobody knows whom.
        sentence: what there is, why as far as can be known, and what to do.
        time: when, in seconds of the epoch, where that is known.
    """

    kind: str
    severity: Literal["error", "warning", "info"]
    rank: int | None
    step: int | None
    sentence: str
    time: float | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a run at a moment.

    Attributes:
        options: as resolved.
        rows: the last lines of metrics.jsonl.
        odd: of all lines, step, name and number of what was not finite, and of what was left out.
        update_s: when any of its files was last written to.
        free_bytes: on the disk of its folder; None where that cannot be asked.
        events: what events.jsonl holds of this run, oldest first.
        stopped_pids: processes of the run that a signal or a debugger has stopped.
    """

    folder: Path
    state: State
    now_s: float
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    odd: Sequence[tuple[int, str, float]] = ()
    update_s: float | None = None
    ranks: Mapping[int, RankLog] = field(default_factory=dict)
    planned_bytes: int | None = None
    checkpoints: Sequence[CheckpointRow] = ()
    free_bytes: int | None = None
    events: Sequence[Mapping[str, Any]] = ()
    stopped_pids: Sequence[int] = ()
