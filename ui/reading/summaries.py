"""A run in one row: what the table of runs shows, from the ends of its files alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .eta import estimate_rest, find_steps
from .jsonl_tail import read_last_rows, sample_rows
from .series import to_finite, to_number, to_whole
from .states import ASKED_NAME, EXIT_NAME, LAUNCHER_LOG, LIVE_STATES, STATUS_NAME, State, find_run_owner, find_state

ADAPTER_NAME = "adapter_model.safetensors"
_RUN_FILES = (STATUS_NAME, "metrics.jsonl", "config.yaml", ASKED_NAME)
# What a run that is over can still change in: these, and what lies in its folder.
_WATCHED = (
    STATUS_NAME,
    EXIT_NAME,
    "metrics.jsonl",
    "config.yaml",
    ASKED_NAME,
    str(LAUNCHER_LOG),
    "samples.jsonl",
    "",
)
_TAIL_BYTES = 1 << 16
_MOST_TAIL_BYTES = 1 << 20  # to look for the last evaluation in
_TREND_PLACES, _TREND_BYTES = 24, 2048  # where a long run's losses are read from
_MOST_TREND_POINTS = 48


@dataclass(frozen=True)
class Summary:
    """A run in one row.

    Attributes:
        state: queued, starting, running, stopping, done, stopped, failed or dead.
        quantization: the format of its base; None where it is not quantized.
        phase: queue, start, download, tokenize, load, train, evaluate, save, done, failed or stopped.
        eta_s: until its training ends.
        update_s: when it was last heard of.
        duration_s: since it was last started, until now or until it was last heard of.
        trend: (step, loss) of some steps of the whole run, for a small curve.
        error: why it failed, was stopped, or is taken for dead.
        has_adapter: whether the adapter of an ended run is there.
        host: where it lives, while it does.
        size_bytes: of the folder; None while it lives.
    """

    name: str
    state: str
    phase: str
    step: int | None
    max_steps: int | None
    loss: float | None
    eval_loss: float | None
    learning_rate: float | None
    tokens_per_s: float | None
    eta_s: float | None
    begin_s: float | None
    update_s: float | None
    duration_s: float | None
    trend: tuple[tuple[float, float], ...]
    model: str | None
    dataset: str | None
    method: str | None
    quantization: str | None
    num_ranks: int | None
    error: str | None
    has_adapter: bool
    has_samples: bool
    host: str | None
    size_bytes: int | None

    @property
    def is_live(self) -> bool:
        return self.state in LIVE_STATES


def is_run(folder: Path) -> bool:
    """Tell whether a folder is that of a run."""
    return any((folder / name).is_file() for name in _RUN_FILES)


def summarize(folder: Path, now_s: float | None = None, name: str = "") -> Summary:
    """Return a run in one row.

    Args:
        name: that it goes by; empty: its folder's.
    """
    state = find_state(folder, now_s)
    options = read_options(folder)
    rows = read_last_rows(folder / "metrics.jsonl", _TAIL_BYTES)
    step, max_steps = find_steps(state, rows)
    eval_loss = find_last(rows, "eval_loss")
    if eval_loss is None and len(rows) > 1:
        eval_loss = find_last(read_last_rows(folder / "metrics.jsonl", _MOST_TAIL_BYTES), "eval_loss")
    return Summary(
        name=name or folder.name,
        state=state.name,
        phase=state.phase,
        step=step,
        max_steps=max_steps,
        loss=find_last(rows, "loss"),
        eval_loss=eval_loss,
        learning_rate=find_last(rows, "learning_rate"),
        tokens_per_s=find_last(rows, "tokens_per_s"),
        eta_s=estimate_rest(state, rows, now_s),
        begin_s=state.begin_s,
        update_s=state.update_s,
        duration_s=_measure_duration(state, now_s),
        trend=_read_trend(folder / "metrics.jsonl"),
        model=_to_text(options.get("model_name_or_path")),
        dataset=_to_text(options.get("dataset")),
        method=_to_text(options.get("method")) or ("sft" if options else None),
        quantization=find_quantization(options),
        num_ranks=count_ranks(state.status, options),
        error=state.error,
        has_adapter=(folder / ADAPTER_NAME).is_file(),
        has_samples=(folder / "samples.jsonl").is_file(),
        host=state.owner.host if state.owner is not None else None,
        size_bytes=None if state.is_live else measure_size(folder),
    )


def _measure_duration(state: State, now_s: float | None) -> float | None:
    end_s = (time.time() if now_s is None else now_s) if state.is_live else state.update_s
    return None if state.begin_s is None or end_s is None else max(0.0, end_s - state.begin_s)


def _read_trend(path: Path) -> tuple[tuple[float, float], ...]:
    rows = sample_rows(path, _TREND_PLACES, _TREND_BYTES)
    pairs = ((to_finite(row.get("step")), to_finite(row.get("loss"))) for row in rows)
    known: list[tuple[float, float]] = []
    for step, loss in pairs:
        if step is None or loss is None:
            continue
        while known and known[-1][0] >= step:  # it was run again
            known.pop()
        known.append((step, loss))
    return tuple(known[-1 :: -max(1, -(-len(known) // _MOST_TREND_POINTS))][::-1])


class KnownRun:
    """A run's row, which is made anew only where it may have changed. Safe to use from several threads."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self._folder = folder
        self._name = name
        self._ended: tuple[tuple[int, ...], Summary] | None = None

    def summarize(self) -> Summary | None:
        """Return the run in one row; None where it is being deleted."""
        ended = self._ended
        stamp = _stamp(self._folder)
        if ended is not None and ended[0] == stamp and find_run_owner(self._folder) is None:
            return ended[1]
        try:
            row = summarize(self._folder, name=self._name)
        except OSError:
            return None
        self._ended = None if row.is_live else (stamp, row)
        return row


