"""What is wrong with a run, for whom, and what to do: the worst first."""

from __future__ import annotations

from .alert import Alert, Facts
from .alert_machine import find_checkpoints, find_disk, find_heat, find_memory, find_slow_rank
from .alert_steps import find_end, find_nonfinite, find_restarts, find_stall

_FINDERS = (
    find_end,
    find_stall,
    find_nonfinite,
    find_disk,
    find_memory,
    find_checkpoints,
    find_restarts,
    find_heat,
    find_slow_rank,
)
_ORDER = {"error": 0, "warning": 1, "info": 2}


def find_alerts(facts: Facts) -> list[Alert]:
    """Return what is wrong, the worst first, and within that the cause before what came of it."""
    found = [alert for find in _FINDERS for alert in find(facts)]
    return sorted(dict.fromkeys(found), key=lambda alert: _ORDER[alert.severity])
