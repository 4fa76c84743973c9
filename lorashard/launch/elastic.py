"""A group of ranks on this machine: started, shown, asked to stop, and ended together, whatever ends the run.

Torch's elastic launcher starts and watches the ranks. One rank is started the same way as many: it has a log too, and
its death by the kernel's hand is noticed and named.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil

from ..errors import RunStopped
from ..runtime.devices import RUN_ID_PREFIX
from ..runtime.failures import Failure, explain_failures, explain_signal
from ..runtime.importing import quick_imports
from ..runtime.progress import LiveBar
from ..runtime.signals import SAVE_SIGNAL, SPREAD_S, STOP_SIGNAL, STOPPED_EXIT_CODE
from ..runtime.worker import find_log, find_pids
from .log_mirror import LogMirror

GRACE_S = 15
_WATCH_INTERVAL_S = 0.1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last from a terminal that is gone
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Signals:
    """What the signals to a launcher ask for: a checkpoint, a checkpoint and the end, or the end of all ranks at once.

    Where ranks can save, SIGUSR2 asks for the first, and SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C for the second; the same
    again (but SIGUSR1, which schedulers may repeat), Ctrl-C after any of them, and SIGQUIT for the third. Where they
    cannot, all but SIGUSR1 and SIGUSR2 do so.

    Attributes:
        is_save_asked: whether a checkpoint is asked for, which nobody has told the ranks yet.
        end_signal: the first signal that asked for the end at once; None until one has.
    """

    def __init__(self, can_save: bool = False) -> None:
        self._can_save = can_save
        self._asked: list[signal.Signals] = []
        self.is_save_asked = False
        self.end_signal: signal.Signals | None = None

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The first signal that asked for a save and the end; None until one has."""
        return self._asked[0] if self._asked else None

    @contextmanager
    def before_ranks(self) -> Iterator[None]:
        """Let signals end what comes before ranks are started; a save that is asked for waits for them.

        Raises:
            RunStopped: One of them arrived.
            KeyboardInterrupt: Ctrl-C.
        """
        numbers = [signal.SIGTERM, signal.SIGQUIT, STOP_SIGNAL, *_find_hangup()]
        with (
            _handled([SAVE_SIGNAL], self._note),
            _handled([signal.SIGINT], signal.default_int_handler),
            _handled(numbers, self._stop_before_ranks),
        ):
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note signals instead of ending by them."""
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
        if self._can_save:
            numbers += [STOP_SIGNAL, SAVE_SIGNAL]
        with _handled([*numbers, *_find_hangup()], self._note):
            yield

    def _stop_before_ranks(self, number: int, frame: FrameType | None) -> None:
        raise RunStopped("no rank had been started, so nothing is lost", signal=signal.Signals(number).name)

    def _note(self, number: int, frame: FrameType | None) -> None:
        asked = signal.Signals(number)
        if asked == SAVE_SIGNAL:
            self.is_save_asked = True
            return
        is_first = asked not in self._asked and not (asked == signal.SIGINT and self._asked)
        asks_to_stop = asked == STOP_SIGNAL or (asked in _STOP_SIGNALS and is_first)
        if self._can_save and asks_to_stop:
            self._asked.append(asked)
        else:
            self.end_signal = self.end_signal or asked


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    logs_dir: Path,
    grace_s: int = GRACE_S,
    mirror: TextIO | None = None,
    signals: Signals | None = None,
    draw: Callable[[LiveBar], None] | None = None,
    cpus: Sequence[Sequence[int]] = (),
) -> Failure | None:
    """Run a command in each of several ranks, with torchrun's environment, until all are done or one fails.

    Each rank writes to `logs_dir/rank_K.log`; rank 0's log is copied to `mirror`, by default stdout, as it grows.
    No rank, nor a process that a rank started, is left when this returns; if this process is killed, the kernel kills
    the ranks (on Linux).

    Args:
        command: The program and its arguments.
        num_ranks: How many ranks, on this machine.
        logs_dir: An existing folder.
        grace_s: How long a rank may take to end after a signal before it is killed.
        signals: What signals to this process mean; by default they end all ranks.
        draw: Shows on a bar, where `mirror` is a terminal, how far the ranks are.
        cpus: The logical CPUs of each rank, as `choose_cpus` returns them; empty leaves all to each.

    Returns:
        None, or what ended the ranks early, which nobody has been told yet.
    """
    with quick_imports():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    signals = signals or Signals()
    # Older versions of torch wait 30 s.
    has_timeout = "shutdown_timeout" in [field.name for field in dataclasses.fields(LaunchConfig)]
    timeout: dict[str, Any] = {"shutdown_timeout": grace_s} if has_timeout else {}
    worker = ["lorashard.runtime.worker", str(os.getpid()), str(logs_dir), json.dumps(cpus)]
    words = [*find_python_flags(), "-m", *worker, *command]
    with (
        signals.watched(),
        tempfile.TemporaryDirectory(prefix="lorashard-notes-") as notes_dir,  # where the logs are, it may be full
        LogMirror(find_log(logs_dir, 0), mirror, draw) as shown,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            logs_specs=DefaultLogsSpecs(log_dir=notes_dir),
            run_id=f"{RUN_ID_PREFIX}{uuid.uuid4()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            **timeout,
        )
        try:
            # In a thread of its own elastic leaves signals alone: they are this module's.
            with _ended_children(), _quiet_logging(), ThreadPoolExecutor(1) as executor:
                # Elastic fills in `$` templates in arguments; `$$` is a plain one.
                elastic = executor.submit(
                    elastic_launch(config, sys.executable), *[word.replace("$", "$$") for word in words]
                )
                _watch(elastic, signals, Path(notes_dir), grace_s, shown.warn)
                elastic.result()
            return None
        except ChildFailedError as error:
            failure = explain_failures(error.failures, logs_dir)
    if failure.exit_code == STOPPED_EXIT_CODE and signals.stop_signal is not None:
        return failure.with_signal(signals.stop_signal)  # the ranks know only what they were sent
    return failure if signals.end_signal is None else explain_signal(signals.end_signal)


def find_python_flags() -> list[str]:
    """Return the flag that lets ranks import from where this process does, and not from the current folder too."""
    return [] if sys.path[0] in ("", os.getcwd()) else ["-P"]


def _watch(elastic: Future[Any], signals: Signals, notes_dir: Path, grace_s: int, tell: Callable[[str], None]) -> None:
    """Pass on to the ranks what signals ask for, until elastic is done with them.

    A rank that begins later than the signal gets it too.
    """
    asked: set[int] = set()
    ended: set[int] = set()
    is_said = False
    end_s = None
    stop_s = 0.0
    while not wait([elastic], timeout=_WATCH_INTERVAL_S).done:
        _continue_stopped(find_pids(notes_dir))
        if signals.end_signal is not None:
            end_s = end_s or time.monotonic() + grace_s
            is_late = time.monotonic() > end_s  # elastic ends the others once one has died: here none does
            _send(signal.SIGKILL if is_late else signal.SIGTERM, notes_dir, set() if is_late else ended)
        elif signals.stop_signal is not None:
            if not is_said:
                is_said = True
                stop_s = time.monotonic() + SPREAD_S
                _say_stop(signals.stop_signal, tell)
            if time.monotonic() > stop_s:
                _send(STOP_SIGNAL, notes_dir, asked)
        elif signals.is_save_asked and find_pids(notes_dir):
            # One rank is asked, and agrees with the others: of these one that heard late would save again a step later.
            signals.is_save_asked = False
            tell(f"{SAVE_SIGNAL.name}: saving a checkpoint at the end of the step, and continuing")
            _send(SAVE_SIGNAL, notes_dir, set(sorted(find_pids(notes_dir))[1:]))


def _continue_stopped(pids: Sequence[int]) -> None:
    """Let stopped ranks continue where another has ended, to hear elastic's SIGTERM: it would wait 30 s for them."""
    states = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            states[pid] = psutil.Process(pid).status()
    alive = [pid for pid, state in states.items() if state != psutil.STATUS_ZOMBIE]
    if len(alive) < len(pids):
        for pid in alive:
            if states[pid] == psutil.STATUS_STOPPED:
                os.kill(pid, signal.SIGCONT)


