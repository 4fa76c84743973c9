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
from helpers.browser import check_no_overflow, open_page
from helpers.waiting import wait_until
from playwright.sync_api import Page, Route, expect

CPU_BUDGET_S = 80  # a Chromium draws many charts

EVIL = "<img src=x onerror=\"document.title='owned'\"> ${1+1} {{value}}"
STAND_IN = Path(stand_in_run.__file__)
_RANGE = "() => [...document.querySelector('.chart').layout.xaxis.range]"
_NUM_POINTS = "() => document.querySelector('.chart-grid .chart')?.calcdata?.[0]?.length ?? 0"


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


def drag(page: Page, begin: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*begin)
    page.mouse.down()
    page.mouse.move(*end, steps=8)
    page.mouse.up()


def expect_state(page: Page, word: str) -> None:
    expect(page.locator(".run-title .state")).to_contain_text(word)


def test_an_answer_that_comes_late_does_not_undo_a_choice(page, ui_server, add_demo_run):
    """Catches a slow answer, to the question before, that overwrites what was asked for since."""
    folder = add_demo_run(ui_server.root, "slow")
    (folder / "logs/launcher.log").write_text("one\ntwo needle\n")
    open_page(page, "run?name=slow")
    expect_state(page, "done")
    held: list[Route] = []
    page.route("**/queue/join?*", lambda route: held.append(route), times=1)
    page.get_by_role("tab", name="Logs").click()
    wait_until(lambda: page.wait_for_timeout(20) or held)
    page.get_by_label("Search").fill("needle")
    page.wait_for_timeout(1000)  # time for an answer, were the second question sent beside the first
    held[0].continue_()
    page.wait_for_timeout(1000)
    expect(page.get_by_role("log")).to_have_text("two needle", timeout=4000)  # the page asks again every 15 s


def test_finished_run_is_read_in_all_tabs(page, ui_server, add_demo_run):
    """A tab that stays empty, that a phone does not show or that a reload forgets, a log that cannot be searched, a
    sample that the browser runs as markup, or a path of this machine where a shorter one leads there."""
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
    expect(page).to_have_title("done first - lorashard")
    for word in ("loss", "step", "time taken", "tokens/s", "peak memory"):
        expect(page.locator(".figures")).to_contain_text(word)
    expect(page.locator(".facts")).to_contain_text(re.compile(r"model\s*examples/demo/base\s*dataset"))
    expect(page.locator(".bar-sentence")).to_contain_text(re.compile(r"step (\d+) of \1"))
    page.wait_for_function(f"() => ({_NUM_POINTS})() > 10")
    for button in ("Stop and save", "Stop now", "Save now", "Resume"):
        expect(page.get_by_role("button", name=button, exact=True)).to_be_disabled()
    for word in ("Clone", "Chat", "Export"):
        expect(page.get_by_role("navigation", name="this run elsewhere").get_by_text(word)).to_have_attribute(
            "href", re.compile(r"=first$")
        )

    page.get_by_label("Charts", exact=True).click()
    page.get_by_role("option", name="num_tokens").click()
    expect(page.locator(".chart-grid figcaption").last).to_have_text("Tokens, over all resumes")
    page.keyboard.press("Escape")

    page.get_by_role("tab", name="Ranks").click()
    expect(page.get_by_role("region", name="Every rank").locator("tbody tr")).to_have_count(2)

    page.get_by_role("tab", name="Logs").click()
    log = page.get_by_role("log")
    expect(log).to_contain_text("the launcher's words")
    page.reload()
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
    chosen = page.get_by_role("region", name="Options that differ")
    expect(chosen.locator("tr", has_text="max_steps")).to_contain_text(str(last_step))
    expect(chosen).not_to_contain_text("bnb_4bit_use_double_quant")
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("checkpoint-")
    expect(page.locator(".cm-content")).to_contain_text("placement")
    assert page.title() != "owned"
    page.get_by_role("tab", name="Curves").click()

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


