"""Cases of tests that `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of a test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)
