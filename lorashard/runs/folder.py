"""A run is a folder: what it was asked, where it stands, what each rank measured.

A disk that refuses some of it does not end the run; see `disk.PatientFiles`.

config.yaml  versions.json   the resolved options and the libraries that ran
plan.json                    what each placement was predicted to cost, and which was taken
status.json                  phase, how far it has come, step, pid, why ranks were started again; see `status.Status`
.lock  .owner.json           held by, and naming, the process that the folder belongs to while the run lives
events.jsonl                 what happened: starts, checkpoints, outages, non-finite values, the end; see `events`
metrics.jsonl                one line a logged step
ranks/rank_K.jsonl           the rank's own lines: memory, gathers, seconds waited
logs/rank_K.log              what the rank printed
logs/options.json            the options that the launcher resolved, which the ranks read
profile/                     traces of `profile_steps`, and where their seconds went
checkpoint-N/                the trainer's
adapter_model.safetensors, adapter_config.json, tokenizer
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ConfigError
from ..runtime.disk import cut_lines
from ..runtime.output import warn
from .events import EventLog, to_json_line
from .status import Status

_LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors")


class Run:
    """Writes a run's folder; rank 0 writes what is common, each rank its own lines.

    Ranks: local; nothing here is a collective.

    Attributes:
        status: where the run stands, which rank 0 writes down.
        events: what happens on this rank.
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, show: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        """Take a place in a run's folder.

        Args:
            show: shows the person where the run stands; see `status.show_status`.
        """
        self.folder = folder
        self.rank = rank
        self.world_size = world_size
        self.events = EventLog(folder, rank, warn)
        self._files = self.events.files
        self.status = Status.carry_on(folder, self.events, show) if rank == 0 else Status(folder, {}, None)
        try:
            (folder / "ranks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "it cannot be written to", option="output_dir", found=error.strerror, where=folder
            ) from error

    def begin(self, config_yaml: str, resumed_step: int | None) -> None:
        """Record what was asked and what runs it; remove what another run left, unless this one continues with it.

        Called when nothing can be wrong with options, data and model any more: a mistake must not cost the old run.

        Args:
            resumed_step: the step from which this run resumes in its own folder: records of later ones are removed,
                for they are run again. None for a run that is new to the folder.
        """
        own = self.folder / "ranks" / f"rank_{self.rank}.jsonl"
        if self.rank != 0:
            cut_lines(own, resumed_step)
            return
        others = {self.folder / "ranks" / f"rank_{rank}.jsonl" for rank in range(1, self.world_size)}
        for path in (self.folder / "metrics.jsonl", *(self.folder / "ranks").glob("rank_*.jsonl")):
            if path not in others:  # a rank that there is no longer leaves its lines to rank 0
                cut_lines(path, resumed_step)
        # Of a run that continues its last checkpoint holds the adapter; the one at the root is that of an ended run.
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        self._files.replace(self.folder / "config.yaml", config_yaml)
        versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
        versions |= {"lorashard": __version__, "python": platform.python_version()}
        self._files.replace(self.folder / "versions.json", json.dumps(versions, indent=2))
        self.status.add(has_begun=True, world_size=self.world_size)
        self.events.emit("start", begin_s=self.status.begin_s, world_size=self.world_size, resumed_step=resumed_step)

    def note_step(self, step: int, max_steps: int) -> None:
        """Say which steps are done, of how many."""
        if self.status.place[0] != "train":
            progress = {"done": step, "total": max_steps, "unit": "steps"}
            self.status.enter("train", step=step, max_steps=max_steps, progress=progress)
        self.status.advance(step, max_steps, "steps")

    def emit(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        """Record what all ranks know of; rank 0 does."""
        if self.rank == 0:
            self.events.emit(kind, step=step, **fields)

    def save_plan(self, plan: dict[str, Any]) -> None:
        """Write down what each placement was predicted to cost, and which was taken."""
        if self.rank == 0:
            self._files.replace(self.folder / "plan.json", json.dumps(plan, indent=1))

    def drop_plan(self) -> None:
        """Leave no plan in the folder, which would be another run's."""
        if self.rank == 0:
            with suppress(OSError):
                (self.folder / "plan.json").unlink(missing_ok=True)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        if self.rank == 0:
            self._files.append(self.folder / "metrics.jsonl", to_json_line(metrics))

    def add_rank_line(self, line: dict[str, Any]) -> None:
        """Append a line to this rank's own file."""
        self._files.append(self.folder / "ranks" / f"rank_{self.rank}.jsonl", to_json_line(line))
