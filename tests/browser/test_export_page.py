"""The page "Export" in a real browser: an adapter as a file, merged, verified, and on its way to the hub."""

from __future__ import annotations

import re
import sys
import zipfile

import pytest
from helpers.browser import UiServer, check_no_overflow, open_page
from helpers.waiting import wait_until
from playwright.sync_api import Locator, Page, expect

from lorashard_ui.running.jobs import Jobs

PACKED = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
# Stands in for a merge, which loads torch and a model: reports its progress and waits for a signal.
MERGE = """
import pathlib, sys, time
from lorashard.runtime.progress import told_progress
partial = pathlib.Path(sys.argv[1])
partial.touch()
with told_progress("merging") as progress:
    progress(3, 12, "units")
print("a quarter is merged", flush=True)
try:
    time.sleep(300)
finally:
    partial.unlink()
"""


@pytest.fixture(scope="module")
def server(ui_server, add_demo_run) -> UiServer:
    """The server, with a run to export."""
    (add_demo_run(ui_server.root, "demo") / "secret.txt").write_text("hf_secret")
    return ui_server


def choose(page: Page, tab: str) -> None:
    page.get_by_role("tab", name=tab, exact=True).click()


def wait_for_job(page: Page, kind: str, state: str) -> None:
    """Wait until the newest job, which the first row shows, is of this kind and in this state."""
    row = page.locator("table tbody tr").first
    expect(row).to_contain_text(kind)
    expect(row).to_contain_text(state)


def press_until_said(field: Locator, value: str, button: Locator, place: Locator, said: str) -> None:
    """Fill a field and press a button until its answer is there.

    A tab that has only now been opened may draw its fields anew, empty, and Gradio takes no click while an earlier
    answer is under way.
    """

    def press() -> bool:
        if field.input_value() != value:
            field.fill(value)
            field.press("Tab")
        button.click()
        button.page.wait_for_timeout(300)
        return any(said in text for text in place.all_inner_texts())

    wait_until(press, lambda: f"{said!r} was not said; {place.all_inner_texts()}, {field.input_value()!r}")


def test_the_adapter_is_downloaded_and_nothing_else(server, page, tmp_path):
    """Catches a download with a run's options, logs or other files, one without the tokenizer, and a button that gives
    the adapter of another run."""
    open_page(page, "export?run=demo")
    button = page.get_by_role("button", name="Download the adapter (")
    expect(button).to_be_enabled()
    with page.expect_download() as download:
        button.click()
    assert download.value.suggested_filename == "demo-adapter.zip"
    download.value.save_as(tmp_path / "adapter.zip")
    with zipfile.ZipFile(tmp_path / "adapter.zip") as packed:
        names = {name.removeprefix("demo-adapter/") for name in packed.namelist()}
        packed.extractall(tmp_path)
    assert names >= PACKED and names - PACKED <= {"chat_template.jinja", "special_tokens_map.json"}
    for name in names:
        assert (tmp_path / "demo-adapter" / name).read_bytes() == (server.root / "demo" / name).read_bytes()


def test_jobs_are_followed_and_canceled(server, page):
    """Catches a failure whose reason is only in a file, markup in a log that a page takes for its own, a path of this
    machine where a shorter one leads there, and a Cancel that leaves processes or half a model."""
    jobs = Jobs(server.root)
    said = f"lorashard: error: no {server.root}/demo <img src=http://other.example/z.png>"
    failing = f"import sys; print({said!r}); sys.exit(2)"
    failed = jobs.start("verify", "demo", [sys.executable, "-c", failing])
    wait_until(lambda: jobs.get(failed).state == "failed")
    partial = server.root / ".partial-merged"
    merge = jobs.start("merge", "demo", [sys.executable, "-c", MERGE, str(partial)])
    open_page(page, "export?run=demo")
    rows = page.locator("table tbody tr")
    wait_for_job(page, "merge demo", "running")
    expect(rows.first.get_by_role("progressbar")).to_have_attribute("value", "0.25")
    expect(page.locator("#job-log textarea")).to_have_value(re.compile("a quarter is merged"))
    expect(rows.nth(1)).to_contain_text("exit code 2")
    expect(rows.nth(1)).to_contain_text("lorashard: error: no runs/demo <img src=http")
    assert page.locator("main img, table img").count() == 0
    page.get_by_role("button", name="Cancel").click()
    wait_for_job(page, "merge demo", "canceled")
    assert jobs.get(merge).state == "canceled" and not partial.exists()
    expect(page.get_by_role("button", name="Cancel")).to_be_disabled()
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_timeout(300)
    check_no_overflow(page)


def test_a_mistake_is_answered_and_no_token_asked_for(server, page):
    """Catches an answer that is a traceback or repeats a password, a job that starts to fail, and a page that wants a
    token."""
    before = len(Jobs(server.root).list())
    open_page(page, "export?run=demo")
    expect(page.get_by_role("button", name="Download the adapter (")).to_be_enabled()
    alert = page.get_by_role("alert").filter(visible=True)
    choose(page, "Merge")
    merge = page.get_by_role("button", name="Merge", exact=True)
    press_until_said(page.get_by_label("Upload to"), "https://me:password@other.example/x", merge, alert, "://")
    assert "password" not in alert.inner_text() and "Traceback" not in alert.inner_text()
    choose(page, "Push")
    expect(page.get_by_text("Tokens cannot").filter(visible=True)).to_be_visible()
    upload = page.get_by_role("button", name="Upload the adapter")
    press_until_said(page.get_by_label("Repo", exact=True), "me/model", upload, alert, "hf auth login")
    assert len(Jobs(server.root).list()) == before
