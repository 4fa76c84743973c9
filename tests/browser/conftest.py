"""A server for each file of tests, a browser, and runs to look at."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser_support import REPOSITORY, UiServer, find_chromium
from filelock import FileLock
from playwright.sync_api import Browser, ConsoleMessage, Error, Frame, Page, Request, expect, sync_playwright

# What Gradio says where a person goes on to another page: it closes the connection, and then, of each question that is
# still open, that there will be no answer. Where a connection is lost in another way, the first is another error.
_LEFT = re.compile(r"AbortError: signal is aborted without reason\n(.*\n)*? *at \S+\.close \(")
_UNANSWERED = "Unexpected error Connection errored out."


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def start_ui(tmp_path_factory) -> Iterator[Callable[..., UiServer]]:
    """Start servers, which may read examples/: `start_ui(*options, root=None)`.

    They and all that they started end after the file's tests.
    """
    servers: list[UiServer] = []

    def start(*options: str, root: Path | None = None) -> UiServer:
        servers.append(UiServer.start(root or tmp_path_factory.mktemp("ui") / "runs", "--allow", "examples", *options))
        return servers[-1]

    yield start
    for server in servers:
        server.end_all()


@pytest.fixture(scope="module")
def ui_server(start_ui) -> UiServer:
    """A server over an empty folder of runs, for all tests of a file."""
    return start_ui()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium for all tests of a file; its event loop would be in the way of other files' tests."""
    path = find_chromium()
    if path is None:
        reason = "no Chromium here: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    expect.set_options(timeout=20_000)  # machines that run tests are busy
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers do not have, and the only pages are this project's.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def page_errors() -> list[str]:
    """What pages asked of other hosts, and their errors; a test that provokes one takes it out."""
    return []


@pytest.fixture
def open_tab(browser, page_errors) -> Iterator[Callable[..., Page]]:
    """Open tabs, each of a browser of its own: `open_tab(server, color_scheme="dark", ...)`."""
    contexts = []
    left: set[Page | None] = set()

    def note_arrival(frame: Frame) -> None:
        if frame.parent_frame is None:
            left.discard(frame.page)

    def note_request(request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob") and url.hostname not in ("127.0.0.1", "localhost"):
            page_errors.append(f"a request to another host: {request.url}")

    def note_console(message: ConsoleMessage) -> None:
        if message.type != "error":
            return
        if _LEFT.match(message.text):
            left.add(message.page)
        elif not (message.page in left and message.text.startswith(_UNANSWERED)):
            page_errors.append(f"an error in the console: {message.text} ({message.location.get('url')})")

    def note_error(error: Error) -> None:
        page_errors.append(f"an error of JavaScript: {error}")

    def open_one(server: UiServer, **options: object) -> Page:
        options = {"viewport": {"width": 1400, "height": 900}, "base_url": server.url} | options
        context = browser.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", note_request)
        page.on("console", note_console)
        page.on("framenavigated", note_arrival)
        page.on("pageerror", note_error)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert page_errors == []


@pytest.fixture
def page(open_tab, ui_server) -> Page:
    """A tab on `ui_server`, 1400 pixels wide. A request to another host or an error of JavaScript fails the test."""
    return open_tab(ui_server)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory) -> Path:
    """The folder of a finished run of the demo: two CPU ranks, 12 steps, an evaluation, a checkpoint, samples."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # one run for all workers
    run = folder / "demo/demo"
    with FileLock(folder / "demo.lock"):
        if not (run / "done").exists():
            _make_demo_run(run)
            (run / "done").touch()
    return run


def _make_demo_run(run: Path) -> None:
    row = json.loads((REPOSITORY / "examples/demo/test.jsonl").read_text().splitlines()[0])
    prompts = json.dumps([row["messages"][0]["content"]])
    words = "--cpu 2 --max_steps 12 --logging_steps 1 --save_strategy steps --save_steps 6 --eval_strategy steps"
    words += " --eval_steps 6 --eval_dataset examples/demo/test.jsonl --max_eval_samples 16 --warmup_steps 2"
    command = [sys.executable, "-m", "lorashard", "finetune", "--config", "examples/demo/demo.yaml", *words.split()]
    command += ["--sample_prompts", prompts, "--output_dir", str(run)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture
def add_demo_run(demo_run) -> Callable[[Path, str], Path]:
    """Copy the finished run of the demo into a folder of runs: `add_demo_run(server.root, "first")`."""

    def add(root: Path, name: str) -> Path:
        return Path(shutil.copytree(demo_run, root / name, ignore=shutil.ignore_patterns("done")))

    return add
