"""The page of one run: watched, stopped, resumed, deleted, and read in all of its tabs."""

from __future__ import annotations

import json
import re
import signal

import psutil
import pytest
from browser_support import _MARK, REPOSITORY, check_no_overflow, open_page, shoot, wait_until
from playwright.sync_api import Page, expect

EVIL = "<img src=x onerror=\"document.title='owned'\"> ${1+1} {{value}}"
_RANGE = "() => [...document.querySelector('.chart').layout.xaxis.range]"
_NUM_POINTS = "() => document.querySelector('.chart').calcdata?.[0]?.length ?? 0"


@pytest.fixture(autouse=True)
def wait_longer():
    """Give a busy machine time to answer."""
    expect.set_options(timeout=30_000)
    yield
    expect.set_options(timeout=5_000)


@pytest.fixture
def start_run(ui_server, monkeypatch):
    """Start a run of the demo as the page does, of so many steps that it does not end by itself."""
    from lorashard_ui.running import control

    monkeypatch.setenv(_MARK, str(ui_server.root))  # so that it is ended with the server
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(name: str) -> None:
        text = (REPOSITORY / "examples/demo/demo.yaml").read_text().replace("logging_steps: 25", "logging_steps: 1")
        options = "cpu: 2\nmax_steps: 3000\nwarmup_steps: 5\n"
        text = re.sub(r"(?m)^(warmup_steps|num_train_epochs):.*\n", "", text)
        control.start_run(ui_server.root, name, text + options)
        for process in ui_server.list_processes():
            if f"/{name}" in " ".join(process.cmdline()):
                process.nice(10)  # its ranks would leave little of a small machine to the page

    return start


def read_step(page: Page) -> int:
    found = re.search(r"step ([\d,]+) of", page.locator(".bar-sentence").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def expect_state(page: Page, word: str) -> None:
    expect(page.locator(".run-title .state")).to_contain_text(word, timeout=90_000)


def test_finished_run_is_read_in_all_tabs(page, ui_server, add_demo_run):
    """A tab that stays empty, a log that cannot be searched, or a sample that the browser runs as markup."""
    folder = add_demo_run(ui_server.root, "first")
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 12, "prompt": EVIL, "completion": EVIL}) + "\n")
    (folder / "logs/rank_1.log").write_text(f"one\ntwo needle\n{EVIL}\n")
    open_page(page, "run?name=first")
    expect_state(page, "done")
    expect(page.locator(".bar-sentence")).to_contain_text("step 12 of 12")
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
    expect(log).to_contain_text("loss")
    page.get_by_label("Log of").click()
    page.get_by_role("option", name="rank 1").click()
    expect(log).to_have_text(re.compile(r"two needle\s+<img src=x"))
    page.get_by_label("Search").fill("NEEDLE")
    expect(log).to_have_text("two needle")
    page.get_by_label("Search").fill("not there")
    expect(log).to_have_text("No line has “not there”.")

    page.get_by_role("tab", name="Samples").click()
    expect(page.get_by_role("region", name="Answers at step 12")).to_contain_text("${1+1} {{value}}")
    page.get_by_label("Prompt", exact=True).click()
    page.get_by_role("option").nth(1).click()
    expect(page.get_by_role("region", name="Answers over time").locator("tbody tr")).to_have_count(2)

    page.get_by_role("tab", name="Set-up").click()
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("checkpoint-12")
    expect(page.locator(".cm-content")).to_contain_text("placement")
    assert page.title() != "owned"
    page.get_by_role("tab", name="Curves").click()
    shoot(page, "run", height=1300)


