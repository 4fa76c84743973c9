"""Models and datasets of the Hugging Face Hub by a part of their id, where there is a network."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from typing import Any, Literal

from huggingface_hub import HfApi, constants

_ID_PART = re.compile(r"\w[\w.-]{2,}(/[\w.-]*)?")
_MAX_FOUND = 20
_TIMEOUT_S = 3.0
_RETRY_AFTER_S = 60.0


class HubSearch:
    """Asks the Hub, and no more for a minute once it has not answered; safe to use from several threads.

    Attributes:
        why_off: why ids are not searched, in a sentence; empty while they are.
    """

    def __init__(self) -> None:
        self._off_until = float("inf") if constants.HF_HUB_OFFLINE else 0.0
        self.why_off = "HF_HUB_OFFLINE is set: ids are not searched on the Hub." if constants.HF_HUB_OFFLINE else ""

    def find(self, kind: Literal["models", "datasets"], typed: str) -> list[str]:
        """Return the ids that hold what was typed, the most downloaded first; none while the Hub does not answer.

        A path is not sent: neither what no id can be, nor what begins with a folder where the server was started.
        """
        if time.monotonic() < self._off_until or not _ID_PART.fullmatch(typed) or os.path.exists(typed.split("/")[0]):
            return []
        answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()
        # A thread that the server's end does not wait for, as it would for one of a pool.
        threading.Thread(target=lambda: answers.put(_ask(kind, typed)), daemon=True).start()
        try:
            found = answers.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            found = TimeoutError()
        if isinstance(found, Exception):
            self._off_until = time.monotonic() + _RETRY_AFTER_S
            self.why_off = "The Hub does not answer: only what is on this machine is offered."
            return []
        self.why_off = ""
        return found


def _ask(kind: str, typed: str) -> list[str] | Exception:
    api = HfApi()
    ask: Any = api.list_models if kind == "models" else api.list_datasets
    try:
        return [found.id for found in ask(search=typed, sort="downloads", limit=_MAX_FOUND)]
    except Exception as error:  # of the network, of the Hub, of its answer: nothing is offered
        return error
