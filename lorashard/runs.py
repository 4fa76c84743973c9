"""A run is a folder: what it was asked, where it stands, what each rank measured.

A disk that takes none of it does not end the run; see `disk.PatientFiles`.

config.yaml  versions.json   the resolved options and the libraries that ran
plan.json                    what each placement was predicted to cost, where one was planned
status.json                  phase, step, pid, why ranks were started again; replaced at each change
.lock  .owner.json           held by, and naming, the process that the folder belongs to while the run lives
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
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from . import __version__
from .disk import PatientFiles, cut_lines, describe_fault, replace_text
from .engine import Engine
from .errors import ConfigError
from .output import warn
from .stopping import find_restarts

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
        if find_restarts(os.environ):  # the same run, in new processes
            said = _read_status(folder)
            self._status = {name: said[name] for name in ("restarts", "has_begun") if name in said}
        self._files = PatientFiles(warn)
        try:
            (folder / "ranks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir {folder} cannot be written to: {error.strerror}") from error

    def begin(self, config_yaml: str, resumed_step: int | None) -> None:
        """Record what was asked and what runs it; remove what another run left, unless this one goes on with it.

        Called when nothing can be wrong with options, data and model any more: a mistake must not cost the old run.

        Args:
            resumed_step: The step from which this run goes on in its own folder: what was noted of later ones goes, for
                they are run again. None for a run that is new to the folder.
        """
        own = self.folder / "ranks" / f"rank_{self._rank}.jsonl"
        if self._rank != 0:
            cut_lines(own, resumed_step)
            return
        others = {self.folder / "ranks" / f"rank_{rank}.jsonl" for rank in range(1, self._world_size)}
        for path in (self.folder / "metrics.jsonl", *(self.folder / "ranks").glob("rank_*.jsonl")):
            if path not in others:  # a rank that there is no longer leaves its lines to rank 0
                cut_lines(path, resumed_step)
        # Of a run that goes on its last checkpoint holds the adapter; the one at the root is that of an ended run.
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        self._files.replace(self.folder / "config.yaml", config_yaml)
        versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
        versions |= {"lorashard": __version__, "python": platform.python_version()}
        self._files.replace(self.folder / "versions.json", json.dumps(versions, indent=2))
        self.set_status(self._status.get("phase", "load"), has_begun=True)

    def set_status(self, phase: str, **facts: Any) -> None:
        """Say where the run stands: start, tokenise, load, train, save, done, failed or stopped."""
        if self._rank == 0:
            self._status |= {"phase": phase, "pid": os.getpid(), "world_size": self._world_size, "time": time.time()}
            self._status |= facts
            self._files.replace(self.folder / "status.json", _to_json(self._status))

    def save_plan(self, plan: dict[str, Any]) -> None:
        """Write down what each placement was predicted to cost, and which was taken."""
        if self._rank == 0:
            self._files.replace(self.folder / "plan.json", json.dumps(plan, indent=1))

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self._rank == 0:
            self._files.append(self.folder / "metrics.jsonl", _to_json(metrics))

    def add_rank_line(self, line: dict[str, Any]) -> None:
        """Append a line to this rank's own file."""
        self._files.append(self.folder / "ranks" / f"rank_{self._rank}.jsonl", _to_json(line))


def record_start(folder: Path) -> None:
    """Say in status.json that a run is about to start its ranks: what it said was of another run."""
    _write_status(folder, {"phase": "start"}, "has started")


def record_restart(folder: Path, reason: str) -> None:
    """Add to the `restarts` of status.json why the ranks are started again."""
    said = _read_status(folder)
    said |= {"phase": "start", "restarts": [*said.get("restarts", []), reason]}
    _write_status(folder, said, "was started again")


def has_begun(folder: Path) -> bool:
    """Tell whether the run of a folder has come to its training, so that the checkpoints there are its own.

    A folder without status.json is that of a node whose disk rank 0 does not see, and counts as begun.
    """
    said = _read_status(folder)
    return bool(said.get("has_begun", not said))


def record_end(folder: Path, phase: str, reason: str, begin_s: float) -> None:
    """Say in status.json that the run is over, on behalf of ranks that are not there to do so.

    Args:
        begin_s: when the run began; what is older is another run's.
    """
    said = _read_status(folder)
    if said.get("time", 0) < begin_s:
        said = {}
    _write_status(folder, said | {"phase": phase, "error": reason}, "has ended")


def _read_status(folder: Path) -> dict[str, Any]:
    path = folder / "status.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError) as error:
        warn(f"{path} cannot be read: {describe_fault(error, folder)}")
        return {}


def _write_status(folder: Path, facts: dict[str, Any], news: str) -> None:
    path = folder / "status.json"
    try:
        replace_text(path, _to_json(facts | {"time": time.time()}))
    except OSError as error:
        warn(f"{path} does not say that the run {news}: {describe_fault(error, folder)}")


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


def _to_json(facts: dict[str, Any]) -> str:
    """Return facts as JSON, which has no NaN: they become the words that `float` reads."""
    return json.dumps({k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()})
