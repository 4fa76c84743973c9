"""What ranks tell one another beside collectives, through a store: how far they are, and where one waits."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ShardError
from .launch_env import LauncherEnv
from .progress import write_line

ROLL_CALL = "present"  # the step that says: this rank's process still runs
_MOMENT_S = 1.0  # a shorter wait for other ranks is not worth a word in the store


def is_timeout(error: BaseException) -> bool:
    """Tell whether an error says that a collective waited too long for other ranks."""
    return isinstance(error, RuntimeError) and re.search("timed? ?out", str(error), re.IGNORECASE) is not None


class Lookout:
    """Waits for other ranks, and says where each of them stands if that takes long.

    A rank leaves a word in the process group's store only when it has waited for a moment, so that where ranks meet at
    once nothing is added. One that has left no word is elsewhere: the last that it did here is the last that all did.

    Ranks: local.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], warn_after_s: float, describe_ranks: Callable[[], str] = lambda: ""
    ) -> None:
        """Make one.

        Args:
            rank: this one.
            ranks: those that wait for one another.
            warn_after_s: how long one waits before it speaks; 0: for ever.
            describe_ranks: what else is known of where they stand, a line each.
        """
        self._rank = rank
        self._ranks = ranks
        self._warn_after_s = warn_after_s
        self._last: tuple[str, float] | None = None  # what all came to last, and when
        self._has_failed = False  # a word about that is still in the store
        self.describe_ranks = describe_ranks

    def wait(self, work: Any, deed: str, *, tells_of_all: bool = True) -> None:
        """Wait for a collective on the host.

        Args:
            deed: what the ranks meet for, such as `begin a forward`.
            tells_of_all: whether its end says that all ranks have come.

        Raises:
            ShardError: the group's time-out is over; it says where each rank stands.
        """
        begin_s = time.monotonic()
        if not _is_done_within(work, min(_MOMENT_S, self._warn_after_s / 4) or _MOMENT_S):
            self._wait_long(work, deed, begin_s)
        if self._has_failed:
            _post(RankStore.of_group("waits"), "")
            self._has_failed = False
        if tells_of_all:
            self._last = deed, time.monotonic()

    def _wait_long(self, work: Any, deed: str, begin_s: float) -> None:
        store = RankStore.of_group("waits")
        _post(store, f"waits too, to {deed}")
        left_s = begin_s + self._warn_after_s - time.monotonic()
        try:
            if self._warn_after_s > 0 and not _is_done_within(work, max(left_s, 0.001)):
                write_line(f"lorashard: {self._describe(store, deed, begin_s)}", sys.stderr)
            work.wait()
        except RuntimeError as error:
            _post(store, f"has waited in vain, to {deed}")
            self._has_failed = True
            text = self._describe(store, deed, begin_s)
            if not is_timeout(error):  # another rank is gone, or has come to its timeout
                error.add_note(text)
                raise
            raise ShardError(text) from error
        _post(store, "")

    def _describe(self, store: RankStore, deed: str, begin_s: float) -> str:
        now_s = time.monotonic()
        words: Sequence[str | None] = []
        with suppress(RuntimeError):
            words = store.read_messages()
        last = "has not been there since the model was loaded"
        if self._last is not None:
            last = f"is elsewhere: it last came, {now_s - self._last[1]:.0f} s ago, to {self._last[0]}"
        others = [
            f"rank {rank} {(words[rank] or last) if words else 'cannot be asked: the store does not answer'}"
            for rank in self._ranks
            if rank != self._rank
        ]
        text = (
            f"rank {self._rank} has waited {now_s - begin_s:.0f} s for other ranks to {deed}; "
            f"{'; '.join(others)}. Sharded ranks must run the same forwards, backwards and steps in the same order: "
            "look for what one rank does alone (an evaluation, generate, a collective of the script); if one is only "
            "slow, raise wait_warning_s, and the process group's timeout (ddp_timeout)"
        )
        return "\n".join(filter(None, [text, self.describe_ranks()]))


def _is_done_within(work: Any, seconds: float) -> bool:
    """Tell whether a collective on the host has ended after at most `seconds`; one that has failed raises."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has failed, or has ended right now
    return True


def _post(store: RankStore, word: str) -> None:
    with suppress(RuntimeError):  # the store may be gone: what is waited for comes all the same, or ends by its timeout
        store.post(word)


class RankStore:
    """How far each rank has come, noted in a store, which answers while ranks wait for one another.

    Ranks: local.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, name: str) -> None:
        """Use a store.

        Args:
            name: ranks of the same name read one another's notes. A store outlives the ranks that torchrun restarts.
        """
        self._store = dist.PrefixStore(f"lorashard-{name}", store)
        self._rank = rank
        self._size = size

    @classmethod
    def of_launch(cls, env: LauncherEnv, timeout_s: float, name: str = "roll-call") -> RankStore:
        """Connect to the launcher's store, which needs no process group.

        Args:
            timeout_s: how long the store may take to be there.

        Raises:
            RuntimeError: There is no store.
        """
        timeout = timedelta(seconds=timeout_s)
        store, _, size = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))
        return cls(store, env.rank, size, name)

    @classmethod
    def of_group(cls, name: str) -> RankStore:
        """Use the store that the default process group met in, whichever that is."""
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), name)

    def note(self, step: str) -> None:
        """Say that this rank has come to `step`."""
        self._store.set(f"{step}/{self._rank}", "")

    def find_absent(self, step: str) -> list[int]:
        """Return the ranks that have not come to `step`."""
        return [rank for rank in range(self._size) if not self._store.check([f"{step}/{rank}"])]

    def call_roll(self) -> None:
        """Ask every rank to come to `ROLL_CALL`, whatever else it waits for."""
        self._store.set("roll-call", "")

    def is_roll_called(self) -> bool:
        """Tell whether some rank has called the roll."""
        return self._store.check(["roll-call"])

    def post(self, word: str) -> None:
        """Say something in place of what this rank said before."""
        self._store.set(f"word/{self._rank}", word)

    def read_messages(self) -> list[str | None]:
        """Return the last word of each rank, by rank; None of one that has said nothing."""
        keys = [f"word/{rank}" for rank in range(self._size)]
        if self._store.check(keys):
            return [word.decode() for word in self._store.multi_get(keys)]
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

    def exchange(self, word: str, timeout_s: float) -> list[str]:
        """Return what every rank passes here, by rank, once all have come.

        It asks again and again: a wait in the store would keep other threads of this process from it.

        Raises:
            ShardError: some rank has not come in time.

        Ranks: every rank must call it equally often.
        """
        turn = self._store.add(f"turn/{self._rank}", 1)
        keys = [f"exchange-{turn}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], word)
        deadline_s, pause_s = time.monotonic() + timeout_s, 0.005
        while not self._store.check(keys):
            if time.monotonic() > deadline_s:
                raise ShardError(
                    "not all ranks have come to share their process groups",
                    expected=f"{self._size} ranks within {timeout_s:g} s",
                    found=f"ranks {self.find_absent(f'exchange-{turn}')} are missing",
                    fix="call lorashard.load and lorashard.shard on every rank, equally often",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)
        return [found.decode() for found in self._store.multi_get(keys)]

    def leave_failure(self, reason: str) -> None:
        """Tell the others that this rank goes no further."""
        self._store.set("failure", reason)

    def read_failure(self) -> str | None:
        """Return why some rank goes no further, or None."""
        return self._store.get("failure").decode() if self._store.check(["failure"]) else None

    def claim(self) -> bool:
        """Tell whether this rank is the first to ask this."""
        return self._store.add("claims", 1) == 1
