"""What the tests on several ranks have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a hub's folder of its own: hashes, converted weights and derived bases are nobody else's."""
    home = tmp_path_factory.mktemp("hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    return home
