"""What a newcomer does, from a recipe to a merged model, wide and on a phone; and a rank that is killed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from helpers.browser import UiServer, check_no_overflow, makes_pictures, open_page
from helpers.looks import check_looks
from helpers.waiting import wait_until
from playwright.sync_api import Page, expect

# A server, the pages of both widths, a process that plans, and a chat. Runs and merges are nobody's children and are
# not counted: some 100 more. It took 97 and 104 beside other tests and alone; a slow machine takes half as much again.
CPU_BUDGET_S = 150
STATE_MS = 180_000  # a busy machine starts two ranks slowly
LONGER = {"max_steps": "5000", "per_device_train_batch_size": "1"}
PHONE = {"width": 390, "height": 844}
WIDE = {"width": 1440, "height": 900}


def fill(page: Page, option: str, text: str) -> None:
    field = page.locator(f"#option-{option}").locator("textarea, input").first
    field.fill(text)
    field.press("Tab")


def choose(page: Page, elem_id: str, option: str) -> None:
    """Choose in a list that one can type in."""
    page.locator(f"#{elem_id} input").first.click()
    page.get_by_role("option", name=re.compile(option)).first.click()


def start_from_recipe(page: Page, name: str, **others: str) -> None:
    """Begin with the demo's recipe, see its plan, another machine's and the rows, and start."""
    open_page(page)
    page.get_by_role("link", name="New run").last.click()
    page.wait_for_url("**/new")
    page.get_by_role("button", name="Clear").click()  # the browser keeps what the last run began with
    expect(page.locator("#problems")).to_contain_text("Still missing")
    choose(page, "clone", "^Recipe demo")
    expect(page.locator("#option-model_name_or_path input").first).to_have_value("examples/demo/base")
    more = page.locator("#more textarea")
    more.fill(more.input_value().replace("logging_steps: 25", "logging_steps: 2"))
    for option, text in (LONGER | others).items():
        fill(page, option, text)
    page.locator("#run-name textarea, #run-name input").first.fill(name)
    expect(page.locator("#problems")).to_contain_text(f"named {name}.", timeout=STATE_MS)
    expect(page.locator("#plan-status")).to_contain_text("tokens/s in", timeout=STATE_MS)
    expect(page.locator("#preview mark").first).to_be_visible(timeout=STATE_MS)
    choose(page, "plan-for", "4090")
    expect(page.locator("#plan-status")).to_contain_text("not for this machine", timeout=STATE_MS)
    expect(page.locator("#plan-status")).to_contain_text("4090")
    choose(page, "plan-for", "^This machine")
    expect(page.locator("#plan-status")).not_to_contain_text("4090", timeout=STATE_MS)
    expect(page.locator("#estimate.markup:not(.stale)")).to_contain_text("5,000", timeout=STATE_MS)
    check_no_overflow(page)
    expect(page.locator("#start")).to_be_in_viewport(ratio=0.99)
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


def watch_run(page: Page, run: Path) -> None:
    """See a run move: its step, its curve, and how far it is in the tab's title."""
    expect_state(page, "running")
    wait_for_step(run, 10)
    expect(page.locator(".bar-sentence")).to_contain_text(re.compile(r"step [1-9]"))
    expect(page).to_have_title(re.compile(rf"^\d+ % {run.name} "))
    page.wait_for_function("() => document.querySelector('.chart')?.calcdata?.[0]?.length > 2")
    check_no_overflow(page)


def compare_runs(page: Page, names: tuple[str, str]) -> None:
    """Tick two runs in the table and compare them: only what differs."""
    open_page(page)
    for name in names:
        page.get_by_label(f"compare {name}").check()
    page.get_by_role("button", name="Compare 2 selected").click()
    page.wait_for_url(re.compile(r"compare\?runs="))
    differences = page.get_by_role("region", name="Options that differ")
    expect(differences).to_contain_text("learning_rate")
    expect(differences).not_to_contain_text("lora_alpha")
    expect(page.locator(".chart").get_by_text(names[1]).first).to_be_visible()
    check_no_overflow(page)


def chat_with(page: Page, name: str) -> None:
    """Ask the base and the adapter."""
    open_page(page, f"chat?run={name}")
    page.get_by_role("button", name="Settings").click()
    tokens = page.get_by_label("Max new tokens", exact=True)
    tokens.fill("16")
    tokens.press("Tab")
    page.get_by_label("Message", exact=True).fill("Book lunch with Anna on Friday at 12:30 pm, please.")
    page.keyboard.press("Enter")
    for talk in ("Base", "With adapter"):
        answer = page.get_by_role("region", name=talk, exact=True).locator(".turn-model .subdued")
        expect(answer).to_have_count(1, timeout=STATE_MS)
    check_no_overflow(page)


