"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from .choose import Plan, name_placement
from .costs import Row

_HEADER = (
    "placement",
    "base",
    "slots",
    "workspace",
    "adapter",
    "activations",
    "logits",
    "peak",
    "host",
    "gathered/step",
    "copied/step",
    "step",
    "tokens/s",
    "dataset",
    "fits",
)


def render_plan(plan: Plan, num_ranks: int) -> str:
    """Return a plan as a table for the terminal; sizes are GiB of one rank."""
    rows = [_render_row(row, num_ranks) for row in plan.rows]
    unused = set() if any(row.dataset_s is not None for row in plan.rows) else {"dataset"}
    unused |= set() if any(row.workspace_bytes for row in plan.rows) else {"workspace"}
    columns = [i for i, name in enumerate(_HEADER) if name not in unused]
    cells = [[row[i] for i in columns] for row in (_HEADER, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [f"{plan.model}, on {plan.cluster}, {plan.free_bytes / 2**30:.1f} GiB for each rank", ""]
    for index, row in enumerate(cells):
        mark = "> " if index - 1 == plan.chosen and index else "  "
        words = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append((mark + "  ".join(words)).rstrip())
    sentences = [plan.reason, *(str(part) for part in (plan.checkpointing, plan.sweep) if part)]
    lines += ["", *sentences, "", *_LEGEND, *([_WORKSPACE] if "workspace" not in unused else [])]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


_LEGEND = (
    "GiB of one rank. peak = base + slots + adapter (with gradients and optimizer) + the larger of activations and "
    "logits with what layers saved.",
    "Bytes of the base and of its traffic are exact, activations traced from the model's code, times estimates.",
)
_WORKSPACE = "workspace: what a quantized weight is unpacked to while an operation reads it, in the peak too."


def _render_row(row: Row, num_ranks: int) -> Sequence[str]:
    host = row.host_bytes or row.file_bytes
    return (
        name_placement(row.placement, num_ranks),
        _gib(row.rest_bytes),
        _gib(row.slot_bytes),
        _gib(row.workspace_bytes),
        _gib(row.adapter_bytes),
        _gib(row.activation_bytes),
        _gib(row.logits_bytes),
        _gib(row.peak_bytes),
        (_gib(host) + (" shared" if row.file_bytes else "")) if host else "-",
        _gib(row.gathered_bytes) if row.gathered_bytes else "-",
        _gib(row.copied_bytes) if row.copied_bytes else "-",
        f"{row.step_s:.2f} s",
        f"{row.tokens_per_s:,.0f}",
        _duration(row.dataset_s),
        "yes" if row.fits else f"no: {row.lacks}",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}" if num_bytes < 10 * 2**30 else f"{num_bytes / 2**30:.1f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"
