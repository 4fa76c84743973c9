"""The ranks of a launcher that a test has started, whoever that is."""

from __future__ import annotations

from contextlib import suppress

import psutil

from helpers.zygote import RANK_NAME


def find_ranks(launcher_pid: int) -> dict[int, psutil.Process]:
    """Return the processes of a launcher's ranks that are alive.

    One that was started has its number in its environment, a forked one in its name: what the kernel shows of its
    environment is that of the process from which it was forked.
    """
    ranks = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher_pid).children(recursive=True):
            with suppress(psutil.Error):
                name = child.name()
                found = name.removeprefix(RANK_NAME) if name.startswith(RANK_NAME) else child.environ().get("RANK")
                if found is not None:
                    ranks[int(found)] = child
    return ranks
