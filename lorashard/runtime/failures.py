"""Why a rank failed: noted by the rank, read by the launcher, said in one line."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import warn
from .signals import STOPPED_EXIT_CODE, TERMINATED_EXIT_CODE
from .worker import find_log

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_NEAR_S = 5
# Nobody but the kernel, a person or a defect in native code does these to a rank: no other rank's failure is the cause.
_DEADLY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def record_failure(error: BaseException, exit_code: int, is_plain: bool, is_hang: bool = False) -> None:
    """Leave an error where the launcher looks for it: torch's elastic launcher, torchrun and accelerate know the form.

    Args:
        is_plain: Whether its message is all that a person needs.
        is_hang: Whether another rank gives no sign of life, which is no mistake: starting again may help.

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
        "is_hang": is_hang,
    }
    message = {"message": {"message": f"{name}: {error}" if str(error) else name, "extraInfo": details}}
    with suppress(OSError):  # a full disk: the launcher then goes by the exit code and the log
        Path(path).write_text(json.dumps(message), encoding="utf-8")


@dataclass(frozen=True)
class Failure:
    """Why a run ended early, for the user.

    `log` is that of the rank to blame. `is_stop` if a person stopped it; `is_crash` if it was neither that, nor a
    mistake, nor anything else that a rank found out and said plainly: what happens once need not happen twice.
    """

    exit_code: int
    message: str
    log: Path | None = None
    is_stop: bool = False
    is_crash: bool = False

    def tell(self, more: str = "") -> None:
        """Say it on stderr, and in the log of the rank to blame.

        Args:
            more: Joins the sentence's end.
        """
        if self.log is not None:
            with suppress(OSError), self.log.open("a", encoding="utf-8") as file:  # its disk may be full
                file.write(f"lorashard: {self.message}{more}\n")
        warn(f"{self.message}{more}")


def explain_failures(failures: Mapping[int, ProcessFailure], logs_dir: Path) -> Failure:
    """Find the rank that failed first among all that did: the others may have failed because it was gone.

    Args:
        failures: By rank, in the order in which they were noticed.
    """
    rank, failure = _find_first(failures)
    log = find_log(logs_dir, rank)
    details = _read_details(failure)
    killer = signal.SIGTERM if failure.exitcode == TERMINATED_EXIT_CODE else -failure.exitcode
    if killer > 0 and not details:
        name = signal.Signals(killer).name
        hint = ": out of memory? The kernel's log (dmesg) tells" if killer == signal.SIGKILL else ""
        return Failure(1, f"error: rank {rank} was killed by {name}{hint} (log: {log})", log, is_crash=True)
    if STOPPED_EXIT_CODE in (failure.exitcode, details.get("exit_code")):
        return Failure(STOPPED_EXIT_CODE, details.get("user_error") or "stopped as asked", log, is_stop=True)
    if details.get("is_hang"):
        return Failure(1, f"error: {details['user_error']}", log, is_crash=True)
    # One that had said why was on its way out when the launcher ended the others.
    if failure.exitcode == 2 or details.get("user_error"):
        reason = details.get("user_error") or _read_last_line(log).removeprefix("lorashard: error: ")
        on_rank = "" if rank == 0 else f" (rank {rank}, log: {log})"
        return Failure(details.get("exit_code", 2), f"error: {reason}{on_rank}", log)
    reason = details.get("error") or _read_last_line(log) or "it said nothing"
    message = f"error: rank {rank} failed: {reason} (exit code {failure.exitcode}, log: {log})"
    return Failure(1, message, log, is_crash=True)


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
    return Failure(128 + number, f"stopped by {number.name}, all ranks have ended", is_stop=True)
