"""The head of the pages "Chat" and "Export": a run that has an adapter, and the devices to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError
from lorashard.runtime.gpus import list_gpus

from ..app_context import AppContext
from ..drawing.markup import Markup, link, note, tag
from ..running.packing import find_adapter_run, has_adapter, list_checkpoint_names

_LAST = ("last", "")


def make_choice() -> tuple[gr.Dropdown, gr.Dropdown, gr.CheckboxGroup, gr.Number]:
    """Add the fields for the run, its checkpoint, its GPUs and its CPU ranks to the row that is being built."""
    run = gr.Dropdown([], label="Run", scale=3, min_width=180)
    checkpoint = gr.Dropdown([_LAST], value="", label="Checkpoint", scale=2, min_width=140)
    gpus = gr.CheckboxGroup([], label="GPUs (none selected: the CPU)", visible=False, scale=3, min_width=180)
    ranks = gr.Number(1, label="CPU ranks", precision=0, scale=1, min_width=100)
    return run, checkpoint, gpus, ranks


def offer_checkpoints(context: AppContext, name: str | None, chosen: str = "") -> dict[str, Any]:
    """Return an update of the field for the checkpoint after another run was chosen.

    Args:
        chosen: the checkpoint to choose while it is there; else the run's last adapter is.
    """
    try:
        names = list_checkpoint_names(find_adapter_run(context.root, name))
    except ConfigError:
        names = []
    return gr.update(choices=[_LAST, *((name, name) for name in names)], value=chosen if chosen in names else "")


def open_page(
    context: AppContext, request: gr.Request, advice: str, other: tuple[str, str], selects_gpus: bool = False
) -> list[Any]:
    """Return updates of what to do without an adapter, of the page's body, of the run and of the GPUs.

    Args:
        advice, other: as for `_draw_empty`.
        selects_gpus: whether all GPUs are selected at first.
    """
    names = [row.name for row in context.runs.list_with_jobs() if has_adapter(context.root / row.name)]
    asked_for = request.query_params.get("run", "")
    if not names or (asked_for and asked_for not in names):
        empty = gr.update(value=_draw_empty(asked_for, names, advice, other), visible=True)
        return [empty, gr.skip(), gr.skip(), gr.skip()]
    ids = [gpu.index for gpu in list_gpus()]
    gpus = gr.update(choices=[(f"GPU {i}", i) for i in ids], value=ids if selects_gpus else [], visible=bool(ids))
    return [gr.skip(), gr.update(visible=True), gr.update(choices=names, value=asked_for or names[0]), gpus]


def _draw_empty(asked_for: str, names: Sequence[str], advice: str, other: tuple[str, str]) -> Markup:
    """Return what to do if there is no adapter.

    Args:
        asked_for: the run that has none; empty if no run has one.
        names: the runs that have one.
        advice: what an adapter is needed for here.
        other: the page and the text of the link to the other runs.
    """
    if asked_for:
        first = note(f"The run {asked_for!r} has no adapter yet: it saves one at its first checkpoint.", "warning")
        more = [link("run", "Open the run", "button", name=asked_for)]
        more += [link(*other, "button")] if names else []
        return tag("div", first, tag("div", *more, class_="links"))
    text = tag("p", tag("strong", "No run has an adapter yet."), f" {advice}")
    return tag("div", text, tag("p", link("new", "New run", "button button-primary")))


def find_device_words(gpus: Sequence[int], ranks: float | None) -> list[str]:
    """Return the devices as command-line options.

    Raises:
        ConfigError: there are none.
    """
    if gpus:
        return ["--gpus", ",".join(str(index) for index in sorted(gpus)) + ("," if len(gpus) == 1 else "")]
    if ranks is None:
        raise ConfigError(option="cpu", expected="a number of ranks", found="nothing")
    return ["--cpu", str(int(ranks))]
