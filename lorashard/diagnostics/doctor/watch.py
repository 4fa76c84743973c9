"""How a rank leaves a collective that never ends: by ending its process, after one rank has reported why."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from ...errors import LorashardError
from ...runtime.launch_env import LauncherEnv
from ...runtime.rank_store import ROLL_CALL, RankStore
from ..checks import Check, explain_error

_INTERVAL_S = 0.2
_LAST_RESORT_S = 15
_ROLL_CALL_S = 3
_REPORTED = "reported"


@dataclass(frozen=True)
class _Step:
    name: str
    fix: str
    timeout_s: int
    deadline_s: float


class Watch(threading.Thread):
    """Ends this process when a step takes too long, fails, or fails on another rank; one of the ranks reports why.

    There is no other way to leave a collective in which a rank does not take part.
    """

    def __init__(self, env: LauncherEnv | None, timeout_s: int, report: Callable[[Check], None]) -> None:
        """Connect to the launcher's store.

        Args:
            env: None for a process without a launcher, which has no other rank to wait for.
            timeout_s: how long the store may take to answer.
            report: prints the check that failed.
        """
        super().__init__(daemon=True)
        self._env = env
        self._report = report
        self._store = None if env is None else RankStore.of_launch(env, timeout_s)
        self._ending = threading.Lock()
        self._step: _Step | None = None
        self.start()

    @contextmanager
    def step(self, name: str, fix: str, timeout_s: int) -> Iterator[None]:
        """Limit the time of a step that every rank takes.

        Args:
            name: of the check that fails with the step.
            fix: what to do then.
        """
        # Where native code hangs with the interpreter's lock held, only this timer in C still runs.
        faulthandler.dump_traceback_later(timeout_s + _LAST_RESORT_S, exit=True)
        if self._store:
            self._store.note(name)
        self._step = _Step(name, fix, timeout_s, time.monotonic() + timeout_s)
        try:
            yield
        except Exception as error:  # any error is a finding
            # lorashard's own errors say what to do.
            own_fix = None if isinstance(error, LorashardError) else fix
            self._end(Check.failed(name, f"rank {self._rank}: {explain_error(error)}", own_fix), is_own=True)
        finally:
            self._step = None
            faulthandler.cancel_dump_traceback_later()

    def run(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            step = self._step
            if step is None:
                continue
            check = self._find_trouble(step)
            if check is not None:
                self._end(check)

    def _find_trouble(self, step: _Step) -> Check | None:
        is_late = time.monotonic() > step.deadline_s
        try:
            failure = self._store.read_failure() if self._store else None
            if failure is not None:
                return Check(**json.loads(failure))
            if self._store and self._store.is_roll_called():
                self._store.note(ROLL_CALL)
            return Check.failed(step.name, self._explain_wait(step), step.fix) if is_late else None
        except RuntimeError as error:  # the store is gone with the rank that hosted it, which may have finished
            found = f"the launcher's store is gone: {explain_error(error)}"
            return Check.failed(step.name, found, step.fix) if is_late else None

    @property
    def _rank(self) -> int:
        return self._env.rank if self._env else 0

    def _explain_wait(self, step: _Step) -> str:
        if absent := self._store.find_absent(step.name) if self._store else []:
            return f"{_name_ranks(absent)} did not answer within {step.timeout_s} s: stopped, stuck, or still starting"
        if stopped := self._find_stopped():
            return f"{_name_ranks(stopped)} began it and then stopped: it did not end within {step.timeout_s} s"
        return f"all ranks are there, but it did not end within {step.timeout_s} s"

    def _find_stopped(self) -> list[int]:
        """Return the ranks whose processes do not run: in all others this thread answers."""
        if self._store is None:
            return []
        self._store.call_roll()
        self._store.note(ROLL_CALL)
        until_s = time.monotonic() + _ROLL_CALL_S
        while (stopped := self._store.find_absent(ROLL_CALL)) and time.monotonic() < until_s:
            time.sleep(_INTERVAL_S)
        return stopped

    def _end(self, check: Check, is_own: bool = False) -> NoReturn:
        self._ending.acquire()  # and never release: the first of this thread and the main one ends the process
        faulthandler.dump_traceback_later(_LAST_RESORT_S, exit=True)
        try:
            if self._is_reporter(check if is_own else None):
                self._report(check)
                if self._store:
                    self._store.note(_REPORTED)
            else:
                self._wait_for_report()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _is_reporter(self, own: Check | None) -> bool:
        """Agree with the other ranks that end on the one that reports, the lowest if it can."""
        if self._store is None:
            return True
        try:
            if own:
                self._store.leave_failure(json.dumps(own.to_json()))
            time.sleep(_INTERVAL_S * min(self._rank, 5))
            return self._store.claim()
        except RuntimeError:  # the store is gone with the rank that hosted it
            return True

    def _wait_for_report(self) -> None:
        """Stay until a rank has reported: the launcher ends all ranks when the first is gone."""
        assert self._store is not None and self._env is not None
        until_s = time.monotonic() + _LAST_RESORT_S / 2
        while time.monotonic() < until_s and len(self._store.find_absent(_REPORTED)) == self._env.world_size:
            time.sleep(_INTERVAL_S)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