def test_a_zoom_brings_the_points_that_the_whole_curve_leaves_out(page, ui_server, add_demo_run):
    """A spike of one step among 20,000 is a triangle 80 steps wide, however far one zooms in."""
    folder = add_demo_run(ui_server.root, "long")
    lines = [{"step": step, "loss": 9.0 if step == 10_000 else 1.0} for step in range(1, 20_001)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    open_page(page, "run?name=long")
    page.wait_for_function(f"() => ({_NUM_POINTS})() > 100")
    whole = page.evaluate(_NUM_POINTS)
    box = page.locator(".chart .nsewdrag").first.bounding_box()
    drag(page, (box["x"] + 0.49 * box["width"], box["y"] + 80), (box["x"] + 0.51 * box["width"], box["y"] + 82))
    page.wait_for_function(f"() => ({_NUM_POINTS})() > {whole + 300}")
    near = (
        "() => document.querySelector('.chart').calcdata[0].filter(p => Math.abs(p.x - 10000) < 3).map(p => [p.x, p.y])"
    )
    assert page.evaluate(near) == [[9998, 1], [9999, 1], [10000, 9], [10001, 1], [10002, 1]]
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 80)
    page.wait_for_function(f"() => ({_NUM_POINTS})() === {whole}")


def test_a_phone_has_no_buttons_over_its_charts(phone, add_demo_run, ui_server):
    """Catches Plotly's buttons over the top of each chart for good, where no pointer leaves it."""
    add_demo_run(ui_server.root, "first")
    open_page(phone, "run?name=first")
    phone.wait_for_function(f"() => ({_NUM_POINTS})() > 10")
    phone.locator(".chart .nsewdrag").first.tap()
    expect(phone.locator(".modebar-btn:visible")).to_have_count(0)


@pytest.mark.slow  # two tabs that draw curves; what the buttons do, and to which run, is tested without a browser too
def test_run_is_watched_saved_stopped_and_deleted(page, open_tab, ui_server, run_stand_in):
    """Buttons that do nothing, or to another run, say nothing before the server answers, or move as one reads; a zoom
    lost at each refresh; two tabs that contradict each other."""
    process = run_stand_in("mine")
    open_page(page, "run?name=mine")
    expect_state(page, "running")
    expect(page).to_have_title("1 % mine - lorashard")
    page.wait_for_function(f"() => ({_NUM_POINTS})() >= 3")
    box = page.locator(".chart .nsewdrag").first.bounding_box()
    drag(page, (box["x"] + 0.2 * box["width"], box["y"] + 40), (box["x"] + 0.6 * box["width"], box["y"] + 150))
    zoomed, num_points = page.evaluate(_RANGE), page.evaluate(_NUM_POINTS)
    smoothing = page.get_by_role("slider", name="Smoothing")
    smoothing.press("ArrowRight")
    page.wait_for_function(f"() => ({_NUM_POINTS})() > {num_points + 2}")
    assert page.evaluate(_RANGE) == zoomed
    assert smoothing.input_value() == "0.61"

    stop = page.get_by_role("button", name="Stop and save")
    place = stop.bounding_box()
    page.get_by_role("button", name="Save now").click()
    expect(page.locator(".note")).to_contain_text("Saved: checkpoint-")
    assert stop.bounding_box() == place
    page.get_by_role("button", name="Stop now", exact=True).click()
    expect(page.get_by_role("button", name="Stop without saving")).to_have_class(re.compile(r"\bstop\b"))
    expect(page.get_by_role("button", name="Keep running")).not_to_have_class(re.compile(r"\bstop\b"))
    page.get_by_role("button", name="Keep running").click()
    expect(page.get_by_role("button", name="Stop without saving")).not_to_be_visible()
    assert process.poll() is None
    other = open_tab(ui_server)
    open_page(other, "run?name=mine")
    expect_state(other, "running")
    unanswered: list[Route] = []
    page.route("**/queue/join*", lambda route: unanswered.append(route))
    stop.click()
    expect(stop).to_be_disabled()
    expect(page.locator(".note")).to_contain_text("Asked to stop")
    for route in unanswered:
        route.continue_()
    page.unroute("**/queue/join*")
    for tab in (page, other):
        expect_state(tab, "stopped")
        expect(tab.locator(".note")).to_contain_text(
            re.compile(r"stopped by SIGUSR1 at step \d+, saved in checkpoint-\d+$")
        )
    wait_until(lambda: process.poll() is not None)

    process = run_stand_in("mine")
    for tab in (page, other):
        expect_state(tab, "running")
        expect(tab.locator(".note:visible")).to_have_count(0)
    other.close()
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
    expect(page.get_by_text("Deleted: mine")).to_be_visible()  # on the page of all runs
    assert not (ui_server.root / "mine").exists()
