"""How the pages look to those who must read them, with runs of eight ranks and a thousand steps; their pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.browser import makes_pictures, open_page
from helpers.looks import SCHEMES, check_axe, check_looks
from helpers.shown_runs import LIVE, OTHERS, SWEEP, shown_runs, write_shown_model
from playwright.sync_api import Page, expect

CPU_BUDGET_S = 150  # with pictures; a third of it without
WORKER_MS = 150_000  # it loads torch first
_IS_DRAWN = "() => document.querySelector('.chart')?.data?.length > 0"


def show_form(page: Page, place: Path) -> None:
    """Fill in the form for an 8B on eight GPUs that are not here."""
    write_shown_model(place / "models/llama-3.1-8b")
    open_page(page, "new")
    expect(page.locator("#problems")).to_contain_text("Still missing")
    given = {"model_name_or_path": "models/llama-3.1-8b", "dataset": "examples/demo/train.jsonl"}
    for name, text in (given | {"max_length": "4096", "per_device_train_batch_size": "4"}).items():
        field = page.locator(f"#option-{name}").locator("textarea, input").first
        field.fill(text)
        field.press("Tab")
    expect(page.locator("#preview mark").first).to_be_visible(timeout=WORKER_MS)
    for elem_id, choice in (("plan-for", "4090"), ("plan-count", "^8 GPUs")):
        page.locator(f"#{elem_id} input").first.click()
        page.get_by_role("option", name=re.compile(choice)).first.click()
    expect(page.locator("#plan-status")).to_contain_text("Planned for 8", timeout=WORKER_MS)
    expect(page.locator("#estimate.markup:not(.stale) .figures")).to_be_visible(timeout=WORKER_MS)
    page.get_by_role("heading", name="New run").click()


@pytest.mark.slow
def test_every_page_can_be_read_in_both_themes(start_ui, open_tab, make_place):
    """Catches text whose contrast is below 4.5:1, a field or a button without a name, and a page that a phone must push
    sideways; and makes the pictures."""
    place = make_place()
    with shown_runs(place / "runs"):
        page = open_tab(start_ui(place=place))
        open_page(page)
        expect(page.get_by_role("link", name=LIVE)).to_be_visible()
        check_looks(page, "runs")
        page.get_by_role("button", name=f"4 jobs of {SWEEP}").click()
        expect(page.get_by_role("link", name="lora_r-8_learning_rate-0.0001")).to_be_visible()
        check_looks(page)
        open_page(page, f"sweep?name={SWEEP}")
        page.wait_for_function(_IS_DRAWN)
        check_looks(page, "sweep", height=1200)
        open_page(page, f"run?name={LIVE}")
        page.wait_for_function(_IS_DRAWN)
        check_looks(page, "run", height=1200)
        for tab in ("Ranks", "Logs", "Samples", "Set-up"):
            page.get_by_role("tab", name=tab).click()
            page.wait_for_timeout(400)
            if tab == "Ranks":
                check_looks(page, "ranks", height=1200)
                continue
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                check_axe(page)
        open_page(page, f"compare?runs={LIVE},{OTHERS[0]}")
        page.wait_for_function(_IS_DRAWN)
        check_looks(page, "compare", height=1200)
        open_page(page, f"export?run={OTHERS[0]}")
        expect(page.get_by_role("tab", name="Merge", exact=True)).to_be_visible()
        check_looks(page)  # its picture, with jobs, is made by the story
        if makes_pictures():  # its own test looks at it otherwise
            show_form(page, place)
            check_looks(page, "new-run", height=1200)
        open_page(page, f"chat?run={OTHERS[0]}")
        expect(page.get_by_label("Message", exact=True)).to_be_visible()
        check_looks(page)  # its picture, with answers, is made by the chat's own tests
