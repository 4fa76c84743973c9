"""The table of runs: sorted, filtered, and a choice of runs to compare; and a server that has no run yet."""

from __future__ import annotations

import json
import re

import pytest
from helpers.browser import check_no_overflow, open_page
from playwright.sync_api import expect

LONG = "sft-all-" + "of-a-long-name-" * 6 + "x"
NAMES = ("sft-base", "sft-rank-32", "sft-rank-8")


def list_names(page) -> list[str]:
    return page.locator("tbody a").all_inner_texts()


def test_table_is_sorted_filtered_and_compared(page, ui_server, add_demo_run):
    """A click on a header that does nothing, a filter that hides the wrong run, ticks that move to another run or that
    nobody sees; state and progress pushed out of sight by long names and paths, a run that is left out without a word,
    or deleted without a question; and in the dark, columns out of sight of a phone, and names black on black."""
    for name, loss in zip(NAMES, (1.5, 0.5, 2.5), strict=True):
        folder = add_demo_run(ui_server.root, name)
        last_step = json.loads((folder / "status.json").read_text())["max_steps"]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": last_step, "time": 1, "loss": loss}) + "\n")
    open_page(page)
    base, high, low = NAMES
    expect(page.get_by_role("link", name=base)).to_be_visible()
    page.get_by_label("Filter").fill("SFT-")
    expect(page.locator("tbody a")).to_have_count(3)

    page.get_by_role("button", name=re.compile("^loss")).click()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("loss")
    assert list_names(page) == [high, base, low]
    page.get_by_role("button", name=re.compile("^loss")).press("Enter")
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("loss")
    assert list_names(page) == [low, base, high]

    ticked = page.get_by_label(f"compare {low}")
    ticked.check()
    page.get_by_label(f"compare {high}").check()
    page.get_by_role("button", name=re.compile("^name")).click()
    expect(page.locator("tbody a").first).to_have_text(base)
    folder = add_demo_run(ui_server.root, LONG)  # a row more, above all others
    model, dataset = f"/{'models/' * 20}base", f"/{'data/' * 30}x.jsonl"
    (folder / "config.yaml").write_text(f"model_name_or_path: {model}\ndataset: {dataset}\n")
    (ui_server.root / "sft<b>").mkdir()
    (ui_server.root / "sft<b>/status.json").write_text("{}")
    expect(page.locator("tbody a").first).to_have_text(LONG)
    expect(page.get_by_text("Not listed")).to_contain_text("sft<b>")
    assert [box.input_value() for box in page.locator("input[name=runs]:checked").all()] == [high, low]
    for color_scheme in ("dark", "light"):
        page.emulate_media(color_scheme=color_scheme)
        fills = [
            box.evaluate("e => getComputedStyle(e).backgroundColor")
            for box in (ticked, page.get_by_label(f"compare {base}"))
        ]
        assert fills[0] != fills[1] and not fills[0].endswith(", 0)"), fills

    page.get_by_label("Filter").fill("RANK")
    expect(page.locator("tbody a")).to_have_count(2)
    page.get_by_label("Filter").fill("nothing like it")
    expect(page.get_by_text("No run matches")).to_be_visible()
    page.get_by_label("Filter").fill("sft-")
    expect(page.locator("tbody a")).to_have_count(4)

    page.set_viewport_size({"width": 1440, "height": 900})
    table = page.get_by_role("region", name="Runs", exact=True)
    assert table.evaluate("e => e.scrollWidth - e.clientWidth") <= 0
    for box in (ticked, page.get_by_label(f"compare {high}")):
        box.uncheck()
    page.get_by_label(f"compare {LONG}").check()
    page.get_by_role("button", name="Delete 1 selected").click()
    expect(page.get_by_text("Delete this run")).to_contain_text(LONG)
    page.get_by_role("button", name="Keep them").click()
    expect(page.get_by_text("Delete this run")).to_be_hidden()
    assert (ui_server.root / LONG).exists()
    page.get_by_role("button", name="Delete 1 selected").click()
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.get_by_text(f"Deleted: {LONG}")).to_be_visible()
    expect(page.locator("[data-delete]")).to_be_hidden()
    expect(page.locator("tbody a")).to_have_count(3)
    assert not (ui_server.root / LONG).exists()
    for box in (page.get_by_label(f"compare {high}"), ticked):
        box.check()

    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 900})
    link = page.get_by_role("link", name=base)
    link.scroll_into_view_if_needed()
    expect(link).to_be_in_viewport()
    expect(page.get_by_role("row").filter(has=link).get_by_text(re.compile(r"\d+ / \d+"))).to_be_in_viewport()
    check_no_overflow(page)
    lightness = page.locator("tbody td").nth(2).evaluate("e => getComputedStyle(e).color.match(/\\d+/g).map(Number)[0]")
    assert lightness > 150

    page.get_by_role("button", name="Compare 2 selected").click()
    expect(page).to_have_url(re.compile(r"compare\?runs=sft-rank-32&runs=sft-rank-8"))


@pytest.mark.slow  # a server of its own
def test_an_empty_folder_leads_to_a_new_run(start_ui, open_tab):
    """Somebody who comes for the first time would see an empty page, and not know what to do."""
    page = open_tab(start_ui())
    for path in ("chat", "export"):
        open_page(page, path)
        expect(page.get_by_text("adapter yet")).to_be_visible()
        expect(page.get_by_role("link", name="New run").last).to_have_attribute("href", "new")
    open_page(page, "compare")
    expect(page.get_by_text("Choose two or more runs")).to_be_visible()
    open_page(page)
    expect(page.get_by_text("No runs yet.")).to_be_visible()
    page.get_by_role("link", name="Start the first").click()
    expect(page).to_have_url(re.compile(r"/new$"))
