"""One run as its folder tells of it. Nothing is written here."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lorashard.errors import ConfigError
from lorashard.runs.checkpoints import list_checkpoints
from lorashard.runs.events import EVENTS_NAME, add_event

from .alert import Alert, Facts
from .alerts import find_alerts
from .checkpoints import CheckpointRow, describe_checkpoints
from .eta import Progress, describe_progress, estimate_rest
from .jsonl_tail import JsonLines, read_json
from .logs import list_logs, read_log
from .metrics import TOKENS, Metrics
from .process_file import find_stopped
from .ranks import RankLog, RankRow, describe_rank, find_behind, find_planned_bytes, list_rank_files
from .samples import Sample, Samples
from .sanitize import hide_secrets, show_safely
from .series import Span, to_finite
from .states import ASKED_NAME, find_state
from .summaries import KnownRun, Summary, read_options

_MOST_EVENTS = 2000
_CHECKPOINTS_S = 5.0  # to look at every file of every checkpoint takes a while; their names are looked at each time


class RunReader:
    """One run. A call reads what has come since the last one. Safe to use from several threads."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """Begin to read.

        Args:
            name: that it goes by, `SWEEP/JOB` of a job; empty: its folder's.
        """
        self.name = name or folder.name
        self.folder = folder
        self._lock = threading.RLock()
        self._known = KnownRun(folder, self.name)
        self._metrics = Metrics(folder / "metrics.jsonl")
        self._ranks: dict[int, RankLog] = {}
        self._checkpoints: list[CheckpointRow] = []
        self._checkpoint_folders: list[Path] = []
        self._checkpoints_s = -_CHECKPOINTS_S
        self._event_lines = JsonLines(folder / EVENTS_NAME)
        self._events: list[dict[str, Any]] = []
        self._samples = Samples(folder / "samples.jsonl")

    def summary(self) -> Summary:
        """Return it in one row.

        Raises:
            ConfigError: it is being deleted.
        """
        row = self._known.summarize()
        if row is None:
            raise ConfigError(f"run {self.name} is being deleted")
        return row

    def progress(self) -> Progress:
        """Return how far it is."""
        state = find_state(self.folder)
        with self._lock:
            self._update_metrics()
            rows = list(self._metrics.recent)
        return describe_progress(state, rows, estimate_rest(state, rows))

    def series(
        self,
        names: Sequence[str],
        max_points: int = 500,
        smoothing: float = 0.0,
        spans: Mapping[str, Span] | None = None,
    ) -> dict[str, tuple[list[float], list[float], list[float]]]:
        """Return numbers over the steps: for each name xs, ys and smoothed ys; names that the run has not are left out.

        Args:
            names: as in metrics.jsonl: `loss`, `eval_loss`, `learning_rate`, ...
            max_points: of each; ends and extremes stay.
            smoothing: 0 for none, to below 1.
            spans: by name, the steps that are looked at closely, which get as many points again.
        """
        max_points = max(2, max_points)
        spans = spans or {}
        with self._lock:
            self._update_metrics()
            found = self._metrics.series
            return {name: found[name].points(max_points, smoothing, spans.get(name)) for name in names if name in found}

    def num_tokens(self) -> float | None:
        """Return how many tokens it has trained on, over all resumes; None where it does not say."""
        with self._lock:
            self._update_metrics()
            found = self._metrics.series.get(TOKENS)
            return found.tail(1)[0] if found else None

    def series_names(self) -> list[str]:
        """Return what `series` can be asked for."""
        with self._lock:
            self._update_metrics()
            return sorted(self._metrics.series)

    def ranks(self) -> list[RankRow]:
        """Return every rank as it was when it last wrote."""
        state = find_state(self.folder)
        planned_bytes = find_planned_bytes(self.plan())
        with self._lock:
            logs = self._update_ranks()
            behind = find_behind(logs, time.time())
            named = state.failure.get("rank") if state.name == "failed" else None
            rows = []
            for rank, log in logs.items():
                word = state.name
                if state.name in ("running", "stopping"):
                    word = "behind" if rank in behind else "running"
                elif named is not None:
                    word = "failed" if rank == named else "stopped"
                rows.append(describe_rank(rank, log, word, planned_bytes))
            return rows

    def rank_series(self, field: str, max_points: int = 500) -> dict[int, tuple[list[float], list[float]]]:
        """Return one of `ranks.CHARTED` over the steps, by rank; ranks that have none are left out."""
        with self._lock:
            found = {rank: log.series.get(field) for rank, log in self._update_ranks().items()}
            return {rank: one.points(max_points)[:2] for rank, one in found.items() if one}

    def samples(self) -> list[Sample]:
        """Return what it has answered to its sample prompts, in the order of the steps."""
        with self._lock:
            return self._samples.read()

    def alerts(self, now_s: float | None = None) -> list[Alert]:
        """Return what is wrong with it, the worst first; seen from a later moment where that is given."""
        return find_alerts(self._gather_facts(time.time() if now_s is None else now_s))

    def logs(self) -> list[int | Literal["launcher"]]:
        """Return whose logs there are."""
        return list_logs(self.folder)

    def log(self, rank: int | Literal["launcher"], query: str = "", max_lines: int = 400) -> str:
        """Return the end of a log, or the last lines of it that match.

        Args:
            query: what a line must hold, in any case.

        Raises:
            ConfigError: there is no such log.
        """
        return read_log(self.folder, rank, query, max_lines)

    def config_yaml(self) -> str:
        """Return its options as resolved, else as asked for, without secrets; empty where neither is there."""
        for name in ("config.yaml", ASKED_NAME):
            try:
                return show_safely((self.folder / name).read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
        return ""

    def options(self) -> dict[str, Any]:
        """Return its options as resolved, else as asked for, without secrets."""
        return dict(hide_secrets(read_options(self.folder)))

    def versions(self) -> dict[str, Any]:
        """Return the versions of the libraries that it ran with."""
        return read_json(self.folder / "versions.json")

    def plan(self) -> dict[str, Any] | None:
        """Return what each placement was predicted to cost (`Plan.to_json`); None where nothing was planned."""
        return read_json(self.folder / "plan.json") or None

    def checkpoints(self) -> list[CheckpointRow]:
        """Return its checkpoints, the newest first."""
        with self._lock:
            now_s, folders = time.monotonic(), list_checkpoints(self.folder)
            if folders != self._checkpoint_folders or now_s > self._checkpoints_s + _CHECKPOINTS_S:
                self._checkpoints = describe_checkpoints(folders)
                self._checkpoint_folders, self._checkpoints_s = folders, now_s
            return list(self._checkpoints)

    def _gather_facts(self, now_s: float) -> Facts:
        state = find_state(self.folder)
        rows = self.checkpoints()
        with self._lock:
            self._update_metrics()
            ranks = self._update_ranks()
            updates = [state.update_s or 0.0, *(log.update_s or 0.0 for log in ranks.values())]
            return Facts(
                folder=self.folder,
                state=state,
                now_s=now_s,
                options=self.options(),
                rows=list(self._metrics.recent),
                odd=list(self._metrics.odd),
                update_s=max(updates) or None,
                ranks=dict(ranks),
                planned_bytes=find_planned_bytes(self.plan()),
                checkpoints=rows,
                free_bytes=_find_free_bytes(self.folder),
                events=self._read_events(),
                stopped_pids=find_stopped(state.owner) if state.is_live else [],
            )

    def _read_events(self) -> list[dict[str, Any]]:
        def take(batch: list[dict[str, Any]]) -> None:
            for event in (one for one in batch if {"time", "kind", "rank"} <= one.keys()):
                add_event(self._events, event)
            del self._events[:-_MOST_EVENTS]

        self._event_lines.follow(self._events.clear, take)
        return list(self._events)

    def _update_metrics(self) -> None:
        # Events first: a start is there before the lines that follow it.
        starts = (to_finite(event.get("resumed_step")) for event in self._read_events() if event["kind"] == "start")
        resumed: list[float] = []
        for step in starts:
            resumed = [] if step is None else [*(earlier for earlier in resumed if earlier < step), step]
        self._metrics.update(resumed)

    def _update_ranks(self) -> dict[int, RankLog]:
        files = list_rank_files(self.folder)
        self._ranks = {rank: self._ranks.get(rank) or RankLog(path) for rank, path in files.items()}
        for log in self._ranks.values():
            log.update()
        return self._ranks


def _find_free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
