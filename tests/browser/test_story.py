"""One person's evening: a run from the form to a merged model, with a closed tab, a killed server and a killed rank."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from helpers.browser import UiServer, open_page, shoot
from helpers.waiting import wait_until
from playwright.sync_api import Page, expect

CPU_BUDGET_S = 200  # two runs of two ranks, a plan, a chat, a merge and a verification load torch eight times
STATE_MS = 180_000  # a busy machine starts two ranks slowly
FIELDS = {
    "model_name_or_path": "examples/demo/base",
    "dataset": "examples/demo/train.jsonl",
    "cpu": "2",
    "max_length": "128",
    "learning_rate": "5e-3",
    "max_steps": "5000",
    "per_device_train_batch_size": "1",
}
MORE = "dtype: float32\nlogging_steps: 2\nwarmup_steps: 5\nmax_train_samples: 400\nactivation_checkpointing: false"


def start_from_form(page: Page, name: str) -> None:
    """Fill in the form, wait for the plan, and start."""
    expect(page.locator("#problems")).not_to_be_empty()
    page.locator("#advanced > button").click()
    page.locator("#more textarea").fill(MORE)
    for option, text in FIELDS.items():
        field = page.locator(f"#option-{option}").locator("textarea, input").first
        field.fill(text)
        field.press("Tab")
    page.locator("#run-name textarea, #run-name input").first.fill(name)
    expect(page.locator("#problems")).to_contain_text(f"named {name}.")
    expect(page.locator("#plan-status")).to_contain_text("fits on each", timeout=STATE_MS)
    page.locator("#start").click()
    page.wait_for_url(f"**/run?name={name}")


def expect_state(page: Page, word: str) -> None:
    expect(page.locator(".run-title .state")).to_contain_text(word, timeout=STATE_MS)


def read_steps(run: Path) -> list[int]:
    """Return the steps that a run has logged."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row["step"] for row in map(json.loads, lines) if "loss" in row]


def wait_for_step(run: Path, step: int) -> None:
    wait_until(lambda: read_steps(run)[-1:] >= [step], lambda: str(read_steps(run)[-1:]))


def find_ranks(server: UiServer, name: str) -> dict[int, psutil.Process]:
    """Return the ranks of a run that live."""
    found = {}
    for process in server.list_processes():
        rank = process.environ().get("RANK")
        if rank is not None and f"/{name}" in " ".join(process.cmdline()):
            found[int(rank)] = process
    return found


def pause(server: UiServer, name: str) -> list[psutil.Process]:
    """Halt a run's ranks, which would take the processor's time while a server starts: `resume` lets them go on."""
    ranks = list(find_ranks(server, name).values())
    for rank in ranks:
        rank.suspend()
    return ranks


def resume(ranks: list[psutil.Process]) -> None:
    for rank in ranks:
        rank.resume()


def do_job(page: Page, tab: str, kind: str) -> None:
    """Press the button of a tab, and wait until its job is done."""
    page.get_by_role("tab", name=tab, exact=True).click()
    page.get_by_role("button", name=tab, exact=True).click()
    row = page.locator("table tbody tr").first
    expect(row).to_contain_text(kind, timeout=STATE_MS)
    expect(row).to_contain_text("done", timeout=STATE_MS)


