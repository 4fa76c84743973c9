"""The buttons of the page "Run", and the replies to them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import gradio as gr

from lorashard.errors import ConfigError, UserError
from lorashard.runs.root import is_job

from ..app_context import AppContext
from ..drawing.markup import note
from ..reading.runs import RunReader
from ..reading.states import is_ended_at_once
from ..reading.summaries import Summary
from ..running import control
from ..running.packing import has_adapter
from . import run_markup
from .refreshing import QUIET, make_html, show_if_any

# At once, without asking the server: the button that was pressed is disabled, and a note stands in place of the reply.
_HEARD = """() => [
  {__type__: 'update', interactive: false}, {__type__: 'update', visible: true, value: NOTE},
]"""
# Where a run was deleted there is nothing more to see on its page.
_LEAVE = """(pressed, name) => {
  const said = JSON.parse(pressed || '{}');
  if (said.word === 'delete' && !said.error) location.assign('./?deleted=' + encodeURIComponent(name));
}"""


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
            self._stop = gr.Button("Stop and save", size="sm", min_width=120)
            self._save = gr.Button("Save now", size="sm", min_width=120)
            self._resume = gr.Button("Resume", size="sm", min_width=120)
            self._ask_stop_now = gr.Button("Stop now", size="sm", min_width=120)
            self._ask_delete = gr.Button("Delete", size="sm", min_width=120)
        links = make_html()
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
        self._answer = answer = make_html()
        reason = make_html()
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
        actions: dict[str, tuple[gr.Button, str, Callable[[str], None]]] = {
            "stop": (self._stop, "Asked to stop\u2026", lambda name: control.stop_run(root, name)),
            "stop_now": (
                self._stop_now, "Asked to stop now\u2026", lambda name: control.stop_run(root, name, now=True)
            ),
            "save": (self._save, "Asked to save\u2026", lambda name: control.save_run(root, name)),
            "resume": (self._resume, "Resuming\u2026", self._context.resume_run),
        }  # fmt: skip
        for word, (button, words, act) in actions.items():
            heard = _HEARD.replace("NOTE", json.dumps(note(words)))
            shown = self._ask_stop_now if word == "stop_now" else button
            button.click(None, None, [shown, self._answer], js=heard, **QUIET)
            press = partial(self._press, word, act)
            button.click(press, self._name, self.pressed, **QUIET).then(**refresh)

        def delete(name: str, typed: str) -> tuple[str, Any]:
            act = self._context.delete_run if typed.strip() == name else _refuse_delete
            return self._press("delete", act, name), gr.skip() if act is _refuse_delete else gr.update(visible=False)

        outputs = [self.pressed, self._delete_question]
        deleting = gr.on([self._delete.click, self._typed.submit], delete, [self._name, self._typed], outputs, **QUIET)
        deleting.then(None, [self.pressed, self._name], None, js=_LEAVE, **QUIET).then(**refresh)
        _toggle(self._ask_stop_now, self._stop_now_question, True)
        _toggle(self._keep_going, self._stop_now_question, False)
        _toggle(self._stop_now, self._stop_now_question, False)
        _toggle(self._ask_delete, self._delete_question, True)
        _toggle(self._keep, self._delete_question, False)

    def _press(self, word: str, act: Callable[[str], None], name: str) -> str:
        """Do what a button is for; return what `run_markup.draw_answer` takes."""
        said: dict[str, Any] = {"word": word, "time": time.time()}
        try:
            reader = self._context.runs.get(name)
            said["saved"] = max((point.step for point in reader.checkpoints()), default=-1)
            act(name)
        except UserError as error:
            said["error"] = str(error)
        with suppress(ConfigError):  # a run that is deleted has neither
            summary = self._context.runs.get(name).summary()
            said |= {"begin_s": summary.begin_s, "state": summary.state}
        return json.dumps(said)


def _refuse_delete(name: str) -> None:
    raise ConfigError(f"To delete the run, type its name: {name}")


def show_controls(context: AppContext, reader: RunReader, summary: Summary, pressed: str) -> dict[str, Any]:
    """Return the values of `Controls.parts`."""
    is_live = summary.is_live
    reason = None if is_live else control.explain_no_resume(context.root, summary.name)
    can_stop = is_live and summary.state != "stopping"
    can_resume = not is_live and reason is None
    answer = run_markup.draw_answer(pressed, summary, reader.checkpoints(), is_ended_at_once(reader.folder))
    is_of_sweep = is_job(reader.folder)  # which saves and resumes as a whole
    return {
        "stop": gr.update(interactive=can_stop, variant="primary" if can_stop else "secondary"),
        "ask_stop_now": gr.update(interactive=is_live and not is_of_sweep),
        "save": gr.update(interactive=summary.state == "running" and not is_of_sweep),
        "resume": gr.update(interactive=can_resume, variant="primary" if can_resume else "secondary"),
        "ask_delete": gr.update(interactive=not is_live),
        "answer": show_if_any(answer),
        "reason": show_if_any(run_markup.draw_reason(reason)),
        "links": run_markup.draw_links(summary, reader.folder, has_adapter(reader.folder)),
    }


def _toggle(button: gr.Button, question: gr.Group, is_visible: bool) -> None:
    button.click(lambda: gr.update(visible=is_visible), None, question, **QUIET)
