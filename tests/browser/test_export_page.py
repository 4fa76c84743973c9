"""The page "Export" in a real browser: an adapter as a file, merged, verified, and on its way to the hub."""

from __future__ import annotations

import json
import re
import shutil
import signal
import zipfile

import pytest
from browser_support import UiServer, open_page, shoot, wait_until
from playwright.sync_api import Page, expect

PACKED = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
JOB_MS = 90_000


@pytest.fixture(scope="module")
def server(start_ui, demo_run, tmp_path_factory) -> UiServer:
    """A server over a run to export, on a machine where nobody is logged in to the hub."""
    folder = tmp_path_factory.mktemp("exports")
    root = folder / "runs"
    shutil.copytree(demo_run, root / "demo")
    (root / "demo" / "secret.txt").write_text("hf_secret")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "hf"))
        patch.delenv("HF_TOKEN", raising=False)
        return start_ui(root=root)


def choose(page: Page, tab: str) -> None:
    page.get_by_role("tab", name=tab, exact=True).click()


def wait_for_job(page: Page, kind: str, state: str) -> None:
    """Wait until the newest job, which the first row shows, is of this kind and in this state."""
    row = page.locator("table tbody tr").first
    expect(row).to_contain_text(kind, timeout=JOB_MS)
    expect(row).to_contain_text(state, timeout=JOB_MS)


def test_the_adapter_is_downloaded_and_nothing_else(server, open_tab, tmp_path):
    """Catches a download with a run's options, logs or other files, one without the tokenizer, and a button that gives
    the adapter of another run."""
    page = open_tab(server)
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


@pytest.mark.slow
def test_merge_verify_and_what_is_left_after_a_restart(server, start_ui, open_tab):
    """Catches a merge that ends with its server, a job that a new server does not know, a merged model that cannot be
    chosen for verification, and a page that shows neither its result nor its log."""
    page = open_tab(server)
    open_page(page, "export?run=demo")
    choose(page, "Merge")
    expect(page.get_by_label("Name of the new folder")).to_have_value("demo-merged")
    page.get_by_role("button", name="Merge", exact=True).click()
    wait_for_job(page, "merge demo", "running")
    page.close()
    server.stop(signal.SIGKILL)
    again = start_ui(root=server.root)
    page = open_tab(again)
    open_page(page, "export?run=demo")
    wait_for_job(page, "merge demo", "done")
    assert (server.root / "demo-merged" / "config.json").is_file()
    expect(page.locator("#job-log textarea")).to_have_value(re.compile("the adapter changed"))
    choose(page, "Verify")
    page.get_by_label("What to verify").click()
    page.get_by_role("option", name="demo-merged").click()
    page.get_by_role("button", name="Verify", exact=True).click()
    wait_for_job(page, "verify demo", "done")
    shoot(page, "export")


def test_wrong_input_is_answered_before_a_job_starts(start_ui, demo_run, open_tab, tmp_path, monkeypatch):
    """Catches a job that starts to fail, a path that leads out of the folder of runs, an answer that is a traceback or
    repeats a password, and a browser that is asked for a token."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    root = tmp_path / "runs"
    shutil.copytree(demo_run, root / "demo")
    (root / "full").mkdir()
    (root / "full" / "notes.txt").write_text("mine")
    page = open_tab(start_ui(root=root))
    open_page(page, "export?run=demo")
    expect(page.get_by_role("button", name="Download the adapter (")).to_be_enabled()
    choose(page, "Merge")
    start = page.get_by_role("button", name="Merge", exact=True)
    fields = {"Name of the new folder": "merged", "Upload to (optional)": "", "CPU ranks": "1"}
    for label, wrong, said in (
        ("Name of the new folder", "../outside", "out: expected the name"),
        ("Name of the new folder", "", "out: expected the name"),
        ("Name of the new folder", "full", "is not an empty folder"),
        ("Upload to (optional)", "https://me:password@other.example/x", "an address with '://'"),
        ("Upload to (optional)", "no name", "repo: expected an id of yours"),
        ("Upload to (optional)", "me/model", "hf auth login"),
        ("CPU ranks", "0", "cpu: "),
    ):
        page.get_by_label(label).fill(wrong)
        page.get_by_label(label).press("Tab")
        start.click()
        alert = page.get_by_role("alert").filter(visible=True)
        expect(alert).to_contain_text(said)
        assert "password" not in alert.inner_text() and "Traceback" not in alert.inner_text()
        page.get_by_label(label).fill(fields[label])
        page.get_by_label(label).press("Tab")
    choose(page, "Push")
    expect(page.get_by_text("Tokens are not taken in the browser").filter(visible=True)).to_be_visible()
    page.get_by_label("Repo", exact=True).fill("me/model")
    page.get_by_role("button", name="Upload the adapter").click()
    expect(page.get_by_role("alert").filter(visible=True)).to_contain_text("hf auth login")
    assert not list((root / ".jobs").glob("*")) and not (tmp_path / "outside").exists()
    expect(page.get_by_text("None yet.")).to_be_visible()


@pytest.mark.slow
def test_a_job_that_fails_says_why_and_one_that_is_cancelled_ends(start_ui, demo_run, open_tab, tmp_path):
    """Catches a failure whose reason is only in a file, markup in a log that a page takes for its own, and a Cancel
    that leaves processes or half a model."""
    root = tmp_path / "runs"
    shutil.copytree(demo_run, root / "demo")
    config = root / "demo" / "adapter_config.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps(facts | {"base_model_name_or_path": "<img src=http://other.example/z.png>/base"}))
    server = start_ui(root=root)
    page = open_tab(server)
    open_page(page, "export?run=demo")
    choose(page, "Verify")
    page.get_by_role("button", name="Verify", exact=True).click()
    wait_for_job(page, "verify demo", "failed")
    expect(page.locator("table tbody tr").first).to_contain_text("exit code 2")
    expect(page.locator("table tbody tr").first).to_contain_text("lorashard: error: ")
    assert page.locator("main img, table img").count() == 0
    config.write_text(json.dumps(facts))
    choose(page, "Merge")
    page.get_by_role("button", name="Merge", exact=True).click()
    wait_for_job(page, "merge demo", "running")
    expect(page.get_by_role("button", name="Cancel")).to_be_enabled()
    page.get_by_role("button", name="Cancel").click()
    wait_for_job(page, "merge demo", "cancelled")
    wait_until(lambda: not [one for one in server.list_processes() if "merge" in one.cmdline()], deadline_s=20)
    assert not list(root.glob("*demo-merged*"))
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    expect(page.get_by_role("button", name="Cancel")).to_be_disabled()


def test_where_there_is_nothing_to_export(start_ui, open_tab):
    """Catches an empty page that does not say what to do next."""
    page = open_tab(start_ui())
    open_page(page, "export")
    expect(page.get_by_text("No run has an adapter yet.")).to_be_visible()
    expect(page.get_by_role("link", name="New run").last).to_have_attribute("href", "new")