def take_away(page: Page, name: str) -> None:
    """Merge a run's adapter into its base, and download it."""
    open_page(page, f"export?run={name}")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the adapter (").click()
    assert download.value.suggested_filename.startswith(name)
    page.get_by_role("tab", name="Merge", exact=True).click()
    expect(page.get_by_label("Output folder")).to_have_value(re.compile(f"^{name}.*-merged$"))
    do_job(page, "Merge", f"merge {name}")
    expect(page.locator("#job-log textarea")).to_have_value(re.compile("the adapter changed"))
    check_no_overflow(page)
    if makes_pictures():
        check_looks(page, "export")


def do_job(page: Page, tab: str, kind: str) -> None:
    """Press the button of a tab, and wait until its job is done."""
    page.get_by_role("button", name=tab, exact=True).click()
    row = page.locator("table tbody tr").filter(has_text=kind).first
    expect(row).to_contain_text("done", timeout=STATE_MS)


def delete_run(page: Page, name: str) -> None:
    """Delete a run, whose name is asked for, and be told so among the others."""
    open_page(page, f"run?name={name}")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_label("type its name").fill(name)
    check_no_overflow(page)
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.get_by_text(re.compile(f"Deleted.*{name}|{name}.*deleted"))).to_be_visible()


def stop_and_save(page: Page) -> None:
    page.get_by_role("button", name="Stop and save").click()
    expect_state(page, "stopped")


def resume(page: Page, run: Path, more_steps: int) -> None:
    """Resume a run, and see it log steps after the last that it had logged."""
    step = read_steps(run)[-1]
    page.get_by_role("button", name="Resume").click()
    expect_state(page, "running")
    wait_for_step(run, step + more_steps)


@pytest.mark.slow
def test_a_newcomer_does_all_there_is_to_do(start_ui, open_tab, make_place):
    """Catches whatever stands between a person and the end: a recipe that does not start, a resume from step zero, a
    dead rank that nobody names, runs that cannot be compared, talked to, merged or deleted; and on a phone, a Start
    that is out of sight, or a page that must be pushed sideways."""
    place = make_place()
    first, second = place / "runs" / "first", place / "runs" / "second"
    server = start_ui(place=place)

    # Saved, and its second rank is killed; resumed from what was saved.
    wide = open_tab(server, viewport=WIDE)
    start_from_recipe(wide, "first")
    asked = (first / "asked.yaml").read_text()
    assert "learning_rate: 0.005" in asked and "activation_checkpointing: false" in asked
    watch_run(wide, first)
    wide.get_by_role("button", name="Save now").click()
    expect(wide.locator(".note")).to_contain_text("Saved: checkpoint-")
    find_ranks(server, "first")[1].kill()
    expect_state(wide, "failed")
    expect(wide.locator(".note-error")).to_contain_text(re.compile("rank 1.* SIGKILL"))
    assert find_ranks(server, "first") == {}
    saved = max(int(folder.name.removeprefix("checkpoint-")) for folder in first.glob("checkpoint-*"))
    assert saved >= 10
    resume(wide, first, 4)
    steps = read_steps(first)
    assert steps == sorted(set(steps))
    stop_and_save(wide)
    assert find_ranks(server, "first") == {}

    # The same on a phone, for a run that differs in its learning rate.
    phone = open_tab(server, viewport=PHONE)
    start_from_recipe(phone, "second", learning_rate="1e-3")
    watch_run(phone, second)
    stop_and_save(phone)
    resume(phone, second, 4)
    stop_and_save(phone)

    for tab in (wide, phone):
        compare_runs(tab, ("first", "second"))
    for tab in (wide, phone):  # which share what is loaded
        chat_with(tab, "first")
    phone.get_by_role("button", name="Unload").click()
    expect(phone.get_by_text("Not loaded: unloaded")).to_be_visible()
    for tab, run in ((wide, first), (phone, second)):
        take_away(tab, run.name)
        assert run.with_name(f"{run.name}-merged").joinpath("model.safetensors").is_file()
        delete_run(tab, run.name)
        tab.close()  # which would miss the server
    server.stop()
    assert server.list_processes() == []
