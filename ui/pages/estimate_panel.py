"""Before the start: how many examples, tokens and steps the form's run has, how long it takes, and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError
from lorashard.planning.estimate_words import Figure, list_figures

from ..app_context import AppContext
from ..drawing import markup
from .refreshing import QUIET, make_html

_WAITS = "Steps and expected time appear once a model and a dataset are chosen and all options are valid."
# What was planned or counted for other options than the form has now is dimmed.
_CURRENT, _STALE = ["markup"], ["markup", "stale"]


class EstimatePanel:
    """The estimate's components, built where the page is.

    Attributes:
        question: the words to plan for, and those that decide what the examples are; each change is answered.
    """

    def __init__(self, context: AppContext) -> None:
        self.question = gr.State(None)
        self._context = context
        self._shown = make_html(markup.note(_WAITS), elem_id="estimate")

    def connect(self, machine: Sequence[gr.components.Component]) -> None:
        """Answer each question for the machine that is planned for.

        Args:
            machine: `PlanPanel.machine`.
        """
        context, failed = self._context, gr.update(elem_classes=_CURRENT)

        def wait() -> Iterator[dict[str, Any]]:
            yield gr.update(elem_classes=_STALE)
            context.worker.wait_for_rest()

        def estimate(question: tuple[list[str], list[str]] | None, gpu_type: str, count: int) -> dict[str, Any]:
            if question is None:
                return gr.update(value=markup.note(_WAITS), elem_classes=_CURRENT)
            plan_words, data_words = question
            try:
                found = context.worker.estimate(plan_words, gpu_type or None, count, data_words)
            except ConfigError as error:
                return failed | {"value": markup.note(f"Not known: {error}", "warning")}
            return gr.update(value=draw_figures(list_figures(found)), elem_classes=_CURRENT)

        inputs = [self.question, *machine]
        asking = [part.change for part in inputs]
        options: dict[str, Any] = {"outputs": self._shown, "trigger_mode": "always_last", **QUIET}
        # Once nobody types any more, the newest question is answered.
        gr.on(asking, wait, None, **options).then(estimate, inputs, **options)


def draw_figures(figures: Sequence[Figure]) -> str:
    """Draw figures large, each between its name and its first note, and the other notes in a line below."""
    terms = [
        markup.tag(
            "div",
            markup.tag("dt", figure.name),
            markup.tag("dd", figure.value, class_="value"),
            *(markup.tag("dd", note) for note in figure.notes[:1]),
        )
        for figure in figures
    ]
    others = [f"{figure.name} {note}." for figure in figures for note in figure.notes[1:]]
    return markup.tag("dl", *terms, class_="figures") + markup.tag("p", " ".join(others), class_="figure-notes")
