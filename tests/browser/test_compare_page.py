"""Runs compared: curves over each other, their ends, and the options that differ."""

from __future__ import annotations

import re

from helpers.browser import open_page
from playwright.sync_api import expect

_NAMES = "() => document.querySelector('.chart').data.map(trace => trace.name)"
_SECOND = "() => document.querySelectorAll('.chart')[1]?.layout?.yaxis.title.text === 'eval loss'"
_LAYOUT = "() => document.querySelector('.chart').layout"
_IS_DRAWN = "() => document.querySelector('.chart')?.data?.length > 0"


def test_two_runs_are_compared(page, ui_server, add_demo_run):
    """Curves of one run only, the wrong axis, a list of all options in place of those that differ, or a traceback for
    a run that was deleted while its name stood in a bookmark; a reload that forgets what was compared."""
    for name, rate in (("slow", "1.0e-04"), ("fast", "5.0e-03")):
        config = add_demo_run(ui_server.root, name) / "config.yaml"
        lines = config.read_text().splitlines()
        lines = [line for line in lines if not line.startswith("learning_rate:")]
        config.write_text("\n".join([*lines, f"learning_rate: {rate}"]) + "\n")
    begin = len(ui_server.log_path.read_text())
    open_page(page, "compare?runs=gone&runs=slow&runs=..%2Fetc")
    expect(page.get_by_text("“gone”")).to_be_visible()
    expect(page.get_by_text("“../etc”")).to_be_visible()
    page.wait_for_function(_IS_DRAWN)
    expect(page.get_by_text("Choose another run")).to_be_visible()
    expect(page.get_by_text("Error", exact=True)).to_have_count(0)
    assert "Traceback" not in ui_server.log_path.read_text()[begin:]

    open_page(page, "compare?runs=slow,fast")
    expect(page).to_have_title("Compare slow, fast - lorashard")
    page.wait_for_function(_IS_DRAWN)
    assert set(page.evaluate(_NAMES)) == {"slow", "fast"}
    rows = page.get_by_role("region", name="Options that differ").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("learning_rate")
    ends = page.get_by_role("region", name="loss of each").locator("tbody tr")
    expect(ends).to_have_count(2)

    page.get_by_label("tokens", exact=True).check()
    page.wait_for_function(f"() => ({_LAYOUT})().xaxis.title.text === 'tokens'")
    page.get_by_label("Logarithmic axis").check()
    page.wait_for_function(f"() => ({_LAYOUT})().yaxis.type === 'log'")
    page.get_by_label("Metrics").click()
    page.get_by_role("option", name="eval_loss", exact=True).click()
    page.wait_for_function(_SECOND)
    page.get_by_label("Baseline").click()
    page.get_by_role("option", name="fast", exact=True).click()
    expect(ends.first).to_contain_text("baseline")
    expect(ends.first).to_contain_text("fast")
    expect(page).to_have_url(re.compile("over=tokens&baseline=fast$"))
    page.reload()  # which forgets nothing
    page.wait_for_function(_SECOND)
    page.wait_for_function(f"() => ({_LAYOUT})().xaxis.title.text === 'tokens'")
    expect(ends.first).to_contain_text("fast")
    expect(rows.locator("strong")).to_have_count(1)
