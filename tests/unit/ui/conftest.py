"""What tests of the web UI's processes share."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import warm


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each Python that is started be forked from one that has imported torch; comes before `list_children`."""
    warm.run([sys.executable, "-c", ""])
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
