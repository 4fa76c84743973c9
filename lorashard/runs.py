"""A run is a folder: what it was asked, where it stands, what each rank measured.

config.yaml  versions.json   the resolved options and the libraries that ran
plan.json                    what each placement was predicted to cost, where one was planned
status.json                  phase, step, pid; replaced at each change
metrics.jsonl                one line a logged step
ranks/rank_K.jsonl           the rank's own lines: memory, gathers, seconds waited
logs/rank_K.log              what the rank printed
profile/                     traces of `profile_steps`, and where their seconds went
checkpoint-N/                the trainer's
adapter_model.safetensors, adapter_config.json, tokenizer
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from . import __version__
from .engine import Engine

_LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors")


class Run:
    """Writes a run's folder; rank 0 writes what is common, each rank its own lines.

    Ranks: local; nothing here is a collective.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder = folder
        self._rank = rank
        self._world_size = world_size
        self._status: dict[str, Any] = {}
        (folder / "ranks").mkdir(parents=True, exist_ok=True)

    def begin(self, config_yaml: str, is_resumed: bool) -> None:
        """Record what was asked and what runs it; remove what another run left, unless this one goes on with it.

        Called when nothing can be wrong with options, data and model any more: a mistake must not cost the old run.
        """
        if not is_resumed:
            (self.folder / "ranks" / f"rank_{self._rank}.jsonl").unlink(missing_ok=True)
        if self._rank != 0:
            return
        # Of a run that goes on its last checkpoint holds the adapter; the one at the root is that of an ended run.
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            (self.folder / name).unlink(missing_ok=True)
        if not is_resumed:
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            for checkpoint in self.folder.glob("checkpoint-*/"):  # a later resume must not find another run's
                shutil.rmtree(checkpoint)
        _replace(self.folder / "config.yaml", config_yaml)
        versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
        versions |= {"lorashard": __version__, "python": platform.python_version()}
        _replace(self.folder / "versions.json", json.dumps(versions, indent=2))

    def set_status(self, phase: str, **facts: Any) -> None:
        """Say where the run stands: tokenise, load, train, save, done, failed or stopped."""
        if self._rank == 0:
            self._status |= {"phase": phase, "pid": os.getpid(), "world_size": self._world_size, "time": time.time()}
            self._status |= facts
            _replace(self.folder / "status.json", _to_json(self._status))

    def save_plan(self, plan: dict[str, Any]) -> None:
        """Write down what each placement was predicted to cost, and which was taken."""
        if self._rank == 0:
            _replace(self.folder / "plan.json", json.dumps(plan, indent=1))

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self._rank == 0:
            _append(self.folder / "metrics.jsonl", metrics)

    def add_rank_line(self, line: dict[str, Any]) -> None:
        """Append a line to this rank's own file."""
        _append(self.folder / "ranks" / f"rank_{self._rank}.jsonl", line)


def record_end(folder: Path, phase: str, reason: str, begin_s: float) -> None:
    """Say in status.json that the run is over, on behalf of ranks that are not there to do so.

    Args:
        begin_s: when the run began; what is older is another run's.
    """
    path = folder / "status.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    if said.get("time", 0) < begin_s:
        said = {}
    _replace(path, _to_json(said | {"phase": phase, "error": reason, "time": time.time()}))


def measure_rank(engine: Engine, base_bytes: int) -> dict[str, Any]:
    """Return what this rank holds and has waited for.

    Args:
        base_bytes: bytes of the whole base.
    """
    stats = engine.stats()
    facts: dict[str, Any] = {
        "base_bytes": base_bytes,
        "bytes_at_rest": stats.bytes_at_rest,
        "host_bytes_at_rest": stats.host_bytes_at_rest,
        "slot_bytes": stats.slot_bytes,
        "peak_unsharded_bytes": stats.peak_unsharded_bytes,
        "gathers": stats.num_gathers,
        "gathered_bytes": stats.gathered_bytes,
        "copied_bytes": stats.copied_bytes,
        "wait_s": round(stats.wait_s, 4),
        "rss_bytes": psutil.Process().memory_info().rss,
    }
    if torch.cuda.is_available():
        facts["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_to_json(line) + "\n")


def _to_json(facts: dict[str, Any]) -> str:
    """Return facts as JSON, which has no NaN: they become the words that `float` reads."""
    return json.dumps({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()})
