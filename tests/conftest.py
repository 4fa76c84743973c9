"""The environment of every test and of the processes it starts, set before anything imports torch or transformers."""

import gc
import os
import tempfile
from collections.abc import Callable

import psutil
import pytest

os.environ.update(
    OMP_NUM_THREADS="1",  # a process that used more OpenMP threads hangs the ranks it forks
    TOKENIZERS_PARALLELISM="false",  # likewise, a tokenizer's threads do not survive a fork
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    # Runs of tests neither wait for those of the person nor are waited for.
    LORASHARD_QUEUE_DIR=os.path.join(tempfile.gettempdir(), f"lorashard-test-queue-{os.getuid()}"),
)


gc.disable()  # while collecting imports everything: see lorashard.importing


def pytest_collection_finish() -> None:
    gc.freeze()  # or a forked rank that collects its garbage would write to each page that it shares
    gc.enable()


@pytest.fixture
def list_children() -> Callable[[], list[psutil.Process]]:
    """List what the test has started and is left: `list_children()`.

    What other files' tests have left for the rest of the session, such as a fork server, is none of it.
    """
    before = psutil.Process().children(recursive=True)
    return lambda: [child for child in psutil.Process().children(recursive=True) if child not in before]
