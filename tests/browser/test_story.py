"""One person's evening: a run from the form to a merged model, with a closed tab, a killed server and a killed rank."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from browser_support import UiServer, open_page, wait_until
from playwright.sync_api import Page, expect

STATE_MS = 180_000  # a busy machine starts two ranks slowly
FIELDS = {
    "model_name_or_path": "examples/demo/base",
    "dataset": "examples/demo/train.jsonl",
    "cpu": "2",
    "max_length": "128",
    "learning_rate": "5e-3",
    "max_steps": "200",
}


def start_from_form(page: Page, name: str, more: str | None, **fields: str) -> None:
    """Fill in the form, wait for the plan, and start."""
    expect(page.locator("#problems")).not_to_be_empty()
    for option, text in fields.items():
        field = page.locator(f"#option-{option}").locator("textarea, input").first
        field.fill(text)
        field.press("Tab")
    page.locator("#run-name textarea, #run-name input").first.fill(name)
    if more is not None:
        page.locator("#advanced > button").click()
        page.locator("#more textarea").fill(more)
    expect(page.locator("#problems")).to_contain_text(f"The options are in order. The run will be named {name}.")
    expect(page.locator("#plan-status")).to_contain_text("fits on each rank", timeout=STATE_MS)
    page.locator("#start").click()
    page.wait_for_url(f"**/run?name={name}")


def expect_state(page: Page, word: str) -> None:
    expect(page.locator(".run-title .state")).to_contain_text(word, timeout=STATE_MS)


def read_metrics(run: Path) -> list[dict]:
    """Return what a run has logged of its steps."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def wait_for_step(run: Path, step: int) -> None:
    wait_until(lambda: read_metrics(run) and read_metrics(run)[-1]["step"] >= step, lambda: str(read_metrics(run)[-1:]))


def find_ranks(server: UiServer, name: str) -> dict[int, psutil.Process]:
    """Return the ranks of a run that live."""
    found = {}
    for process in server.list_processes():
        rank = process.environ().get("RANK")
        if rank is not None and f"/{name}" in " ".join(process.cmdline()):
            found[int(rank)] = process
    return found


@pytest.mark.slow
def test_from_the_form_to_a_merged_model(start_ui, open_tab, tmp_path):
    """Catches whatever stands between a person and the end: a run that dies with its tab or with the server, a resume
    from step zero, a dead rank that nobody names, runs that cannot be compared, talked to or merged."""
    root = tmp_path / "runs"
    server = start_ui(root=root)
    page = open_tab(server)
    open_page(page)
    page.get_by_role("link", name="New run").last.click()
    page.wait_for_url("**/new")
    start_from_form(page, "first", "logging_steps: 2\nwarmup_steps: 5\nactivation_checkpointing: false", **FIELDS)

    # The loss moves, and moves on without the tab, and without the server.
    expect_state(page, "running")
    wait_for_step(root / "first", 20)
    losses = [row["loss"] for row in read_metrics(root / "first")]
    assert losses[-1] < losses[0]
    sentence = page.locator(".bar-sentence")
    expect(sentence).to_contain_text(re.compile(r"step [1-9]"))
    shown = sentence.inner_text()
    page.close()
    server.stop(signal.SIGKILL)
    assert sorted(find_ranks(server, "first")) == [0, 1]
    step = read_metrics(root / "first")[-1]["step"]
    server = start_ui(root=root)
    page, other = open_tab(server), open_tab(server)
    for tab in (page, other):
        open_page(tab, "run?name=first")
        expect_state(tab, "running")
        expect(tab.locator(".bar-sentence")).not_to_have_text(shown)
    wait_for_step(root / "first", step + 10)

    # Stopped in one tab, seen in the other, gone on with from the step that was saved.
    page.get_by_role("button", name="Stop and save").click()
    for tab in (page, other):
        expect_state(tab, "stopped")
    assert find_ranks(server, "first") == {}
    saved = max(int(folder.name.removeprefix("checkpoint-")) for folder in (root / "first").glob("checkpoint-*"))
    assert saved > step
    other.get_by_role("button", name="Resume").click()
    expect_state(page, "running")
    expect_state(page, "done")
    steps = [row["step"] for row in read_metrics(root / "first")]
    assert steps == sorted(set(steps)) and steps[-1] == 200
    other.close()

    # Another one like it, whose second rank is killed.
    page.get_by_role("link", name="Clone").click()
    page.wait_for_url("**/new?from=first")
    expect(page.get_by_text("The options are those of the run first")).to_be_visible()
    start_from_form(page, "second", None, learning_rate="1e-3")
    wait_for_step(root / "second", 20)
    find_ranks(server, "second")[1].kill()
    expect_state(page, "failed")
    expect(page.locator(".note-error")).to_contain_text("rank 1 was killed by SIGKILL")
    assert find_ranks(server, "second") == {}

    # Compared from the table of runs: only what differs.
    open_page(page)
    for name in ("first", "second"):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="Compare 2 selected").click()
    page.wait_for_url(re.compile(r"compare\?runs=\w+&runs=\w+"))
    differences = page.get_by_role("region", name="Options that differ")
    expect(differences).to_contain_text("learning_rate")
    expect(differences).not_to_contain_text("lora_alpha")
    expect(page.locator(".chart").get_by_text("second").first).to_be_visible()

    # Talked to, and merged.
    open_page(page, "chat?run=first")
    page.get_by_label("Message", exact=True).fill("Book lunch with Anna on Friday at 12:30 pm, please.")
    page.keyboard.press("Enter")
    answer = page.get_by_role("region", name="With the adapter", exact=True).locator(".turn-model")
    expect(answer).to_contain_text('"', timeout=STATE_MS)  # the base answers in plain English
    open_page(page, "export?run=first")
    page.get_by_role("tab", name="Merge", exact=True).click()
    page.get_by_role("button", name="Merge", exact=True).click()
    expect(page.locator("table tbody tr").first).to_contain_text("done", timeout=STATE_MS)
    assert (root / "first-merged" / "model.safetensors").is_file()
    page.close()
    server.stop()
    assert server.list_processes() == []
