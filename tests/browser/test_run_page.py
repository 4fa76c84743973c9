"""The page of one run: watched, stopped, deleted, and read in all of its tabs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import stand_in_run
from helpers.browser import check_no_overflow, open_page, shoot
from helpers.waiting import wait_until
from playwright.sync_api import Page, expect

EVIL = "<img src=x onerror=\"document.title='owned'\"> ${1+1} {{value}}"
STAND_IN = Path(stand_in_run.__file__)
_RANGE = "() => [...document.querySelector('.chart').layout.xaxis.range]"
_NUM_POINTS = "() => document.querySelector('.chart').calcdata?.[0]?.length ?? 0"


@pytest.fixture
def run_stand_in(ui_server, add_demo_run) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Have a process own a run's folder and obey its signals, which takes no torch: `run_stand_in("mine")`."""
    processes: list[subprocess.Popen] = []

    def run(name: str) -> subprocess.Popen:
        folder = add_demo_run(ui_server.root, name)
        processes.append(subprocess.Popen([sys.executable, str(STAND_IN), str(folder)], cwd=ui_server.root.parent))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()


def expect_state(page: Page, word: str) -> None:
    expect(page.locator(".run-title .state")).to_contain_text(word)


def test_finished_run_is_read_in_all_tabs(page, ui_server, add_demo_run):
    """A tab that stays empty or that a phone does not show, a log that cannot be searched, a sample that the browser
    runs as markup, or a path of this machine where a shorter one leads there."""
    folder = add_demo_run(ui_server.root, "first")
    last_step = json.loads((folder / "status.json").read_text())["max_steps"]
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": last_step, "prompt": EVIL, "completion": EVIL}) + "\n")
    (folder / "logs/launcher.log").write_text("the launcher's words\n")
    (folder / "logs/rank_1.log").write_text(f"one\ntwo needle\n{EVIL}\n")
    config = (folder / "config.yaml").read_text()
    place = f"{ui_server.root.parent}/examples/demo/base"
    config = re.sub(r"(?m)^model_name_or_path: .*$", f"model_name_or_path: {place}", config)
    (folder / "config.yaml").write_text(config)
    open_page(page, "run?name=first")
    expect_state(page, "done")
    expect(page.locator(".facts")).to_contain_text(re.compile(r"model\s*examples/demo/base\s*dataset"))
    expect(page.locator(".bar-sentence")).to_contain_text(re.compile(r"step (\d+) of \1"))
    page.wait_for_function(f"() => ({_NUM_POINTS})() > 10")
    for button in ("Stop and save", "Stop now", "Save now", "Resume"):
        expect(page.get_by_role("button", name=button, exact=True)).to_be_disabled()
    for word in ("Clone", "Chat", "Export"):
        expect(page.get_by_role("navigation", name="this run elsewhere").get_by_text(word)).to_have_attribute(
            "href", re.compile(r"=first$")
        )

    page.get_by_role("tab", name="Ranks").click()
    expect(page.get_by_role("region", name="Every rank").locator("tbody tr")).to_have_count(2)

    page.get_by_role("tab", name="Logs").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text("the launcher's words")
    page.get_by_label("Log of").click()
    page.get_by_role("option", name="rank 1").click()
    expect(log).to_have_text(re.compile(r"two needle\s+<img src=x"))
    page.get_by_label("Search").fill("NEEDLE")
    expect(log).to_have_text("two needle")
    page.get_by_label("Search").fill("not there")
    expect(log).to_have_text("No line contains “not there”.")

    page.get_by_role("tab", name="Samples").click()
    expect(page.get_by_role("region", name="Answers at step")).to_contain_text("${1+1} {{value}}")
    page.get_by_label("Prompt", exact=True).click()
    page.get_by_role("option").nth(1).click()
    expect(page.get_by_role("region", name="Answers over time").locator("tbody tr").nth(1)).to_be_visible()

    page.get_by_role("tab", name="Set-up").click()
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("checkpoint-")
    expect(page.locator(".cm-content")).to_contain_text("placement")
    assert page.title() != "owned"
    page.get_by_role("tab", name="Curves").click()
    shoot(page, "run", height=1300)

    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 900})
    for tab in ("Ranks", "Logs", "Samples", "Set-up", "Curves"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(400)
        check_no_overflow(page)


def test_unknown_run_leads_back(page):
    """A bookmark of a deleted run would show a page that waits for ever."""
    open_page(page, "run?name=..%2Fetc")
    expect(page.get_by_role("link", name="See all runs")).to_be_visible()
    expect(page.get_by_role("tab", name="Curves")).not_to_be_visible()


def test_run_is_watched_saved_stopped_and_deleted(page, ui_server, run_stand_in):
    """Buttons that do nothing, or to another run; a zoom lost at each refresh."""
    process = run_stand_in("mine")
    open_page(page, "run?name=mine")
    expect_state(page, "running")
    page.wait_for_function(f"() => ({_NUM_POINTS})() >= 3")
    box = page.locator(".chart .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 150, steps=8)
    page.mouse.up()
    zoomed, num_points = page.evaluate(_RANGE), page.evaluate(_NUM_POINTS)
    smoothing = page.get_by_role("slider", name="Smoothing")
    smoothing.press("ArrowRight")
    page.wait_for_function(f"() => ({_NUM_POINTS})() > {num_points + 2}")
    assert page.evaluate(_RANGE) == zoomed
    assert smoothing.input_value() == "0.61"

    page.get_by_role("button", name="Save now").click()
    expect(page.locator(".note")).to_contain_text("Saved: checkpoint-")
    page.get_by_role("button", name="Stop now", exact=True).click()
    page.get_by_role("button", name="Keep running").click()
    expect(page.get_by_role("button", name="Stop without saving")).not_to_be_visible()
    assert process.poll() is None
    page.get_by_role("button", name="Stop and save").click()
    expect(page.locator(".note").filter(has_text=re.compile("Stopping: it saves|Ended at step"))).to_be_visible()
    expect_state(page, "stopped")
    expect(page.locator("body")).to_contain_text("stopped by SIGUSR1")
    wait_until(lambda: process.poll() is not None)

    process = run_stand_in("mine")
    expect_state(page, "running")
    page.get_by_role("button", name="Stop now", exact=True).click()
    page.get_by_role("button", name="Stop without saving").click()
    wait_until(lambda: process.poll() is not None)
    expect_state(page, "stopped")
    expect(page.locator("body")).to_contain_text("stopped by SIGQUIT")

    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_label("type its name").fill("another")
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.get_by_text("type its name: mine")).to_be_visible()
    assert (ui_server.root / "mine").exists()
    page.get_by_label("type its name").fill("mine")
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.get_by_text("“mine”")).to_be_visible()
    assert not (ui_server.root / "mine").exists()
