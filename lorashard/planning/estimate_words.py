"""An estimate in words: the figures that the command line prints and the web UI shows. Imports no heavy library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..runtime.progress import show_duration

_NO_TIME = {
    "nothing fits": "no placement fits",
    "generates": "completions are generated, and may be short or long",
    "unknown steps": "the examples were too many to count in time",
    "no steps": "the examples are fewer than a step takes",
}
_SPEEDS = {"measured": "the speeds that were measured here", "listed": "data sheets"}


@dataclass(frozen=True)
class Figure:
    """A figure with its name, and what has to be known about it, the shortest first."""

    name: str
    value: str
    notes: tuple[str, ...] = ()


def list_figures(estimate: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of a run before its start.

    Args:
        estimate: the fields of `lorashard.planning.estimate.Estimate`.
    """
    figures = []
    if estimate["num_counted"]:
        figures.append(_show_examples(estimate))
        if estimate["num_supervised_tokens"] is not None:
            figures.append(_show_tokens(estimate))
    figures += [_show_steps(estimate), _show_time(estimate)]
    room = f"of {_show_gib(estimate['free_bytes'])}"
    return [*figures, Figure("Peak memory per rank", _show_gib(estimate["peak_bytes"]), (room,))]


def render_estimate(estimate: Mapping[str, Any]) -> str:
    """Return the figures as lines for a terminal."""
    lines = []
    for figure in list_figures(estimate):
        notes = f" ({'; '.join(figure.notes)})" if figure.notes else ""
        lines.append(f"{figure.name.lower()}: {figure.value}{notes}")
    return "\n".join(lines)


def _show_examples(estimate: Mapping[str, Any]) -> Figure:
    count, num_sequences = estimate["num_examples"], estimate["num_sequences"]
    if count is None:
        notes = ("too many to count in time", *_name_job(estimate), *_explain_job(estimate))
        return Figure("Examples", f"over {estimate['num_counted']:,}", notes)
    about = "" if estimate["is_complete"] else "about "
    packed = (f"packed into {about}{num_sequences:,} sequences",) if num_sequences != count else ()
    return Figure("Examples", f"{count:,}", (*packed, *_name_job(estimate), *_explain_job(estimate)))


def _show_tokens(estimate: Mapping[str, Any]) -> Figure:
    share = f"{estimate['num_supervised_tokens'] / max(1, estimate['num_tokens']):.0%} of all, per epoch"
    if estimate["is_complete"]:
        return Figure("Supervised tokens", f"{estimate['num_supervised_tokens']:,}", (share, *_name_job(estimate)))
    counted = f"counted in {estimate['num_counted']:,} of the examples"
    rounded = float(f"{estimate['num_supervised_tokens']:.3g}")
    return Figure("Supervised tokens", f"about {rounded:,.0f}", (share, counted, *_name_job(estimate)))


def _show_steps(estimate: Mapping[str, Any]) -> Figure:
    if estimate["num_steps"] is None:
        return Figure("Steps", "unknown", (_NO_TIME["unknown steps"],))
    if not estimate["num_epochs"]:
        return Figure("Steps", f"{estimate['num_steps']:,}")
    epochs = f"{estimate['num_epochs']:.2f}".rstrip("0").rstrip(".")
    plural = "" if epochs == "1" else "s"
    of_job = f" for job {estimate['job']}" if estimate["job"] else ""
    note = f"{epochs} epoch{plural} of {estimate['steps_per_epoch']:,}{of_job}"
    return Figure("Steps", f"{estimate['num_steps']:,}", (note,))


def _show_time(estimate: Mapping[str, Any]) -> Figure:
    if estimate["why_no_time"] is not None:
        return Figure("Expected time", "unknown", (_NO_TIME[estimate["why_no_time"]],))
    least, most = (show_duration(estimate[name]) for name in ("least_s", "most_s"))
    source = f"from {_SPEEDS[estimate['speeds']]}, without loading, evaluations and checkpoints"
    alike = ("if the examples of all jobs are as long",) if estimate["job"] else ()
    return Figure("Expected time", show_duration(estimate["train_s"]), (f"{least} to {most}", source, *alike))


def _name_job(estimate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return of which job figures are, where the jobs of a sweep train on other data."""
    return (f"of job {estimate['job']}",) if estimate["job"] else ()


def _explain_job(estimate: Mapping[str, Any]) -> tuple[str, ...]:
    return (f"chosen as the longest of {estimate['num_datasets']} datasets",) if estimate["job"] else ()


def _show_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
