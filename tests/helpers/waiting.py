"""Waiting for what happens in another process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], object], explain: Callable[[], str] | None = None, deadline_s: float = 90) -> None:
    """Wait for what happens in another process."""
    deadline = time.monotonic() + deadline_s
    while not is_true():
        assert time.monotonic() < deadline, explain() if explain else "it did not happen in time"
        time.sleep(0.1)
