"""The page "Chat" in a real browser: what a person does there, and what models and other tabs must not do."""

from __future__ import annotations

import json

import psutil
import pytest
from helpers.browser import UiServer, check_no_overflow, open_page
from helpers.looks import check_looks
from helpers.waiting import wait_until
from playwright.sync_api import Locator, Page, expect

# Both as an answer, if the model repeats it, and as a question, which is shown by the same function.
EVIL = '<img src="http://other.example/x.png" onerror="window.evil=1"><script>window.evil=2</script>'
EVIL_MARKDOWN = "![x](http://other.example/y.png) [l](javascript:window.evil=3)"
LOAD_MS = 120_000


@pytest.fixture(scope="module")
def server(ui_server, add_demo_run) -> UiServer:
    """A server over a run that can be talked to, and one that has saved no adapter."""
    without = ui_server.root / "without"
    without.mkdir()
    (without / "status.json").write_text(json.dumps({"phase": "failed", "error": "stopped early"}))
    add_demo_run(ui_server.root, "demo")
    return ui_server


def find_chats(server: UiServer) -> list[psutil.Process]:
    return [process for process in server.list_processes() if "chat" in process.cmdline()]


def find_talk(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def set_field(page: Page, label: str, text: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(text)
    field.press("Tab")


def shorten_answers(page: Page) -> None:
    """Have a model that never comes to an end answer with a few tokens."""
    page.get_by_role("button", name="Settings").click()
    set_field(page, "Max new tokens", "64")
    page.get_by_role("button", name="Settings").click()


def wait_for_answers(page: Page, count: int) -> None:
    """Wait until each of the two panes has so many answers that have ended."""
    for name in ("Base", "With adapter"):
        expect(find_talk(page, name).locator(".turn-model .subdued")).to_have_count(count, timeout=LOAD_MS)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


@pytest.mark.slow  # a process that loads torch and a model; what it says and to whom is tested without a browser too
def test_base_and_adapter_answer_side_by_side_in_plain_text(server, page, open_tab):
    """Catches an answer that is taken for markup and loads pictures from elsewhere, conversations that mix, forget, or
    show in another tab, a second model for it, a layout that a phone cannot show, a question that its error
    takes along, and a model that is dead and is waited for."""
    open_page(page, "chat?run=demo")
    expect(page.get_by_label("Run", exact=True)).to_have_value("demo")
    expect(page.get_by_text("Not loaded. Press Load")).to_be_visible()
    expect(page.get_by_role("button", name="Unload")).to_be_disabled()
    shorten_answers(page)
    question = f"Book lunch with Anna on Friday {EVIL} {EVIL_MARKDOWN}"
    send(page, question)
    expect(page.get_by_text("placement: ")).to_be_visible(timeout=LOAD_MS)
    wait_for_answers(page, 1)
    base, adapter = find_talk(page, "Base"), find_talk(page, "With adapter")
    assert question in base.inner_text() and question in adapter.inner_text()
    assert page.locator(".talk :is(img, script, a)").count() == 0 and page.evaluate("window.evil") is None
    page.get_by_label("Run", exact=True).focus()  # which chooses no other, and forgets nothing
    for _ in range(2):
        page.keyboard.press("Tab")
    wide = [pane.bounding_box() for pane in (base, adapter)]
    assert wide[0]["y"] == wide[1]["y"] and wide[0]["x"] < wide[1]["x"]
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_timeout(300)
    check_no_overflow(page)
    narrow = [pane.bounding_box() for pane in (base, adapter)]
    assert narrow[0]["x"] == narrow[1]["x"] and narrow[0]["y"] < narrow[1]["y"]
    send(page, "And dinner with Omar on Monday")
    wait_for_answers(page, 2)
    page.get_by_role("button", name="Reset").click()
    expect(page.get_by_text("No messages yet.")).to_have_count(2)
    send(page, "Book lunch with Anna on Friday at noon")
    wait_for_answers(page, 1)
    check_looks(page, "chat")

    other = open_tab(server)
    open_page(other, "chat?run=demo")
    shorten_answers(other)
    send(other, "Dinner with Omar on Monday")
    wait_for_answers(other, 1)
    assert "Omar" not in find_talk(page, "Base").locator(".turn-user").inner_text()
    assert "Friday" not in find_talk(other, "Base").locator(".turn-user").inner_text()
    (process,) = find_chats(server)

    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("message")
    page.get_by_role("button", name="Settings").click()
    set_field(page, "Max new tokens", "0")
    send(page, "Lunch with Anna")
    expect(page.get_by_role("alert")).to_contain_text("max_new_tokens: ")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Lunch with Anna")
    process.kill()
    expect(page.get_by_text("SIGKILL")).to_be_visible()
    wait_until(lambda: not find_chats(server))


def test_where_there_is_nothing_to_talk_to(server, page):
    """Catches an empty page that does not say what to do next, and a name from the address that becomes markup."""
    open_page(page, "chat?run=without")
    expect(page.get_by_text("'without'")).to_be_visible()
    expect(page.get_by_role("link", name="Choose another run")).to_have_attribute("href", "chat")
    open_page(page, "chat?run=%3Cimg%20src%3Dhttp%3A%2F%2Fother.example%2F%3E")
    expect(page.get_by_role("link", name="Choose another run")).to_be_visible()
    assert page.locator("main img").count() == 0