@pytest.mark.slow
def test_from_the_form_to_a_merged_model(start_ui, open_tab, make_place, page_errors):
    """Catches whatever stands between a person and the end: a run that dies with its tab or with the server, a resume
    from step zero, a dead rank that nobody names, runs that cannot be compared, talked to or merged."""
    place = make_place()
    run = place / "runs" / "first"
    server = start_ui(place=place)
    page = open_tab(server)
    open_page(page)
    page.get_by_role("link", name="New run").last.click()
    page.wait_for_url("**/new")
    start_from_form(page, "first")
    # What had loaded torch is gone, and no GPU's memory with it.
    assert not [p for p in server.list_processes() if "lorashard_ui.running.worker_main" in p.cmdline()]
    asked = (run / "asked.yaml").read_text()
    assert "learning_rate: 0.005" in asked and "activation_checkpointing: false" in asked

    # It moves, and moves on without the tab, and without the server.
    expect_state(page, "running")
    wait_for_step(run, 20)
    sentence = page.locator(".bar-sentence")
    expect(sentence).to_contain_text(re.compile(r"step [1-9]"))
    shown = sentence.inner_text()
    page.close()
    server.stop(signal.SIGKILL)
    step = read_steps(run)[-1]
    wait_for_step(run, step + 10)
    assert sorted(find_ranks(server, "first")) == [0, 1]
    ranks = pause(server, "first")
    server = start_ui(place=place)
    page, other = open_tab(server), open_tab(server)
    for tab in (page, other):
        open_page(tab, "run?name=first")
        expect_state(tab, "running")
    resume(ranks)
    expect(page.locator(".bar-sentence")).not_to_have_text(shown)

    # Saved, and its second rank is killed.
    page.get_by_role("button", name="Save now").click()
    expect(page.locator(".note")).to_contain_text("Saved: checkpoint-")
    find_ranks(server, "first")[1].kill()
    for tab in (page, other):
        expect_state(tab, "failed")
        expect(tab.locator(".note-error")).to_contain_text(re.compile("rank 1.* SIGKILL"))
    assert find_ranks(server, "first") == {}
    saved = max(int(folder.name.removeprefix("checkpoint-")) for folder in run.glob("checkpoint-*"))
    assert saved > step

    # Resumed in one tab from what was saved, seen in the other, and stopped there.
    other.get_by_role("button", name="Resume").click()
    expect_state(page, "running")
    wait_for_step(run, saved + 10)
    steps = read_steps(run)
    assert steps == sorted(set(steps))
    page.get_by_role("button", name="Stop and save").click()
    for tab in (page, other):
        expect_state(tab, "stopped")
    assert find_ranks(server, "first") == {}
    other.close()

    # Another one like it, compared from the table of runs: only what differs.
    page.get_by_role("link", name="Clone").click()
    page.wait_for_url("**/new?from=first")
    expect(page.get_by_text("the run first")).to_be_visible()
    expect(page.locator("#option-learning_rate textarea, #option-learning_rate input").first).to_have_value("0.005")
    second = place / "runs" / "second"
    shutil.copytree(run, second, ignore=shutil.ignore_patterns("*.json", "checkpoint-*"))
    for config in (second / "asked.yaml", second / "config.yaml"):
        config.write_text(re.sub(r"(?m)^learning_rate: .*$", "learning_rate: 0.001", config.read_text()))
    open_page(page)
    for name in ("first", "second"):
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="Compare 2 selected").click()
    page.wait_for_url(re.compile(r"compare\?runs=\w+&runs=\w+"))
    differences = page.get_by_role("region", name="Options that differ")
    expect(differences).to_contain_text("learning_rate")
    expect(differences).not_to_contain_text("lora_alpha")
    expect(page.locator(".chart").get_by_text("second").first).to_be_visible()

    # Talked to, merged, and verified.
    open_page(page, "chat?run=first")
    page.get_by_role("button", name="Settings").click()
    tokens = page.get_by_label("Max new tokens", exact=True)
    tokens.fill("32")
    tokens.press("Tab")
    page.get_by_label("Message", exact=True).fill("Book lunch with Anna on Friday at 12:30 pm, please.")
    page.keyboard.press("Enter")
    for talk in ("Base", "With adapter"):
        answer = page.get_by_role("region", name=talk, exact=True).locator(".turn-model .subdued")
        expect(answer).to_have_count(1, timeout=STATE_MS)
    page.get_by_role("button", name="Unload").click()
    expect(page.get_by_text("Not loaded: unloaded")).to_be_visible()
    open_page(page, "export?run=first")
    page.get_by_role("tab", name="Merge", exact=True).click()
    expect(page.get_by_label("Output folder")).to_have_value("first-merged")
    do_job(page, "Merge", "merge first")
    assert (place / "runs" / "first-merged" / "model.safetensors").is_file()
    expect(page.locator("#job-log textarea")).to_have_value(re.compile("the adapter changed"))
    page.get_by_role("tab", name="Verify", exact=True).click()
    page.get_by_label("What to verify").click()
    page.get_by_role("option", name="first-merged").click()
    do_job(page, "Verify", "verify first")
    shoot(page, "export")
    page.close()
    server.stop()
    assert server.list_processes() == []
    page_errors.clear()  # its first tab has lost its server
