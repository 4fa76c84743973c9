"""events.jsonl: what happens in a run, a line an event, for the web UI, scripts and tests; sentences are made here.

Every process of a run appends to it: `time` (seconds of the epoch), `kind`, `rank` (null: the launcher), `step` where
the event belongs to one, and the fields of its kind. docs/reliability.md lists the kinds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..runtime.disk import PatientFiles

EVENTS_NAME = "events.jsonl"

# What a person is shown of an event; kinds that are not here are for files alone.
_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "disk_refused": (
        "{path} cannot be written ({reason}): the run continues, and this is written when it can be".format_map
    ),
    "disk_accepted": lambda fields: (
        f"the run's files can be written again: {fields['num_lines']} lines that waited are there"
        + (f"; {fields['num_lost']} older ones were more than are kept, and are lost" if fields["num_lost"] else "")
    ),
    "checkpoint_failed": "{checkpoint} was not written: {problem}. The next save is tried as usual".format_map,
    "checkpoint_requested": "{path} was asked for ({signal}), and is complete".format_map,
    "checkpoint_skipped": "{checkpoint} is skipped: {problem}".format_map,
    "checkpoint_set_aside": "{checkpoint} is not resumed from: it is now {renamed}".format_map,
    "end_not_written": "{path} does not record that the run has ended: {reason}".format_map,
    "resumed": "resuming from {checkpoint}, step {step}".format_map,
}


class EventLog:
    """Appends events to a run's folder and shows the person those that have a sentence.

    Ranks: local.

    Attributes:
        files: writes the run's other files too; what a disk refuses of them is an event.
    """

    def __init__(self, folder: Path, rank: int | None, show: Callable[[str], None]) -> None:
        """Prepare; nothing is written yet.

        Args:
            rank: this process's; None: the launcher.
            show: shows the person a sentence.
        """
        self._path = folder / EVENTS_NAME
        self._rank = rank
        self._show = show
        self.files = PatientFiles(self.emit)

    def emit(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        """Record an event.

        Args:
            step: the optimizer step that it belongs to.
            **fields: those of its kind; values that JSON has.
        """
        event = {"time": time.time(), "kind": kind, "rank": self._rank}
        if step is not None:
            event["step"] = step
        if kind in _SENTENCES:
            self._show(_SENTENCES[kind](event | fields))
        self.files.append(self._path, to_json_line(event | fields))


def describe_event(kind: str, fields: Mapping[str, Any]) -> str:
    """Return the sentence that a person is shown of an event; empty where there is none."""
    return _SENTENCES[kind](fields) if kind in _SENTENCES else ""


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a folder's run, oldest first, without those of an earlier run in the same folder."""
    try:
        lines = (folder / EVENTS_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    events: list[dict[str, Any]] = []
    for line in lines:
        try:
            add_event(events, json.loads(line))
        except (ValueError, KeyError, TypeError):  # half a line
            continue
    return events


def add_event(events: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Add an event to the others. A `start` removes those before it that are not this run's any more.

    A new run takes over what has happened since its process began; a resumed one also what was up to its checkpoint.
    """
    if event["kind"] == "start":
        resumed_step, begin_s = event.get("resumed_step"), event.get("begin_s", event["time"])
        events[:] = [
            one
            for one in events
            if one["time"] >= begin_s
            or (resumed_step is not None and (one.get("step") is None or one["step"] <= resumed_step))
        ]
    events.append(event)


def to_json_line(fields: Mapping[str, Any]) -> str:
    """Return fields as JSON, which has no NaN: they become the words that `float` reads."""
    return json.dumps({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()})