def _say_stop(number: signal.Signals, tell: Callable[[str], None]) -> None:
    again = "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C"
    tell(f"{number.name}: saving at the end of the step, and stopping then; {again} stops at once")


def _send(number: signal.Signals, notes_dir: Path, told: set[int]) -> None:
    """Send a signal to each rank that runs and is not among `told`, which it joins."""
    for pid in find_pids(notes_dir):
        if pid not in told:
            told.add(pid)
            with suppress(psutil.NoSuchProcess):
                rank = psutil.Process(pid)
                if rank.ppid() == os.getpid():  # not another process that has been given its number
                    rank.send_signal(number)


def _find_hangup() -> list[signal.Signals]:
    """Return SIGHUP, unless it is to be ignored, as under nohup."""
    return [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _ended_children() -> Iterator[None]:
    """Leave no process behind that was started within, neither a rank nor what a rank started and did not end.

    Elastic ends the ranks that are alive with all that they started, but not what a rank that died left behind. As the
    subreaper this process inherits these (on Linux).
    """
    _inherit_orphans(True)
    before = psutil.Process().children(recursive=True)
    try:
        yield
    finally:
        left = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for child in left:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
        _inherit_orphans(False)  # nobody would wait for what others start and leave


def _inherit_orphans(is_on: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on))


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silence elastic's own report of failures, which `explain_failures` gives in one line."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
