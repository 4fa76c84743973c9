"""Have the process that plans ready before it is asked."""

from __future__ import annotations

from contextlib import suppress

import gradio as gr

from lorashard.errors import ConfigError

from ..app_context import AppContext
from .refreshing import QUIET


def warm_up_on_open(context: AppContext) -> None:
    """Start the process that plans when the page that is being built is opened in a browser."""

    def warm_up() -> None:
        with suppress(ConfigError):  # a run was started, or the first plan says what is wrong
            context.worker.warm_up()

    page = gr.context.Context.root_block
    assert page is not None
    page.load(warm_up, None, None, **QUIET)
