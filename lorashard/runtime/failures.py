"""Why a rank failed: noted by the rank, read by the launcher, said in one line."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import LorashardError, RunStopped, TrainingError, UserError
from .disk import find_fault
from .output import warn
from .signals import STOPPED_EXIT_CODE, TERMINATED_EXIT_CODE
from .worker import find_log

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Of the environment: a file that gets why this command has failed, for a program that started it.
FAILURE_FILE_VARIABLE = "LORASHARD_FAILURE_FILE"

_NEAR_S = 5
# Nobody but the kernel, a person or a defect in native code does these to a rank: no other rank's failure is the cause.
_DEADLY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


Cause = Literal["stop", "mistake", "memory", "disk", "nonfinite", "hang", "killed", "crash"]


def find_cause(error: BaseException) -> Cause:
    """Return what kind of end an error is, also where it was raised from another one that says so."""
    is_mistake = isinstance(error, UserError)
    while True:
        if isinstance(error, (RunStopped, KeyboardInterrupt)):
            return "stop"
        if isinstance(error, TrainingError):
            return "nonfinite"
        if find_fault(error) is not None:
            return "disk"
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without torch
            return "memory"
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):  # torch's for host memory
            return "memory"
        if error.__cause__ is None:
            return "mistake" if is_mistake or isinstance(error, UserError) else "crash"
        error = error.__cause__


def record_failure(error: BaseException, exit_code: int, is_plain: bool, silent_rank: int | None = None) -> None:
    """Leave an error where the launcher looks for it: torch's elastic launcher, torchrun and accelerate know the form.

    Args:
        is_plain: whether its message is all that a person needs.
        silent_rank: another rank whose heartbeat has stopped, which is no mistake: starting again may help.

    Torch's own writer knows only whole seconds, too coarse to tell which of two ranks failed first.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    name = type(error).__name__
    details = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
        "time_s": time.time(),
        "exit_code": exit_code,
        "user_error": str(error) if is_plain else None,
        "cause": find_cause(error) if silent_rank is None else "hang",
        "silent_rank": silent_rank,
        "fields": error.to_json() if isinstance(error, LorashardError) else None,
    }
    message = {"message": {"message": f"{name}: {error}" if str(error) else name, "extraInfo": details}}
    with suppress(OSError):  # a full disk: the launcher then goes by the exit code and the log
        Path(path).write_text(json.dumps(message), encoding="utf-8")


@dataclass(frozen=True)
class Failure:
    """Why a run ended early.

    Attributes:
        message: for a person, in one sentence.
        cause: what kind of end it is.
        rank: the rank to blame; None: all alike, or nobody knows.
        log: that rank's.
        fields: of the error (`LorashardError.to_json`), where it has some.
        is_crash: whether it was neither a stop, nor a mistake, nor anything else that a rank found out and said
            plainly: what happens once need not happen twice.
    """

    exit_code: int
    message: str
    cause: Cause
    rank: int | None = None
    log: Path | None = None
    fields: dict[str, Any] | None = None
    is_crash: bool = False

    @classmethod
    def of_error(cls, error: BaseException) -> Failure:
        """Describe what ends this process."""
        cause = find_cause(error)
        if isinstance(error, KeyboardInterrupt):
            message = "stopped by SIGINT"
        elif isinstance(error, (RunStopped, UserError)):
            message = str(error)
        else:
            message = f"{type(error).__name__}: {error}"
        fields = error.to_json() if isinstance(error, LorashardError) else None
        exit_code = {"stop": STOPPED_EXIT_CODE, "mistake": 2}.get(cause, 1)
        return cls(exit_code, message, cause, rank=getattr(error, "rank", None), fields=fields)

    @property
    def is_stop(self) -> bool:
        """Whether it was asked for."""
        return self.cause == "stop"

    def with_signal(self, number: signal.Signals) -> Failure:
        """Return a stop as that of another signal, which the launcher got and passed on as one of its own."""
        if self.fields is None:  # its disk was full: nobody knows more
            return replace(self, message=f"stopped by {number.name}")
        fields = dict(self.fields, signal=number.name)
        return replace(self, message=str(RunStopped.of_json(fields)), fields=fields)

    def to_json(self) -> dict[str, Any]:
        """Return what status.json and events.jsonl keep of it."""
        return {"message": self.message, "cause": self.cause, "rank": self.rank, "fields": self.fields}

    def write(self) -> None:
        """Write it to the file that the program which started this one has named."""
        path = os.environ.get(FAILURE_FILE_VARIABLE)
        if path:
            with suppress(OSError):  # the log and the exit code are still there
                Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    def report(self, more: str = "") -> None:
        """Print it on stderr, and into the log of the rank to blame; write it for who started this program.

        Args:
            more: joins the sentence's end.
        """
        self.write()
        line = f"{'' if self.is_stop else 'error: '}{self.message}{more}"
        if self.log is not None:
            with suppress(OSError), self.log.open("a", encoding="utf-8") as file:  # its disk may be full
                file.write(f"lorashard: {line}\n")
        warn(line)


