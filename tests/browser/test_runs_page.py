"""The table of runs: empty, sorted, filtered, and a choice of runs to compare."""

from __future__ import annotations

import json
import re

from browser_support import check_no_overflow, open_page, shoot
from playwright.sync_api import expect


def list_names(page) -> list[str]:
    return page.locator("tbody a").all_inner_texts()


def test_empty_folder_leads_to_a_new_run(start_ui, open_tab):
    """Somebody who comes for the first time would see an empty table, and not know what to do."""
    page = open_tab(start_ui())
    open_page(page)
    expect(page.get_by_text("No runs yet.")).to_be_visible()
    page.get_by_role("link", name="Start the first run").click()
    expect(page).to_have_url(re.compile(r"/new$"))


def test_table_is_sorted_filtered_and_compared(page, ui_server, add_demo_run):
    """A click on a header that does nothing, a filter that hides the wrong run, ticks that move to another run."""
    for name, loss in (("apple", 1.5), ("berry", 0.5), ("cherry", 2.5)):
        folder = add_demo_run(ui_server.root, name)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 12, "time": 1, "loss": loss}) + "\n")
    open_page(page)
    expect(page.locator("tbody a")).to_have_count(3)

    page.get_by_role("button", name=re.compile("^loss")).click()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("loss")
    assert list_names(page) == ["berry", "apple", "cherry"]
    page.get_by_role("button", name=re.compile("^loss")).press("Enter")
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("loss")
    assert list_names(page) == ["cherry", "apple", "berry"]

    page.get_by_label("compare cherry").check()
    page.get_by_label("compare berry").check()
    page.get_by_role("button", name=re.compile("^name")).click()
    expect(page.locator("tbody a").first).to_have_text("apple")
    add_demo_run(ui_server.root, "aaa")  # a row more, above all others
    expect(page.locator("tbody a").first).to_have_text("aaa")
    assert [box.input_value() for box in page.locator("input[name=runs]:checked").all()] == ["berry", "cherry"]

    page.get_by_label("Filter").fill("ERR")
    expect(page.locator("tbody a")).to_have_count(2)
    page.get_by_label("Filter").fill("nothing like it")
    expect(page.get_by_text("No run fits the filter.")).to_be_visible()
    page.get_by_label("Filter").fill("")
    expect(page.locator("tbody a")).to_have_count(4)
    shoot(page, "runs")

    page.get_by_role("button", name="Compare 2 selected").click()
    expect(page).to_have_url(re.compile(r"compare\?runs=berry&runs=cherry"))


def test_table_reads_on_a_phone_and_in_the_dark(open_tab, ui_server, add_demo_run):
    """Columns out of sight at the right, and names that are black on black."""
    if not (ui_server.root / "apple").exists():
        add_demo_run(ui_server.root, "apple")
    page = open_tab(ui_server, color_scheme="dark", viewport={"width": 390, "height": 900})
    open_page(page)
    page.get_by_role("link", name="apple").scroll_into_view_if_needed()
    expect(page.get_by_role("link", name="apple")).to_be_in_viewport()
    expect(
        page.get_by_role("row").filter(has=page.get_by_role("link", name="apple")).get_by_text("12 / 12")
    ).to_be_in_viewport()
    check_no_overflow(page)
    lightness = page.locator("tbody td").nth(2).evaluate("e => getComputedStyle(e).color.match(/\\d+/g).map(Number)[0]")
    assert lightness > 150
