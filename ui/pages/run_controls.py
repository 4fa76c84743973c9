"""The buttons of the page "Run", and the replies to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import gradio as gr

from lorashard.errors import UserError

from ..app_context import AppContext
from ..reading.runs import RunReader
from ..reading.summaries import Summary
from ..running import control
from ..running.packing import has_adapter
from . import run_markup
from .refreshing import QUIET, make_html, show_if_any


class Controls:
    """The buttons, the confirmations that two of them ask for, and the place of the reply.

    Attributes:
        pressed: what was pressed last, as `run_markup.draw_answer` takes it.
        parts: what `show_controls` gives values for.
    """

    def __init__(self, context: AppContext, name: gr.Textbox) -> None:
        self._context = context
        self._name = name
        self.pressed = gr.Textbox(visible=False, value="")
        with gr.Row():
            self._stop = gr.Button("Stop and save", variant="primary", size="sm", min_width=120)
            self._save = gr.Button("Save now", size="sm", min_width=120)
            self._resume = gr.Button("Resume", size="sm", min_width=120)
            self._ask_stop_now = gr.Button("Stop now", size="sm", min_width=120)
            self._ask_delete = gr.Button("Delete", size="sm", min_width=120)
        with gr.Group(visible=False) as self._stop_now_question:
            gr.Markdown("Stop now? Training since the last checkpoint is lost.", padding=True)
            with gr.Row():
                self._stop_now = gr.Button("Stop without saving", variant="stop", size="sm")
                self._keep_going = gr.Button("Keep running", size="sm")
        with gr.Group(visible=False) as self._delete_question:
            self._typed = gr.Textbox(
                label="To delete the run permanently, type its name",
                info="Its adapter, checkpoints, logs and metrics are deleted.",
            )
            with gr.Row():
                self._delete = gr.Button("Delete permanently", variant="stop", size="sm")
                self._keep = gr.Button("Keep the run", size="sm")
        answer = make_html()
        reason = make_html()
        links = make_html()
        self.parts: dict[str, Any] = {
            "stop": self._stop, "save": self._save, "resume": self._resume, "ask_stop_now": self._ask_stop_now,
            "ask_delete": self._ask_delete, "answer": answer, "reason": reason, "links": links,
        }  # fmt: skip

    def connect(self, refresh: dict[str, Any]) -> None:
        """Have every button do its work and then refresh the page.

        Args:
            refresh: what an event is given for it.
        """
        root = self._context.root

        def press(word: str, act: Callable[[str], None]) -> Callable[[str], str]:
            def handle(name: str) -> str:
                said: dict[str, Any] = {"word": word}
                try:
                    reader = self._context.runs.get(name)
                    said["saved"] = max((point.step for point in reader.checkpoints()), default=-1)
                    act(name)
                except UserError as error:
                    said["error"] = str(error)
                return json.dumps(said)

            return handle

        actions: dict[str, tuple[gr.Button, Callable[[str], None]]] = {
            "stop": (self._stop, lambda name: control.stop_run(root, name)),
            "stop_now": (self._stop_now, lambda name: control.stop_run(root, name, now=True)),
            "save": (self._save, lambda name: control.save_run(root, name)),
            "resume": (self._resume, self._context.resume_run),
        }
        for word, (button, act) in actions.items():
            button.click(press(word, act), self._name, self.pressed, **QUIET).then(**refresh)

        def delete(name: str, typed: str) -> tuple[str, Any]:
            if typed.strip() != name:
                said = {"word": "delete", "error": f"To delete the run, type its name: {name}"}
                return json.dumps(said), gr.skip()
            return press("delete", self._context.delete_run)(name), gr.update(visible=False)

        outputs = [self.pressed, self._delete_question]
        gr.on([self._delete.click, self._typed.submit], delete, [self._name, self._typed], outputs, **QUIET).then(
            **refresh
        )
        _toggle(self._ask_stop_now, self._stop_now_question, True)
        _toggle(self._keep_going, self._stop_now_question, False)
        _toggle(self._stop_now, self._stop_now_question, False)
        _toggle(self._ask_delete, self._delete_question, True)
        _toggle(self._keep, self._delete_question, False)


def show_controls(context: AppContext, reader: RunReader, summary: Summary, pressed: str) -> dict[str, Any]:
    """Return the values of `Controls.parts`."""
    is_live = summary.is_live
    reason = None if is_live else control.explain_no_resume(context.root, summary.name)
    can_stop = is_live and summary.state != "stopping"
    return {
        "stop": gr.update(interactive=can_stop),
        "ask_stop_now": gr.update(interactive=is_live),
        "save": gr.update(interactive=summary.state == "running"),
        "resume": gr.update(interactive=not is_live and reason is None),
        "ask_delete": gr.update(interactive=not is_live),
        "answer": show_if_any(run_markup.draw_answer(pressed, summary, reader.checkpoints())),
        "reason": show_if_any(run_markup.draw_reason(reason)),
        "links": run_markup.draw_links(summary, has_adapter(reader.folder)),
    }


def _toggle(button: gr.Button, question: gr.Group, is_visible: bool) -> None:
    button.click(lambda: gr.update(visible=is_visible), None, question, **QUIET)