def test_every_tab_fits_a_phone(open_tab, ui_server, add_demo_run):
    """A page that must be pushed sideways, or a tab that a phone does not show."""
    if not (ui_server.root / "first").exists():
        add_demo_run(ui_server.root, "first")
    page = open_tab(ui_server, color_scheme="dark", viewport={"width": 390, "height": 900})
    open_page(page, "run?name=first")
    for tab in ("Ranks", "Logs", "Samples", "Set-up", "Curves"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(400)
        check_no_overflow(page)


def test_unknown_run_leads_back(page, ui_server):
    """A bookmark of a deleted run would show a page that waits for ever."""
    for query in ("run?name=nothing", "run?name=..%2Fetc", "run"):
        open_page(page, query)
        expect(page.get_by_role("link", name="See all runs")).to_be_visible()
        expect(page.get_by_role("tab", name="Curves")).not_to_be_visible()


@pytest.mark.slow
def test_run_is_watched_saved_stopped_resumed_and_deleted(page, open_tab, ui_server, start_run):
    """Buttons that do nothing, or to another run; a zoom lost at each refresh; two tabs that tell two stories."""
    start_run("mine")
    open_page(page, "run?name=mine")
    expect_state(page, "running")
    page.wait_for_function(f"() => ({_NUM_POINTS})() >= 3", timeout=60_000)

    box = page.locator(".chart .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 150, steps=8)
    page.mouse.up()
    zoomed, num_points = page.evaluate(_RANGE), page.evaluate(_NUM_POINTS)
    page.get_by_label("range slider for Smoothing").press("ArrowRight")
    page.wait_for_function(f"() => ({_NUM_POINTS})() > {num_points + 2}", timeout=60_000)
    assert page.evaluate(_RANGE) == zoomed
    assert page.get_by_label("range slider for Smoothing").input_value() == "0.61"

    page.get_by_role("button", name="Save now").click()
    expect(page.locator(".note")).to_contain_text(re.compile(r"Saving at the end of this step|Saved: checkpoint-\d+"))
    expect(page.locator(".note")).to_contain_text("Saved: checkpoint-", timeout=60_000)

    other = open_tab(ui_server)
    open_page(other, "run?name=mine")
    expect_state(other, "running")
    page.get_by_role("button", name="Stop and save").click()
    said = page.locator(".note").filter(
        has_text=re.compile(r"Stopping: it saves at the end of this step|Ended at step")
    )
    expect(said).to_be_visible()
    expect_state(page, "stopped")
    expect_state(other, "stopped")
    wait_until(lambda: read_step(page) == read_step(other) > 0, deadline_s=20)
    step = read_step(page)

    other.get_by_role("button", name="Resume").click()
    expect_state(other, "running")
    wait_until(lambda: read_step(other) > step, deadline_s=90)
    page.reload()
    expect_state(page, "running")
    page.get_by_role("button", name="Stop now", exact=True).click()
    page.get_by_role("button", name="Let it go on").click()
    expect(page.get_by_role("button", name="Stop now, do not save")).not_to_be_visible()
    page.get_by_role("button", name="Stop now", exact=True).click()
    page.get_by_role("button", name="Stop now, do not save").click()
    expect_state(page, "stopped")

    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_label("type its name").fill("another")
    page.get_by_role("button", name="Delete for good").click()
    expect(page.get_by_text("To delete the run, type its name: mine")).to_be_visible()
    assert (ui_server.root / "mine").exists()
    page.get_by_label("type its name").fill("mine")
    page.get_by_role("button", name="Delete for good").click()
    expect(page.get_by_text("There is no run “mine”")).to_be_visible()
    assert not (ui_server.root / "mine").exists()


@pytest.mark.slow
def test_killed_rank_is_named(page, ui_server, start_run):
    """A run that died of one rank would look as if it went on, or not say which rank and what to do."""
    start_run("hurt")
    open_page(page, "run?name=hurt")
    expect_state(page, "running")
    wait_until(lambda: read_step(page) > 3, deadline_s=90)
    ranks = [
        p for p in ui_server.list_processes() if p.environ().get("RANK") == "1" and "hurt" in " ".join(p.cmdline())
    ]
    assert len(ranks) == 1
    ranks[0].send_signal(signal.SIGKILL)
    expect_state(page, "failed")
    expect(page.locator(".note-error")).to_contain_text("rank 1")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert psutil.pid_exists(ui_server.process.pid)
