"""What all pages have: a frame before Gradio's scripts have come, a ring around what has the focus, and rest."""

from __future__ import annotations

import time

import psutil
from helpers.browser import check_no_overflow, open_page
from helpers.waiting import wait_until
from playwright.sync_api import expect


def test_the_frame_of_a_page_is_there_before_its_scripts(page):
    """A page that stays white for seconds looks broken, and people press again; a frame that stays is in the way."""
    frame = page.locator("#frame")
    page.route("**/assets/*.js", lambda route: route.fulfill(content_type="text/javascript", body=""))
    page.goto("compare?runs=a", wait_until="domcontentloaded")
    expect(frame).to_have_text("lorashardRunsNew runCompareChatExport")
    expect(frame.get_by_role("link", name="New run")).to_be_visible()
    box = frame.locator("main").bounding_box()
    assert box and box["height"] > 400
    check_no_overflow(page)
    page.unroute("**/assets/*.js")
    open_page(page, "compare?runs=a")
    expect(frame).to_be_hidden()
    assert page.locator("gradio-app").is_visible()


def test_the_ring_around_a_field_is_whole(page):
    """Catches a ring of which the box around the field cuts off all but the top: who uses keys does not see where."""
    open_page(page, "")
    page.get_by_label("Filter").focus()
    cut = """(field) => {
      const ring = 5, inner = field.getBoundingClientRect(), found = [];
      for (let box = field.parentElement; box; box = box.parentElement) {
        const { left, right, bottom } = box.getBoundingClientRect();
        const isCut = left > inner.left - ring || right < inner.right + ring || bottom < inner.bottom + ring;
        if (isCut && getComputedStyle(box).overflow !== 'visible') found.push(box.className);
      }
      return found;
    }"""
    assert page.get_by_label("Filter").evaluate(cut) == []


def test_a_server_that_nobody_asks_sleeps(ui_server):
    """Catches a server that wakes up a thousand times a second to look for questions: a tenth of a core, for nobody."""
    process = psutil.Process(ui_server.process.pid)

    def count_sleeps() -> int:
        return sum(psutil.Process(thread.id).num_ctx_switches().voluntary for thread in process.threads())

    def count_in_a_second() -> int:
        before = count_sleeps()
        time.sleep(1)
        return count_sleeps() - before

    wait_until(lambda: count_in_a_second() < 200, lambda: f"{count_in_a_second()} times in a second", 20)


def test_a_page_that_does_nothing_draws_no_frames(open_tab, ui_server):
    """Catches a clock of Gradio's that runs at every frame of each open page: a tenth of a core, and a battery."""
    page = open_tab(ui_server)
    page.add_init_script("""
      const ask = window.requestAnimationFrame;
      window.requestAnimationFrame = (run) => { window.numFrames = (window.numFrames || 0) + 1; return ask(run); };
    """)
    open_page(page, "compare?runs=a")
    count = """() => {
      const before = numFrames;
      return new Promise((end) => setTimeout(() => end(numFrames - before), 2000));
    }"""
    wait_until(lambda: page.evaluate(count) < 10, lambda: f"{page.evaluate(count)} frames in two seconds", 20)
