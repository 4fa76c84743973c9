"""Refresh a page: send the browser what has changed since the last refresh, and nothing else.

The page itself keeps a digest of each part that it shows, so that an open page survives a restart of the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import gradio as gr
import plotly.graph_objects as go

# Of an event: no spinner over what it changes, and no endpoint for programs.
QUIET: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": [], "api_visibility": "private"}


class Parts:
    """The components of a page that are refreshed, by name."""

    def __init__(self, **components: Any) -> None:
        self.seen = gr.Textbox(visible=False, value="{}")
        self._components = components

    @property
    def outputs(self) -> list[Any]:
        """The outputs of a handler that returns the result of `send`."""
        return [self.seen, *self._components.values()]

    def send(self, seen: str, values: Mapping[str, Any]) -> dict[Any, Any]:
        """Return, for Gradio, the values that the browser does not have yet.

        Args:
            seen: the value of `self.seen`.
            values: by name of a component; a figure, a value, or a `gr.update(...)`.
        """
        digests = json.loads(seen or "{}")
        changed: dict[Any, Any] = {}
        for name, value in values.items():
            if isinstance(value, go.Figure):
                value = value.to_json()
            digest = hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
            if digests.get(name) != digest:
                digests[name] = digest
                changed[self._components[name]] = value
        return changed | {self.seen: json.dumps(digests)} if changed else gr.skip()


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