def _stamp(folder: Path) -> tuple[int, ...]:
    stamp = []
    for name in _WATCHED:
        try:
            facts = (folder / name).stat()
        except OSError:
            stamp.append(0)
            continue
        stamp += [facts.st_mtime_ns, facts.st_size]
    return tuple(stamp)


def find_last(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the last number of a name; it may be NaN."""
    return next((number for row in reversed(rows) if (number := to_number(row.get(name))) is not None), None)


def read_options(folder: Path) -> dict[str, Any]:
    """Return a run's options, as resolved, else as asked for; empty where neither can be read."""
    for name in ("config.yaml", ASKED_NAME):
        try:
            options = yaml.load((folder / name).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(options, dict):
            return {str(key): value for key, value in options.items()}
    return {}


def find_quantization(options: Mapping[str, Any]) -> str | None:
    """Return the format of a run's base, with what its scales are in; None where it is not quantized."""
    aliases = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
    found = [name for alias, name in aliases.items() if options.get(alias) is True]
    given = _to_text(options.get("quantization"))
    if given not in (None, "none"):
        found = [given]
    is_double = options.get("bnb_4bit_use_double_quant") is True
    return found[0] + (" with double quantization" if is_double else "") if found else None


def count_ranks(status: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Return a run's number of ranks: as it says, else as it was asked for."""
    said = to_whole(status.get("world_size"))
    if said is not None:
        return said
    cpu, gpus = options.get("cpu"), options.get("gpus")
    if isinstance(cpu, int) and not isinstance(cpu, bool):
        return cpu
    if isinstance(gpus, list):
        return len(gpus)
    return gpus if isinstance(gpus, int) and not isinstance(gpus, bool) else None


def measure_size(folder: Path) -> int:
    """Return the bytes of a folder's files; those that go meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            facts = path.lstat()
        except OSError:
            continue
        total += facts.st_size
    return total


def _to_text(value: Any) -> str | None:
    return None if value is None else str(value)
