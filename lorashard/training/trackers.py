"""Trackers (TensorBoard, Weights & Biases, ...) write to a disk too: one that cannot any more is not worth the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from ..runtime.disk import describe_fault, find_fault


def drop_refused_trackers(
    callbacks: Iterable[TrainerCallback], report_to: list[str], folder: Path, log: Callable[[str], None]
) -> None:
    """Let each tracker among `callbacks` be left out from when a disk refuses what it writes.

    It is not tried again: TensorBoard's writer, for one, has lost its thread by then.

    Args:
        report_to: The trackers' names.
        folder: The run's.
        log: Shows a line to the person.
    """
    classes = tuple(get_reporting_integration_callbacks(report_to))
    for callback in callbacks:
        if isinstance(callback, classes):
            _Watch(callback, folder, log)


class _Watch:
    """Stands between the trainer and each of a tracker's events."""

    def __init__(self, callback: TrainerCallback, folder: Path, log: Callable[[str], None]) -> None:
        self._name = type(callback).__name__.removesuffix("Callback")
        self._folder, self._log = folder, log
        self._is_dropped = False
        for event in dir(callback):
            if event.startswith("on_"):
                setattr(callback, event, self._watch(getattr(callback, event)))

    def _watch(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_dropped:
                return None
            try:
                return handle(*args, **kwargs)
            except Exception as error:
                if find_fault(error) is None:
                    raise
                self._is_dropped = True
                self._log(
                    f"{self._name} gets nothing more ({describe_fault(error, self._folder)}): the run continues, and "
                    "metrics.jsonl has all of its lines"
                )
                return None

        return watched
