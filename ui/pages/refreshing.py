"""Refresh a page: send the browser what has changed since the last refresh, and nothing else.

The page itself keeps a digest of each part that it shows, so that an open page survives a restart of the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import gradio as gr
import plotly.graph_objects as go

# Of an event: no spinner over what it changes, and no endpoint for programs.
QUIET: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}
_PRESSED = ""  # beside the names of components


class Parts:
    """The components of a page that are refreshed, by name."""

    def __init__(self, **components: Any) -> None:
        self._seen = gr.Textbox(visible=False, value="{}")
        self._components = components

    def refresh_by(self, timer: gr.Timer, refresh: Callable[..., Any], inputs: list[Any]) -> dict[str, Any]:
        """Refresh the page whenever a timer ticks; return what an event is given that refreshes it too.

        All of it is one event, of which one question is under way at a time and the newest is always asked: answers to
        several could overtake one another, and the page would show what had been chosen before.

        Args:
            refresh: called with what `send` takes as `seen` and the values of `inputs`; returns what `send` returns.
        """
        asked = gr.Textbox("0", visible="hidden")
        triggers, every = [timer.tick, asked.change], [self._seen, *inputs]
        gr.on(triggers, refresh, every, [self._seen, *self._components.values()], trigger_mode="always_last", **QUIET)
        return {"fn": None, "inputs": asked, "outputs": asked, "js": "(times) => String(+times + 1)", **QUIET}

    def send(self, seen: str, values: Mapping[str, Any], pressed: str = "") -> dict[Any, Any]:
        """Return, for Gradio, the values that the browser does not have yet.

        Args:
            seen: what the browser has.
            values: by name of a component; a figure, a value, or a `gr.update(...)`.
            pressed: what was pressed last. The browser itself may have changed what it shows then: all is sent again.
        """
        digests = json.loads(seen)
        digests = digests if was_sent_after(seen, pressed) else {_PRESSED: pressed}
        changed: dict[Any, Any] = {}
        for name, value in values.items():
            if isinstance(value, go.Figure):
                value = value.to_json()
            digest = hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
            if digests.get(name) != digest:
                digests[name] = digest
                changed[self._components[name]] = value
        return changed | {self._seen: json.dumps(digests)} if changed else gr.skip()


def was_sent_after(seen: str, pressed: str) -> bool:
    """Tell whether the browser has an answer to what was pressed last."""
    return json.loads(seen).get(_PRESSED, "") == pressed


def make_html(
    value: str = "", js_on_load: str | None = None, visible: bool = True, elem_id: str | None = None
) -> gr.HTML:
    """Return a component for markup, styled by `style` and not as Gradio's prose."""
    return gr.HTML(
        value, js_on_load=js_on_load, visible=visible, elem_id=elem_id, apply_default_css=False, elem_classes="markup"
    )


def show_if_any(text: str) -> dict[str, Any]:
    """Return an update with a text, hidden if it is empty: an empty component still takes space."""
    return gr.update(value=text, visible=bool(text))