def explain_failures(failures: Mapping[int, ProcessFailure], logs_dir: Path) -> Failure:
    """Find the rank that failed first among all that did: the others may have failed because it was gone.

    Args:
        failures: By rank, in the order in which they were noticed.
    """
    rank, failure = _find_first(failures)
    log = find_log(logs_dir, rank)
    details = _read_details(failure)
    killer = signal.SIGTERM if failure.exitcode == TERMINATED_EXIT_CODE else -failure.exitcode
    blamed: dict[str, Any] = {"rank": rank, "log": log, "fields": details.get("fields")}
    if killer > 0 and not details:
        name = signal.Signals(killer).name
        hint = ": out of memory? The kernel's log (dmesg) tells" if killer == signal.SIGKILL else ""
        message = f"rank {rank} was killed by {name}{hint} (log: {log})"
        return Failure(1, message, "killed", **blamed, is_crash=True)
    if STOPPED_EXIT_CODE in (failure.exitcode, details.get("exit_code")):
        return Failure(STOPPED_EXIT_CODE, details.get("user_error") or "stopped as asked", "stop", **blamed)
    cause = details.get("cause", "crash")
    if cause == "hang":
        return Failure(1, details["user_error"], cause, **blamed | {"rank": details["silent_rank"]}, is_crash=True)
    # One that had said why was on its way out when the launcher ended the others.
    if failure.exitcode == 2 or details.get("user_error"):
        reason = details.get("user_error") or _read_last_line(log).removeprefix("lorashard: error: ")
        on_rank = "" if rank == 0 else f" (rank {rank}, log: {log})"
        is_of_all = sum(bool(_read_details(one).get("user_error")) for one in failures.values()) > 1
        fields = details.get("fields") or {}
        blamed["rank"] = fields.get("rank") if is_of_all or cause == "nonfinite" else rank
        return Failure(details.get("exit_code", 2), f"{reason}{on_rank}", details.get("cause", "mistake"), **blamed)
    reason = details.get("error") or _read_last_line(log) or "it said nothing"
    message = f"rank {rank} failed: {reason} (exit code {failure.exitcode}, log: {log})"
    return Failure(1, message, cause, **blamed, is_crash=True)


def _find_first(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    first_noticed = next(iter(failures.values()))
    for rank, failure in failures.items():
        # Much later, SIGKILL is the launcher's own, for a rank that outlived its grace.
        is_near = failure.timestamp - first_noticed.timestamp <= _NEAR_S
        if is_near and -failure.exitcode in _DEADLY_SIGNALS:
            return rank, failure
    recorded = [rank for rank, failure in failures.items() if _read_details(failure).get("time_s")]
    if not recorded:
        return next(iter(failures.items()))
    rank = min(recorded, key=lambda rank: _read_details(failures[rank])["time_s"])
    return rank, failures[rank]


def _read_details(failure: ProcessFailure) -> dict[str, Any]:
    """Return what the rank noted, with `error` as its first line, or nothing."""
    message = failure.error_file_data["message"]
    if not isinstance(message, dict):
        return {}
    return message["extraInfo"] | {"error": message["message"].splitlines()[0]}


def _read_last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def explain_signal(number: signal.Signals) -> Failure:
    """Say that a signal to the launcher ended the run."""
    return Failure(128 + number, f"stopped by {number.name}, all ranks have ended", "stop")
