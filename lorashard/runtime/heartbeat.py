"""Heartbeats: each rank gives them to the others, and one that gives none is named, with where it stood.

A thread of each rank leaves a beat in the launcher's store: that it is alive, what its main thread does, and where. It
reads the others' beats on the way. A rank that is stopped, swapped out, or whose machine is gone leaves no beat; the
others would wait for it in a collective until `ddp_timeout`.

What is found, and what is not:

- A beat needs no more than Python's lock for an instant, so it continues while a rank tokenizes, loads, evaluates,
  saves or waits for other ranks. Native code that keeps the lock for all of the timeout starves it.
- A rank whose main thread hangs while its thread beats (a deadlock, a network drive that does not answer) is alive. The
  collective that the others wait in ends by `ddp_timeout`; `Heartbeat.describe_ranks` tells then where each rank stood.
  Where NCCL's own watchdog ends the process, it does so without a word from here.
- While the store does not answer, nobody is blamed: a launcher that is stopped says nothing of the ranks, and neither
  do its machine or the network to it when they are gone. Under a bare `srun` no launcher keeps a store, and nobody
  watches.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from ..errors import LorashardError
from .devices import find_launcher
from .failures import record_failure
from .launch_env import LauncherEnv, has_launcher_store
from .rank_store import RankStore

_INTERVAL_S = 2.0
_CONNECT_S = 60.0
# Long enough for a rank that speaks to be done before the launcher hears of any that has ended.
_SPEECH_S = 2.0
_LEAVE_S = 10.0
_SPOKEN = "spoken"


class Heartbeat:
    """Gives heartbeats from this rank and ends it when another has given none for too long.

    Use it as a context; leaving it tells the others that no more beats are to come. One rank needs none.

    Ranks: local; nothing here is a collective, and it needs no process group.
    """

    def __init__(
        self,
        env: LauncherEnv | None,
        timeout_s: float,
        report: Callable[[str, int], None],
        read_place: Callable[[], tuple[str, int | None]],
    ) -> None:
        """Prepare, without connecting.

        Args:
            env: None for a process without a launcher.
            timeout_s: how long a rank may be silent; 0: for ever, and then no thread is started.
            report: called with the sentence and the silent rank before this rank ends, in another thread than the main
                one, as is `read_place`: what this rank does, such as `load`, and the optimizer step, counted from 1.
        """
        self._env = env
        self._timeout_s = timeout_s
        self._interval_s = min(_INTERVAL_S, timeout_s / 10)
        self._report = report
        self._main_thread = threading.get_ident()
        self._read_place = read_place
        self._num_beats = 0
        self._beats: list[dict[str, Any] | None] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._timeout_s > 0 and self._env is not None and self._env.world_size > 1 and has_launcher_store():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            # A thread that comes out of native code while the interpreter ends would abort the process.
            self._thread.join(_LEAVE_S)

    def describe_ranks(self) -> str:
        """Return where every rank stood at its last beat, a line each; empty where there are no beats."""
        return "\n".join(f"rank {rank}: {_describe(beat)}" for rank, beat in enumerate(self._beats))

    def _run(self) -> None:
        assert self._env is not None
        name = f"heartbeat-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-of-{self._env.world_size}"
        while not self._is_over.is_set():
            # The store may be gone for good (the launcher has died, or rank 0, which kept it, is done) or for a while.
            with suppress(RuntimeError):
                self._watch(RankStore.of_launch(self._env, _CONNECT_S, name))
            self._is_over.wait(self._interval_s)

    def _watch(self, store: RankStore) -> None:
        assert self._env is not None
        silences = Silences(self._env.rank, self._timeout_s)
        last_s = time.monotonic()
        while not self._is_over.wait(self._interval_s if self._num_beats else 0):
            store.post(self._make_beat())
            words = store.read_messages()
            now_s = time.monotonic()
            overdue = silences.count(words, now_s - last_s)
            last_s = now_s
            self._beats = [None if word is None else json.loads(word) for word in words]
            if overdue:
                self._end(explain_silence(self._beats, overdue, self._timeout_s), overdue[0], store)
        store.post(json.dumps({}))

    def _make_beat(self) -> str:
        self._num_beats += 1
        phase, step = self._read_place()
        frame = sys._current_frames().get(self._main_thread)
        beat = {
            "number": self._num_beats,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": phase,
            "step": step,
            "place": describe_place(frame),
        }
        return json.dumps(beat)

    def _end(self, reason: str, rank: int, store: RankStore) -> NoReturn:
        """End this process; of all ranks that end the first speaks where no launcher does."""
        try:
            record_failure(LorashardError(reason), exit_code=1, is_plain=True, silent_rank=rank)
            if store.claim():
                launcher = find_launcher(os.environ)
                if launcher is None or not launcher.is_lorashard:
                    print(f"lorashard: error: {reason}", file=sys.stderr)
                self._report(reason, rank)
                store.note(_SPOKEN)
            else:
                self._wait_for_speaker(store)
        except Exception:  # it ends in any case
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _wait_for_speaker(self, store: RankStore) -> None:
        assert self._env is not None
        until_s = time.monotonic() + _SPEECH_S
        while time.monotonic() < until_s and len(store.find_absent(_SPOKEN)) == self._env.world_size:
            time.sleep(_SPEECH_S / 20)


class Silences:
    """How long each other rank has been silent, counted in time in which this process ran itself.

    Where all ranks are stopped and continue later (a suspended job, Ctrl-Z, a laptop that sleeps), the first one must
    not blame the others.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._words: dict[int, str] = {}
        self._silent_s: dict[int, float] = {}

    def count(self, words: Sequence[str | None], elapsed_s: float) -> list[int]:
        """Return the ranks that have been silent for too long; those not there yet, or at their end, never are.

        Args:
            words: the last word of each rank: a beat, no two of which are equal, or `{}` from one that has ended.
            elapsed_s: since the words before.
        """
        if elapsed_s > self._timeout_s / 4:  # this process was stopped too: everybody gets the whole time again
            self._silent_s.clear()
            elapsed_s = 0
        for rank, word in enumerate(words):
            if word is None or rank == self._rank:
                continue
            is_quiet = word == self._words.get(rank) and word != "{}"
            self._silent_s[rank] = self._silent_s.get(rank, 0) + elapsed_s if is_quiet else 0
            self._words[rank] = word
        if all(silent_s < self._timeout_s for silent_s in self._silent_s.values()):
            return []
        # Ranks that were stopped together had their last beats at different moments.
        return [rank for rank, silent_s in self._silent_s.items() if silent_s > self._timeout_s * 3 / 4]


