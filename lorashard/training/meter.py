"""What a rank holds, has waited for, and what the driver tells of its device: a line of the rank's own file."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from ..engine import Engine

_DRIVER_INTERVAL_S = 2.0  # each question may take it milliseconds, and steps may be as short


class RankMeter:
    """Measures one rank.

    What the driver does not tell (no library for it, no right to ask, part of a GPU) is left out, and not asked again.
    What it tells is as old as two seconds.

    Ranks: local.
    """

    def __init__(self, engine: Engine, base_bytes: int) -> None:
        """Prepare to measure.

        Args:
            base_bytes: bytes of the whole base.
        """
        self._engine = engine
        self._base_bytes = base_bytes
        self._process = psutil.Process()
        self._process.cpu_percent()  # it tells of the time between two calls
        self._untold: set[Callable[..., Any]] = set()
        self._told: dict[str, Any] = {}
        self._told_s = -math.inf

    def begin_training(self) -> None:
        """Count the peak from here: loading and probing are over, and the plan foretells none of them."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, Any]:
        """Return the facts now."""
        stats = self._engine.stats()
        facts: dict[str, Any] = {
            "time": time.time(),
            "base_bytes": self._base_bytes,
            "bytes_at_rest": stats.bytes_at_rest,
            "host_bytes_at_rest": stats.host_bytes_at_rest,
            "slot_bytes": stats.slot_bytes,
            "peak_unsharded_bytes": stats.peak_unsharded_bytes,
            "gathers": stats.num_gathers,
            "gathered_bytes": stats.gathered_bytes,
            "copied_bytes": stats.copied_bytes,
            "wait_s": round(stats.wait_s, 4),
            "rss_bytes": self._process.memory_info().rss,
        }
        if not torch.cuda.is_available():
            return facts | {"cpu_percent": self._process.cpu_percent()}
        facts["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        if time.monotonic() - self._told_s >= _DRIVER_INTERVAL_S:
            self._told_s = time.monotonic()
            self._told = self._ask_driver()
        return facts | self._told

    def _ask_driver(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        memory = self._ask(torch.cuda.mem_get_info)
        if memory is not None:
            free_bytes, total_bytes = memory
            facts = {"device_total_bytes": total_bytes, "device_used_bytes": total_bytes - free_bytes}
        for name, ask in (("utilization_percent", torch.cuda.utilization), ("temperature_c", torch.cuda.temperature)):
            told = self._ask(ask)
            if told is not None:
                facts[name] = told
        return facts

    def _ask(self, ask: Callable[[], Any]) -> Any:
        if ask in self._untold:
            return None
        try:
            return ask()
        except Exception:  # its library's errors, that it is missing, or that it is too old for the question
            self._untold.add(ask)
            return None
