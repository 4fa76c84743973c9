"""Sends a browser what changed since it was last sent something, and nothing else.

What a browser has is kept in the page itself, as a digest of each part: the server may be started again, and a page
that was open before goes on as if nothing had been.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import gradio as gr
import plotly.graph_objects as go


class Parts:
    """The components of a page that are refreshed, by name."""

    def __init__(self, **components: Any) -> None:
        self.seen = gr.Textbox(visible=False, value="{}")
        self._components = components

    @property
    def outputs(self) -> list[Any]:
        """What a handler that returns `send`'s answer has for outputs."""
        return [self.seen, *self._components.values()]

    def send(self, seen: str, values: Mapping[str, Any]) -> dict[Any, Any]:
        """Return, for Gradio, those values that the browser does not have already.

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


def make_html(value: str = "", js_on_load: str | None = None, visible: bool = True) -> gr.HTML:
    """Return a place for `markup`, which looks as `style` has it and not as Gradio would have prose."""
    return gr.HTML(value, js_on_load=js_on_load, visible=visible, apply_default_css=False, elem_classes="markup")


def show_if_any(text: str) -> dict[str, Any]:
    """Return an update with a text, which is hidden where there is none: an empty component still takes room."""
    return gr.update(value=text, visible=bool(text))
