"""What a launcher tells the ranks of a run besides their places: to stop, to save, that they are started again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

from ..errors import RunStopped

# Set by lorashard's launcher: how often it has started the ranks of this run again.
RESTARTS_VARIABLE = "LORASHARD_RESTARTS"

STOP_SIGNAL = signal.SIGUSR1
SAVE_SIGNAL = signal.SIGUSR2
# A signal to all of a run's processes reaches them one by one: the launcher waits before it asks, a rank for that.
SPREAD_S = 0.5
_PATIENCE_S = 3.0
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM
STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is lost, try again


class StopRequest:
    """Remembers that this process was asked to stop, or to save and continue, until somebody looks.

    Ranks: local; one rank may have been asked a step before another. Who acts on it agrees with all ranks first.
    """

    def __init__(self) -> None:
        self._signal_name: str | None = None
        self._is_save_asked = False
        self._pid = os.getpid()
        self._is_lorashard = False

    @property
    def signal_name(self) -> str | None:
        """The signal that asked, such as `SIGTERM`; None until one has."""
        return self._signal_name

    def take_save(self) -> bool:
        """Tell whether a checkpoint was asked for, and forget it."""
        is_asked, self._is_save_asked = self._is_save_asked, False
        return is_asked

    def install(self, is_lorashard: bool = False) -> None:
        """Take signals as requests from here on, in the main thread.

        SIGUSR1 and SIGUSR2 always. SIGTERM and the first SIGINT too where another launcher than lorashard's started
        this rank. Under lorashard's, SIGTERM says that another rank has died, so that no step and no save can be
        finished any more; or it was sent to each process of the run, and then the launcher, which has it too, asks in a
        moment.

        Args:
            is_lorashard: Whether lorashard's own launcher started this process.
        """
        self._pid = os.getpid()
        self._is_lorashard = is_lorashard
        requests = (STOP_SIGNAL, SAVE_SIGNAL, signal.SIGTERM)
        for number in requests if is_lorashard else (*requests, signal.SIGINT):
            signal.signal(number, self._note)
        # `worker.py` blocks them: one that came earlier arrives here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_SIGNAL, SAVE_SIGNAL])

    def close(self) -> None:
        """Have requests do nothing from here on: the training is over, and the interpreter's end would make them kill.

        SIGTERM and SIGINT continue as they are.
        """
        for number in (STOP_SIGNAL, SAVE_SIGNAL):
            signal.signal(number, signal.SIG_IGN)

    def check(self) -> None:
        """End the run here, before its training has begun, if it was asked to stop.

        Raises:
            RunStopped: It was.
        """
        if self._signal_name is not None:
            raise RunStopped(
                "the training had not begun, so there was nothing to save",
                signal=self._signal_name,
                fix="resume with --resume auto",
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked worker has inherited this: it serves its rank until that has saved, and ends when it is told to.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == SAVE_SIGNAL:
            self._is_save_asked = True
            return
        if number == signal.SIGTERM and self._is_lorashard:
            if self._signal_name is not None:
                os._exit(TERMINATED_EXIT_CODE)
            patience = threading.Timer(_PATIENCE_S, self._end_unless_asked)
            patience.daemon = True
            patience.start()
            return
        if number == signal.SIGINT and self._signal_name is not None:
            raise KeyboardInterrupt
        self._signal_name = self._signal_name or signal.Signals(number).name

    def _end_unless_asked(self) -> None:
        if self._signal_name is None:
            os._exit(TERMINATED_EXIT_CODE)


def find_restarts(environ: Mapping[str, str]) -> int:
    """Return how often lorashard's launcher or torchrun has started the ranks of this run again."""
    return max(int(environ.get(name) or 0) for name in (RESTARTS_VARIABLE, "TORCHELASTIC_RESTART_COUNT"))
