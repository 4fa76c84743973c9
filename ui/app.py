"""The app: its pages and its endpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import gradio as gr
import gradio.routes
from fastapi import FastAPI
from jinja2 import ChoiceLoader, DictLoader
from starlette.responses import Response

from . import api
from .app_context import AppContext
from .drawing.frame import draw_frame
from .drawing.theme import FAVICON, build_head, build_theme
from .pages import chat, compare, export, new_run, run, runs, sweep
from .pages.titles import make_title

# Per event, so that two tabs and their timers do not wait for each other. What must not run twice takes a lock.
_MAX_AT_ONCE = 8
# In all: a question to a model or a worker may hold a thread for minutes, while other pages' timers need theirs.
_MAX_THREADS = 200
_MAX_SESSIONS = 1000
# How often an idle queue looks for events, and for what `gr.Progress` reports, which no page uses. Gradio's 1 and 10 ms
# take a tenth of a core of a server that nobody asks.
_POLL_S = 0.05
_PROGRESS_POLL_S = 1.0
_CLEAR_UPLOADS_S = (3600, 24 * 3600)  # every hour, delete what is a day old; datasets are kept elsewhere
_FIRST_PAGE = "Runs"
# Beside the first: each page's title, path and function, and whether it is in the navigation bar.
_PAGES = (
    ("New run", "new", new_run.build, True),
    ("Run", "run", run.build, False),  # which is reached from the table of all
    ("Sweep", "sweep", sweep.build, False),
    ("Compare", "compare", compare.build, True),
    ("Chat", "chat", chat.build, True),
    ("Export", "export", export.build, True),
)


def build_app(context: AppContext) -> gr.Blocks:
    """Return the app, not launched."""
    with gr.Blocks(title="lorashard", analytics_enabled=False, delete_cache=_CLEAR_UPLOADS_S) as app:
        _build_page(_FIRST_PAGE, runs.build, context)
        api.build(context)
    for title, path, build, is_in_navbar in _PAGES:
        with app.route(title, path, show_in_navbar=is_in_navbar):
            _build_page(title, build, context)
    app.max_threads = _MAX_THREADS
    app.queue(default_concurrency_limit=_MAX_AT_ONCE)
    app._queue.sleep_when_free = _POLL_S
    app._queue.progress_update_sleep_when_free = _PROGRESS_POLL_S
    return app


def _build_page(title: str, build: Callable[[AppContext], None], context: AppContext) -> None:
    gr.Navbar(main_page_name=_FIRST_PAGE)
    make_title(title)
    build(context)


def _add_frame(frame: str) -> None:
    """Put a page's frame into what Gradio serves: its `head` is added by a script, when the page is nearly there."""
    environment, name = gradio.routes.templates.env, "frontend/index.html"
    assert environment.loader is not None
    source = environment.loader.get_source(environment, name)[0]
    before, app, after = source.partition("<gradio-app")
    changed = DictLoader({name: f"{before}{frame}{app}{after}"})
    if frame not in before:
        environment.loader = ChoiceLoader([changed, environment.loader])


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
    _add_frame(draw_frame({_FIRST_PAGE: "."} | {title: path for title, path, _, is_shown in _PAGES if is_shown}))
    # Each tab would hold one of the six connections that a browser opens to a server. The oldest sessions are dropped.
    blocks.config["connect_heartbeat"] = False
    # Only then does Gradio check that a file named by a browser was uploaded.
    blocks.has_launched = True
    return parent, frozenset(f"/{page}" for page, *_ in blocks.pages)
