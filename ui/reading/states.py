"""Whether a run waits, lives, has ended or has died: what its folder says against who is there."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorashard.runs.checkpoints import find_newest
from lorashard.runs.lock import Owner, find_owner
from lorashard.runs.root import JOB_STOP_NAME, is_job

from .jsonl_tail import read_end, read_json
from .process_file import PROCESS_NAME, Launch, read_launch
from .sanitize import show_safely
from .series import to_finite, to_whole

STATUS_NAME = "status.json"
EXIT_NAME = "exit.json"
ASKED_NAME = "asked.yaml"
STOP_NAME = ".stop"
STOP_NOW = "now"  # in it, where nothing is to be saved
LAUNCHER_LOG = Path("logs", "launcher.log")
_LOG_BYTES = 1 << 14  # at the end of a log, in which its last word is
LIVE_STATES = ("queued", "starting", "running", "stopping")

_ENDS = ("done", "failed", "stopped")
_STARTS = ("", "start", "download", "tokenize", "load")
_GRACE_S = 30.0  # between the wish for a run and its process
_FILE_CLOCK_S = 0.1  # by so much the time of a file may lag behind the clock
# Saved and stopped; ended at once by SIGHUP, SIGINT, SIGQUIT, SIGTERM, which people and schedulers send.
_STOPPED_EXIT_CODES = (75, 129, 130, 131, 143)


@dataclass(frozen=True)
class State:
    """How a run is.

    Attributes:
        name: queued, starting, running, stopping, done, stopped, failed or dead.
        phase: what status.json says, `queue` to `save`; that in which it ended or was last heard of.
        error: why it failed, was stopped or is taken for dead.
        status: status.json.
        failure: what status.json says of that end (`runtime.failures.Failure.to_json`); empty where it does not.
        update_s: when it was last heard of; None: never.
    """

    name: str
    phase: str
    error: str | None
    status: dict[str, Any]
    failure: Mapping[str, Any]
    owner: Owner | None
    begin_s: float | None
    update_s: float | None

    @property
    def is_live(self) -> bool:
        return self.name in LIVE_STATES


def find_state(folder: Path, now_s: float | None = None) -> State:
    """Return how the run of a folder is."""
    now_s = time.time() if now_s is None else now_s
    status = read_json(folder / STATUS_NAME)
    owner = find_run_owner(folder)
    launch = read_launch(folder / PROCESS_NAME, folder / EXIT_NAME)
    begins = [to_finite(status.get("begin_s")), owner and owner.begin_s, None if launch.is_over else launch.begin_s]
    begin_s = max((at for at in begins if at), default=None) or _read_begin(folder)  # a resumed run's are several
    updates = [to_finite(status.get("time")), _read_time(folder / "metrics.jsonl")]
    update_s = max((at for at in updates if at is not None), default=None)
    phase = str(status.get("phase") or "")
    name, error = _judge(folder, status, phase, owner, launch, now_s)
    if name in LIVE_STATES and name != "stopping" and phase in ("", *_ENDS):
        phase = "start"
    failure = status.get("failure") if error is not None and error == status.get("error") else None
    error = error and show_safely(error)
    return State(name, phase, error, status, failure or {}, owner, begin_s, update_s)


def find_run_owner(folder: Path) -> Owner | None:
    """Return who owns a run's folder; a job is its sweep's, whose processes train it."""
    return find_owner(folder) or (find_owner(folder.parent) if is_job(folder) else None)


def _judge(
    folder: Path, status: dict[str, Any], phase: str, owner: Owner | None, launch: Launch, now_s: float
) -> tuple[str, str | None]:
    said_s = to_finite(status.get("time")) or 0.0
    error = status.get("error") and str(status["error"])
    begin_s = launch.begin_s if owner is None else owner.begin_s or 0.0
    is_of_this_start = said_s >= begin_s
    if owner is not None or not launch.is_over:
        if phase in _ENDS and is_job(folder) and (is_of_this_start or phase == "done"):
            return phase, error  # while other jobs of the sweep go on
        if phase in _ENDS and is_of_this_start:
            # Its processes still leave, and hold folder and devices until then. What a rank has said may be only what
            # came of another's end: the launcher says in the end who was to blame.
            return "stopping", None
        is_asked = _is_asked_to_stop(folder, begin_s) or (is_job(folder) and (folder / JOB_STOP_NAME).exists())
        if is_asked or (owner is None and is_of_this_start):
            return "stopping", None
        if phase == "queue" and is_of_this_start:
            return "queued", None
        return ("running" if is_of_this_start and phase not in _STARTS else "starting"), None
    exit_code, exit_s = _read_exit(folder)
    asked_s = _read_time(folder / ASKED_NAME) or 0.0
    if not launch.begin_s and not status and exit_code is None and now_s - asked_s < _GRACE_S:
        return "starting", None
    if exit_code is None or exit_s < said_s:
        if phase in _ENDS and is_of_this_start:
            return phase, error
        return "dead", _explain_death(folder, status, phase, said_s, "the machine or the run's process died")
    if phase in _ENDS and is_of_this_start and _agrees(phase, exit_code):
        return phase, error
    return _judge_exit(folder, exit_code, (status, phase, said_s))


def _agrees(phase: str, exit_code: int | None) -> bool:
    """Tell whether a run that says how it ended does so with this exit code."""
    if phase == "done":
        return exit_code == 0
    return exit_code in _STOPPED_EXIT_CODES if phase == "stopped" else exit_code != 0


def _judge_exit(folder: Path, exit_code: int, said: tuple[dict[str, Any], str, float]) -> tuple[str, str | None]:
    if exit_code == 0:
        return "done", None
    last_word = explain_exit(folder)
    if exit_code in _STOPPED_EXIT_CODES:
        return "stopped", last_word or f"it was stopped (exit code {exit_code})"
    if exit_code > 128:
        name = _name_signal(exit_code - 128)
        hint = " (out of memory? The kernel's log tells)" if name == "SIGKILL" else ""
        return "dead", _explain_death(folder, *said, f"the run's process was ended by {name}{hint}")
    return "failed", last_word or f"it ended with exit code {exit_code}"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_failure(folder: Path) -> dict[str, Any]:
    """Return the failure that the launcher reported last, as `lorashard.runtime.failures.Failure`; empty without."""
    failure = read_json(folder / EXIT_NAME).get("failure")
    return failure if isinstance(failure, dict) else {}


def explain_exit(folder: Path) -> str | None:
    """Return why the launcher ended, else the last line of its log."""
    message = read_failure(folder).get("message")
    if message:
        return str(message)
    text = read_end(folder / LAUNCHER_LOG, _LOG_BYTES).decode("utf-8", "replace")
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return lines[-1] if lines else None


def explain_resume(folder: Path) -> str:
    """Say from where the run of a folder can be resumed."""
    newest = find_newest(folder)
    if newest is None:
        return "there is no complete checkpoint, so it begins anew when it is resumed"
    return f"resume resumes from {newest.name}"


def _explain_death(folder: Path, status: dict[str, Any], phase: str, said_s: float, cause: str) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said_s)) if said_s else "a time that is not known"
    step = f" at step {status['step']}" if status.get("step") else ""
    where = f", in phase {phase}{step}" if phase else ""
    return f"{cause}; it was last heard of at {at}{where}, and said nothing of an end: {explain_resume(folder)}"


def is_ended_at_once(folder: Path) -> bool:
    """Tell whether a run that is asked to stop is to end without saving."""
    try:
        return (folder / STOP_NAME).read_text(encoding="utf-8", errors="replace") == STOP_NOW
    except OSError:
        return False


def _is_asked_to_stop(folder: Path, begin_s: float) -> bool:
    asked_s = _read_time(folder / STOP_NAME)
    return asked_s is not None and asked_s >= begin_s - _FILE_CLOCK_S


def _read_exit(folder: Path) -> tuple[int | None, float]:
    said = read_json(folder / EXIT_NAME)
    code, at = to_whole(said.get("exit_code")), to_finite(said.get("time"))
    return code, at or _read_time(folder / EXIT_NAME) or 0.0


def _read_begin(folder: Path) -> float | None:
    """Return when a run was started that does not say so: it has left its versions then, or was asked for."""
    return _read_time(folder / "versions.json") or _read_time(folder / ASKED_NAME)


def _read_time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
