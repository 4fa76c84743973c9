"""What a launcher tells the ranks of a run besides their places: to stop, and that they are started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType

from .errors import RunStopped

# Set by lorashard's launcher: how often it has started the ranks of this run again.
RESTARTS_VARIABLE = "LORASHARD_RESTARTS"

STOP_SIGNAL = signal.SIGUSR1
STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is lost, try again


class StopRequest:
    """Remembers that this process was asked to stop, until somebody looks.

    Ranks: local; one rank may have been asked a step before another. Who acts on it agrees with all ranks first.
    """

    def __init__(self) -> None:
        self._signal_name: str | None = None
        self._pid = os.getpid()

    @property
    def signal_name(self) -> str | None:
        """The signal that asked, such as `SIGTERM`; None until one has."""
        return self._signal_name

    def install(self, is_lorashard: bool = False) -> None:
        """Take signals as requests from here on, in the main thread.

        SIGUSR1 always. SIGTERM and the first SIGINT too, unless lorashard's own launcher started this rank: there
        SIGTERM says that another rank has died, so that no step and no save can be finished any more.

        Args:
            is_lorashard: Whether lorashard's own launcher started this process.
        """
        self._pid = os.getpid()
        for number in (STOP_SIGNAL,) if is_lorashard else (STOP_SIGNAL, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        # `rank.py` blocks it: one that came earlier arrives here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_SIGNAL])

    def check(self, what_is_saved: str) -> None:
        """End the run here if it was asked to stop.

        Args:
            what_is_saved: For the person, such as `no step was done, so there was nothing to save`.

        Raises:
            RunStopped: It was.
        """
        if self._signal_name is not None:
            raise RunStopped(
                f"stopped by {self._signal_name}: {what_is_saved}; run it again with --resume_from_checkpoint auto"
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked worker has inherited this: it serves its rank until that has saved, and ends when it is told to.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT and self._signal_name is not None:
            raise KeyboardInterrupt
        self._signal_name = self._signal_name or signal.Signals(number).name


def find_restarts(environ: Mapping[str, str]) -> int:
    """Return how often lorashard's launcher or torchrun has started the ranks of this run again."""
    return max(int(environ.get(name) or 0) for name in (RESTARTS_VARIABLE, "TORCHELASTIC_RESTART_COUNT"))
