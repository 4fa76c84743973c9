"""A server and a browser for all of this folder's tests, and a finished run to look at."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from filelock import FileLock
from helpers import warm
from helpers.browser import WAIT_MS, UiServer, find_chromium, makes_pictures
from helpers.paths import ROOT as REPOSITORY
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Error,
    Frame,
    Page,
    Request,
    expect,
    sync_playwright,
)

# What Gradio says where a person goes on to another page: it closes the connection, and then, of each question that is
# still open, that there will be no answer. A question that comes after it opens another connection, of a session that
# the server has forgotten by then. Where a connection is lost in another way, the first is another error.
_LEFT = re.compile(r"AbortError: signal is aborted without reason\n(.*\n)*? *at \S+\.close \(")
_UNANSWERED = re.compile(r"Unexpected error (Connection errored out\.|404: Not Found)|.*/queue/data\?", re.DOTALL)
_WINDOW = {"width": 1400, "height": 900}
# Its sandbox needs rights that containers do not have, and the only pages are this project's. One process for all tabs
# compiles Gradio's scripts once, which takes two seconds of the processor's time.
_CHROMIUM_WORDS = ("--no-sandbox", "--disable-dev-shm-usage", "--process-per-site", "--renderer-process-limit=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs Chromium; the rest asks the server over its connections alone."""
    for item in items:
        if Path(__file__).parent in item.path.parents and _needs_chromium(item):
            item.add_marker(pytest.mark.browser)


