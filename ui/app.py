"""The app: its pages and its endpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import gradio as gr
from fastapi import FastAPI
from starlette.responses import Response

from . import api
from .app_context import AppContext
from .drawing.theme import FAVICON, build_head, build_theme
from .pages import chat, compare, export, new_run, run, runs

# Per event, so that two tabs and their timers do not wait for each other. What must not run twice takes a lock.
_MAX_AT_ONCE = 8
# In all: a question to a model or a worker may hold a thread for minutes, while other pages' timers need theirs.
_MAX_THREADS = 200
_MAX_SESSIONS = 1000
# How often an idle queue polls; Gradio's 1 ms takes a tenth of a core while idle.
_POLL_S = 0.02
_CLEAR_UPLOADS_S = (3600, 24 * 3600)  # every hour, delete what is a day old; datasets are kept elsewhere


def build_app(context: AppContext) -> gr.Blocks:
    """Return the app, not launched."""
    with gr.Blocks(title="lorashard", analytics_enabled=False, delete_cache=_CLEAR_UPLOADS_S) as app:
        _build_page(runs.build, context)
        api.build(context)
    for title, path, build in (
        ("New run", "new", new_run.build),
        ("Run", "run", run.build),
        ("Compare", "compare", compare.build),
        ("Chat", "chat", chat.build),
        ("Export", "export", export.build),
    ):
        with app.route(title, path, show_in_navbar=path != "run"):  # one run's page is reached from the table of all
            _build_page(build, context)
    app.max_threads = _MAX_THREADS
    app.queue(default_concurrency_limit=_MAX_AT_ONCE)
    app._queue.sleep_when_free = _POLL_S
    return app


def _build_page(build: Callable[[AppContext], None], context: AppContext) -> None:
    gr.Navbar(main_page_name="Runs")
    build(context)


def build_asgi(context: AppContext, max_upload_size: str) -> tuple[FastAPI, frozenset[str]]:
    """Return the ASGI app, and the paths of its pages, such as `/new`.

    Args:
        max_upload_size: bytes, or such as `2GB`.
    """
    blocks = build_app(context)
    blocks.state_session_capacity = _MAX_SESSIONS
    parent = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @parent.get("/favicon.ico")
    def send_favicon() -> Response:
        return Response(FAVICON, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="SSR mode is not supported")  # and not requested
        gr.mount_gradio_app(
            parent,
            blocks,
            path="/",
            footer_links=[],
            run_history=False,
            show_error=False,  # `gr.Error` is shown all the same
            max_file_size=max_upload_size.replace(" ", "").replace("i", "").lower(),
            ssr_mode=False,
            enable_monitoring=False,
            pwa=False,
            mcp_server=False,
            theme=build_theme(),
            head=build_head(),
        )
    # Each tab would hold one of the six connections that a browser opens to a server. The oldest sessions are dropped.
    blocks.config["connect_heartbeat"] = False
    # Only then does Gradio check that a file named by a browser was uploaded.
    blocks.has_launched = True
    return parent, frozenset(f"/{page}" for page, *_ in blocks.pages)