def explain_silence(beats: Sequence[dict[str, Any] | None], overdue: Sequence[int], timeout_s: float) -> str:
    """Say who is silent, why as far as can be seen from here, and where the first of them stood."""
    beat = beats[overdue[0]]
    assert beat is not None
    others = ", ".join(map(str, overdue[1:]))
    if others:
        others = f", nor have ranks {others}" if len(overdue) > 2 else f", nor has rank {others}"
    return (
        f"rank {overdue[0]} (host {beat['host']}, pid {beat['pid']}) has given no heartbeat for {timeout_s:g} s"
        f"{others}: {_find_reason(beat)}; it stood in {_describe(beat)}; raise heartbeat_timeout if it was only slow"
    )


def _find_reason(beat: dict[str, Any]) -> str:
    if beat["host"] != socket.gethostname():
        return "it is stopped or swapped out, or its machine or the network is gone"
    try:
        state = psutil.Process(beat["pid"]).status()
    except psutil.NoSuchProcess:
        state = psutil.STATUS_DEAD
    except psutil.AccessDenied:  # /proc may hide other processes
        return "it is stopped or swapped out"
    if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "its process is gone"
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "its process is stopped, by a signal or a debugger"
    return f"its process is there ({state}), but swapped out or starved, or native code keeps Python's lock"


def _describe(beat: dict[str, Any] | None) -> str:
    if not beat:
        return "not there yet" if beat is None else "at its end"
    step = "" if beat["step"] is None else f" of step {beat['step']}"
    return f"'{beat['phase']}'{step}, at {beat['place']}"


def describe_place(frame: FrameType | None) -> str:
    """Say where a thread stands: the innermost call of lorashard's or the model's code, and the innermost of all."""
    if frame is None:
        return "its end"
    inner: FrameType | None = frame
    while inner is not None and not _is_of_interest(inner):
        inner = inner.f_back
    frames = [frame] if inner in (None, frame) else [inner, frame]
    return " in ".join(_name(frame) for frame in reversed(frames))


def _is_of_interest(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("lorashard.", "transformers.models.", "transformers_modules.")) and module != __name__


def _name(frame: FrameType | None) -> str:
    assert frame is not None
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno} ({frame.f_code.co_name})"