def _needs_chromium(item: pytest.Item) -> bool:
    return "browser" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for Chromium before anything is made for a test that needs it: runs and servers take their time."""
    if _needs_chromium(item) and find_chromium() is None:
        reason = "no Chromium here: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder that all workers share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextmanager
def _made_once(folder: Path) -> Iterator[bool]:
    """Say whether a folder is still to be made, which the body then does; other workers wait."""
    with FileLock(f"{folder}.lock"):
        done = Path(f"{folder}.done")
        yield not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def demo(shared_folder) -> Path:
    """A folder with `examples/demo`, whose base is small where no pictures are made."""
    folder = shared_folder / "demo"
    with _made_once(folder) as is_wanted:
        if is_wanted and makes_pictures():
            shutil.copytree(
                REPOSITORY / "examples/demo", folder / "examples/demo", ignore=shutil.ignore_patterns("*.py")
            )
        elif is_wanted:
            from helpers.small_demo import copy_small_demo  # torch, which most of these tests do without

            copy_small_demo(folder / "examples/demo")
    return folder


@pytest.fixture(scope="session")
def demo_run(demo) -> Path:
    """A finished run of the demo: two CPU ranks, 12 steps, two evaluations with samples, two checkpoints."""
    run = demo / "run"
    with _made_once(run) as is_wanted:
        if is_wanted:
            _train_demo(demo)
    return run


def _train_demo(folder: Path) -> None:
    steps, half, rows = ("120", "20", "64") if makes_pictures() else ("12", "6", "4")
    prompt = json.loads((folder / "examples/demo/test.jsonl").read_text().splitlines()[0])["messages"][0]["content"]
    words = "--config examples/demo/demo.yaml --cpu 2 --dtype float32 --output_dir run --eval_dataset"
    words += f" examples/demo/test.jsonl --max_eval_samples {rows} --max_steps {steps} --logging_steps 1"
    words += f" --warmup_steps 2 --save_strategy steps --save_steps {half} --eval_strategy steps --eval_steps {half}"
    command = [sys.executable, "-m", "lorashard", "finetune", *words.split(), "--sample_prompts", json.dumps([prompt])]
    result = warm.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture(scope="session")
def make_place(demo, tmp_path_factory) -> Callable[[], Path]:
    """Make folders to start a server in: each has `examples/demo`, and no runs."""

    def make() -> Path:
        place = tmp_path_factory.mktemp("place")
        shutil.copytree(demo / "examples", place / "examples")
        return place

    return make


@pytest.fixture(scope="session")
def add_demo_run(demo_run) -> Callable[[Path, str], Path]:
    """Copy the finished run of the demo into a folder of runs, once: `add_demo_run(server.root, "first")`.

    Files share a server, in any order: a name that another test has given to a run of its own fails at once.
    """
    added: set[Path] = set()

    def add(root: Path, name: str) -> Path:
        if root / name not in added:
            shutil.copytree(demo_run, root / name)
            added.add(root / name)
        return root / name

    return add


@pytest.fixture(scope="package")
def ui_server(make_place) -> Iterator[UiServer]:
    """A server that all tests share: what one adds or deletes, others see. It may read examples/."""
    server = UiServer.start(make_place(), "--allow", "examples")
    yield server
    server.end_all()


@pytest.fixture(scope="module")
def start_ui(make_place) -> Iterator[Callable[..., UiServer]]:
    """Start servers for tests that end one, or need an empty folder of runs: `start_ui(*options, place=None)`.

    They and all that they started end after the file's tests.
    """
    servers: list[UiServer] = []

    def start(*options: str, place: Path | None = None, **variables: str) -> UiServer:
        servers.append(UiServer.start(place or make_place(), "--allow", "examples", *options, **variables))
        return servers[-1]

    yield start
    for server in servers:
        server.end_all()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A headless Chromium for all tests of this folder; its event loop would be in the way of other tests."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=_CHROMIUM_WORDS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def watch(browser) -> Callable[[Page, list[str]], None]:
    """Begin to note what a tab asks of other hosts, and its errors: `watch(tab, errors)`."""
    left: set[Page | None] = set()

    def watch(page: Page, errors: list[str]) -> None:
        def note_arrival(frame: Frame) -> None:
            if frame.parent_frame is None:
                left.discard(frame.page)

        def note_request(request: Request) -> None:
            url = urlsplit(request.url)
            if url.scheme not in ("data", "blob") and url.hostname not in ("127.0.0.1", "localhost"):
                errors.append(f"a request to another host: {request.url}")

        def note_console(message: ConsoleMessage) -> None:
            if message.type != "error":
                return
            told = f"{message.text} ({message.location.get('url')})"
            if _LEFT.match(message.text):
                left.add(message.page)
            elif not (message.page in left and _UNANSWERED.match(told)):
                errors.append(f"an error in the console: {told}")

        def note_error(error: Error) -> None:
            errors.append(f"an error of JavaScript: {error}")

        page.on("request", note_request)
        page.on("console", note_console)
        page.on("framenavigated", note_arrival)
        page.on("pageerror", note_error)

    return watch


def _open_context(browser: Browser, server: UiServer, **options: Any) -> BrowserContext:
    """Return a browser of its own that has visited the address which the server printed, where a token is asked for."""
    context = browser.new_context(base_url=server.url, **options)
    context.set_default_timeout(WAIT_MS)
    if server.token:
        context.request.get(server.url, params={"token": server.token})
    return context


@pytest.fixture(scope="package")
def shared_tab(browser, ui_server, watch) -> Iterator[tuple[Page, list[str]]]:
    """A tab on `ui_server` that stays open, so that its process does too, and what was noted of it."""
    context = _open_context(browser, ui_server, viewport=_WINDOW)
    page, errors = context.new_page(), []
    watch(page, errors)
    yield page, errors
    context.close()


@pytest.fixture
def page_errors() -> list[str]:
    """What was noted of the tabs that a test opened; a test that provokes an error takes it out."""
    return []


@pytest.fixture
def open_tab(browser, request, watch, page_errors) -> Iterator[Callable[..., Page]]:
    """Open tabs, all those on a server in one browser: `open_tab(server, color_scheme="dark", ...)`."""
    shared: dict[str, BrowserContext] = {}
    if "ui_server" in request.fixturenames:  # a file that needs it not would start it for nothing
        shared[request.getfixturevalue("ui_server").url] = request.getfixturevalue("shared_tab")[0].context
    own: dict[str, BrowserContext] = {}
    opened: list[Page] = []

    def open_one(server: UiServer, color_scheme: str = "light", viewport: dict[str, int] | None = None) -> Page:
        context = shared.get(server.url) or own.get(server.url)
        if context is None:
            context = own[server.url] = _open_context(browser, server)
        page = context.new_page()
        page.set_viewport_size(viewport or _WINDOW)
        page.emulate_media(color_scheme=color_scheme)
        opened.append(page)
        watch(page, page_errors)
        return page

    yield open_one
    for one in (*opened, *own.values()):
        one.close()
    assert page_errors == []


@pytest.fixture
def phone(browser, ui_server) -> Iterator[Page]:
    """A tab on `ui_server` that is touched and has no pointer, in a browser of its own."""
    context = _open_context(browser, ui_server, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    yield context.new_page()
    context.close()


@pytest.fixture
def page(shared_tab) -> Iterator[Page]:
    """The tab on `ui_server`, 1400 pixels wide. A request to another host or an error of JavaScript fails the test."""
    page, errors = shared_tab
    page.set_viewport_size(_WINDOW)
    page.emulate_media(color_scheme="light")
    errors.clear()
    yield page
    found = [*errors]
    page.goto("favicon.ico")  # which asks the server for nothing more
    assert found == []
