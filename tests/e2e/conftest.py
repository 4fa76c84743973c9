"""What several files of tests train on."""

from pathlib import Path

import pytest
from helpers.finetune import build_task


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a tiny model, its tokenizer, and rows of questions and answers."""
    return build_task(tmp_path_factory.mktemp("task"))
