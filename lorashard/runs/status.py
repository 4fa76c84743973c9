"""status.json: where a run stands, for whoever looks at its folder. Imports no torch: the launcher writes it too.

One process at a time writes it: who owns the folder until there are ranks and after them, rank 0 in between. A run that
says that it lives, in a folder that nobody owns (`lock.find_owner`), was killed.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ..runtime.disk import describe_fault, replace_text
from ..runtime.failures import Failure
from ..runtime.output import warn
from ..runtime.progress import Teller, show_amount
from .events import EventLog

Phase = Literal[
    "queue", "start", "download", "tokenize", "load", "train", "evaluate", "save", "done", "failed", "stopped"
]
_ENDS = ("done", "failed", "stopped")
_NAME = "status.json"
_WORDS = {
    "queue": "waiting for devices",
    "start": "starting",
    "download": "downloading",
    "tokenize": "tokenizing",
    "load": "loading",
    "evaluate": "evaluating",
    "save": "saving",
}
# Between two writes for progress alone: a second, or more where the disk is slow, for a step waits for them.
_INTERVAL_S = 1.0
_WRITE_SHARE = 0.01
_LONGEST_S = 30.0


class Status:
    """Where a run stands: its phase and step, how far the phase has come, and why it ended.

    Ranks: local. Every rank keeps one, for its own heartbeat; the one that has `events` writes it down.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        events: EventLog | None,
        show: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Begin to keep it.

        Args:
            events: of the process that writes it down; the run's end is one. None: of a rank that writes nothing.
            show: shows the person where the run stands; see `show_status`.
        """
        self._path = folder / _NAME
        self._show = show
        self._facts = {"begin_s": time.time()} | facts
        self._events = events
        self._files = events.files if events is not None else None
        self._next_s = -math.inf

    @classmethod
    def begin(cls, folder: Path) -> Status:
        """Begin a run's status: what the file says is of another run, or of an earlier start of this one."""
        status = cls(folder, {}, EventLog(folder, None, warn))
        status.enter("start")
        return status

    @classmethod
    def carry_on(
        cls, folder: Path, events: EventLog | None, show: Callable[[Mapping[str, Any]], None] | None = None
    ) -> Status:
        """Continue with what the owner of the folder, or the ranks before these, have written of this start."""
        return cls(folder, read_status(folder), events, show)

    @property
    def begin_s(self) -> float:
        """When this start of the run began."""
        return float(self._facts["begin_s"])

    @property
    def place(self) -> tuple[str, int | None]:
        """The phase, and the step that it belongs to, counted from 1."""
        phase, step = self._facts.get("phase", "start"), self._facts.get("step")
        if step is None or phase not in ("train", "evaluate", "save"):
            return phase, None
        return phase, step + 1 if phase == "train" else step

    def enter(self, phase: Phase, **facts: Any) -> None:
        """Say that the run has come to a phase.

        Args:
            **facts: what else is to be told from here on, such as `step`.
        """
        self._facts.pop("queue", None)
        self._facts |= {"phase": phase, "progress": None, "phase_begin_s": time.time(), "error": None} | facts
        self._show_person()
        self._write()

    def add(self, **facts: Any) -> None:
        """Tell more, in the same phase."""
        self._facts |= facts
        self._write()

    def advance(self, done: int, total: int | None, unit: str) -> None:
        """Say how far the phase has come; it is written once a second at most, and less often where that is slow.

        Args:
            unit: `bytes`, `rows`, `units`, `steps` or `batches`.
        """
        self._facts["progress"] = {"done": done, "total": total, "unit": unit}
        if unit == "steps":
            self._facts["step"] = done
        self._show_person()
        if time.monotonic() >= self._next_s:
            self._write()

    def end(self, phase: Phase, failure: Failure | None = None) -> None:
        """Record that the run is over.

        Args:
            failure: why it ended before its last step.
        """
        self._facts.pop("queue", None)
        described = None if failure is None else failure.to_json()
        self._facts |= {"phase": phase, "phase_begin_s": time.time(), "error": failure and failure.message}
        self._facts["failure"] = described
        self._show_person()
        if self._events is not None:
            self._events.emit("end", step=self._facts.get("step"), state=phase, failure=described)
        if self._files is not None:
            try:
                replace_text(self._path, self._to_json())
            except OSError as fault:
                assert self._events is not None
                reason = describe_fault(fault, self._path.parent)
                self._events.emit("end_not_written", path=str(self._path), reason=reason)

    def hear_ranks(self) -> None:
        """Take over what ranks have said since they were started."""
        said = read_status(self._path.parent)
        if said.get("begin_s") == self._facts["begin_s"]:
            self._facts = said

    def record_restart(self, failure: Failure, number: int, max_restarts: int) -> None:
        """Add to the `restarts` why the ranks are started again, for the how manieth time of how many."""
        self.hear_ranks()
        restart = {"number": number, "max_restarts": max_restarts, "failure": failure.to_json()}
        if self._events is not None:
            self._events.emit("restart", step=self._facts.get("step"), **restart)
        self.enter("start", restarts=[*self._facts.get("restarts", []), restart])

    def _show_person(self) -> None:
        if self._show is not None:
            self._show(self._facts)

    def _write(self) -> None:
        if self._files is None:
            return
        begin_s = time.monotonic()
        self._files.replace(self._path, self._to_json())
        end_s = time.monotonic()
        self._next_s = end_s + min(_LONGEST_S, max(_INTERVAL_S, (end_s - begin_s) / _WRITE_SHARE))

    def _to_json(self) -> str:
        return json.dumps(self._facts | {"pid": os.getpid(), "time": time.time()})


def show_status(facts: Mapping[str, Any], teller: Teller) -> None:
    """Show a person how far a run is, by what status.json says.

    Once it trains it is the steps that are shown; evaluations and saves are a note beside them.
    """
    phase, progress = facts.get("phase", "start"), facts.get("progress") or {}
    word = _WORDS.get(phase, phase)
    counts = progress.get("done", 0), progress.get("total"), progress.get("unit", "")
    if phase in _ENDS:
        teller.close()
    elif phase in ("train", "evaluate", "save") and facts.get("max_steps"):
        note = f"{word} {show_amount(*counts) if progress else ''}".rstrip() if phase != "train" else ""
        teller.show("training", facts.get("step") or 0, facts["max_steps"], "steps", note)
    else:
        teller.show(word, *counts)


@contextmanager
def told_status(folder: Path) -> Iterator[Status]:
    """Begin the status of a run whose folder this process owns; what ends the run here is its end there too."""
    status = Status.begin(folder)
    try:
        yield status
    except BaseException as error:
        status.hear_ranks()
        if status.place[0] not in _ENDS:
            failure = Failure.of_error(error)
            status.end("stopped" if failure.is_stop else "failed", failure)
        raise


def read_status(folder: Path, is_told: bool = True) -> dict[str, Any]:
    """Return what status.json says; nothing where there is none, or none that can be read.

    Args:
        is_told: whether the person is told that it cannot be read.
    """
    path = folder / _NAME
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError) as error:
        if is_told:
            warn(f"{path} cannot be read: {describe_fault(error, folder)}")
        return {}


def has_begun(folder: Path) -> bool:
    """Tell whether the run of a folder has come to its training, so that the checkpoints there are its own.

    A folder without status.json is that of a node whose disk rank 0 does not see, and counts as begun.
    """
    said = read_status(folder)
    return bool(said.get("has_begun", not said))
