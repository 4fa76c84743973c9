"""The first examples of the form's dataset, as the model will see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError

from ..app_context import AppContext
from ..drawing import markup
from ..drawing.preview_cards import describe_examples, draw_examples
from ..form.finding import Finding
from .new_run_updates import find_bad_rows
from .refreshing import QUIET, make_html

_NUM_ROWS = 3
_MOST_TOKENS = 4000  # of a sequence, that are sent to the browser
_WAITS = "The first examples appear once a model and a dataset are chosen and all options are valid."


class PreviewPanel:
    """The preview's components, built where the page is.

    Attributes:
        question: the method and the words, as `new_run_updates.ask_preview` gives them; each change is answered.
        finding: what is wrong by the newest answer, a `Finding`; the page's summary and fields tell it.
    """

    def __init__(self, context: AppContext) -> None:
        self.question, self.finding = gr.State(None), gr.State(Finding())
        gr.Markdown("## What the model will see")
        status = make_html(markup.note(_WAITS), elem_id="preview-status")
        cards = make_html(elem_id="preview")

        def preview(question: tuple[str, list[str]] | None) -> Iterator[list[Any]]:
            if question is None:
                yield [markup.note(_WAITS), "", Finding()]
                return
            method, words = question
            yield [markup.note("Reading the first examples \u2026"), gr.skip(), gr.skip()]
            try:
                rows = context.worker.preview(words, _NUM_ROWS, _MOST_TOKENS)
            except ConfigError as error:
                yield [markup.note(str(error), "error"), "", Finding.of_error(question, error)]
                return
            yield [describe_examples(rows, method), draw_examples(rows), find_bad_rows(question, rows)]

        outputs = [status, cards, self.finding]
        self.question.change(preview, self.question, outputs, trigger_mode="always_last", **QUIET)
