"""A real `lorashard ui` process, and what a test asks of a page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from gradio_client import Client
from playwright.sync_api import Page

from helpers.waiting import wait_until

WAIT_MS = 60_000  # for what takes a second: machines that run tests are busy
_MARK = "LORASHARD_TEST_ROOT"  # in the environment of a server, and so of all that it starts


@dataclass
class UiServer:
    """A server over a folder of runs."""

    root: Path
    url: str  # ends with a slash
    token: str  # empty where none is asked for
    process: subprocess.Popen[str]
    log_path: Path

    @property
    def headers(self) -> dict[str, str]:
        """What a program sends so that it is let in."""
        return {"Authorization": f"Bearer {self.token}"}

    def connect(self) -> Client:
        """Return a program's client of the endpoints."""
        return Client(self.url, headers=self.headers, verbose=False)

    @classmethod
    def start(cls, place: Path, *options: str, deadline_s: float = 90, **variables: str) -> UiServer:
        """Start one in a folder, over its `runs`, on a free port, and return when it answers.

        Args:
            variables: of its environment; nobody is logged in to the hub there.
        """
        root = place / "runs"
        log_path = place / "ui.log"
        environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        environment |= {_MARK: str(root), "HF_HOME": str(place / "hf")}
        begin = log_path.stat().st_size if log_path.exists() else 0
        with log_path.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lorashard", "ui", "--root", str(root), "--port", "0", *options],
                cwd=place,  # where the examples' paths count from
                env=environment | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        server = cls(root, "", "", process, log_path)
        wait_until(
            lambda: process.poll() is not None or "http://" in log_path.read_text()[begin:],
            lambda: f"the server did not start: {log_path.read_text()}",
            deadline_s,
        )
        found = re.findall(r"http://\S+", log_path.read_text()[begin:])
        assert process.poll() is None and found, log_path.read_text()
        server.url, _, server.token = found[0].partition("?token=")
        return server

    def stop(self, number: int = signal.SIGTERM, deadline_s: float = 20) -> int:
        """End the server alone, as Ctrl-C does; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(deadline_s)

    def list_processes(self) -> list[psutil.Process]:
        """Return the server and all that it has started, also what no longer is its child."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                is_ours = process.environ().get(_MARK) == str(self.root)
            except psutil.Error:  # it has ended, or is somebody else's
                continue
            if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def end_all(self) -> None:
        """End the server, and all that it has started."""
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
        for process in self.list_processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    return next((path for path in found if path), None)


def makes_pictures() -> bool:
    """Whether the pictures of docs/img are to be made anew: then pages show runs of the real demo."""
    return bool(os.environ.get("LORASHARD_SCREENSHOTS"))


def open_page(page: Page, path: str = "", width: int | None = None) -> None:
    """Go to a page of the app, such as `run?name=first`, and wait until it is drawn.

    Args:
        width: of the window, in pixels; not given: as it is.
    """
    if width is not None:
        page.set_viewport_size({"width": width, "height": 900})
    page.goto(path)
    page.wait_for_selector(".gradio-container main, .gradio-container .main, .gradio-container h1")
    page.wait_for_function("!document.querySelector('.loading, .wrap.generating')")


def check_no_overflow(page: Page) -> None:
    """Fail where the page must be pushed sideways to be read."""
    excess = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert excess <= 0, f"the page is {excess} pixels wider than its window of {page.viewport_size}"
