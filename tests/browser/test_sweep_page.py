"""A sweep: its jobs below it in the table of runs, and its page."""

from __future__ import annotations

import pytest
from helpers.browser import open_page
from helpers.looks import check_axe
from helpers.ui_runs import make_sweep, owned
from playwright.sync_api import expect

_CURVES = "() => document.querySelector('.chart')?.data?.length === 8"  # of each job the raw curve and the smoothed one
_AXES = "() => document.querySelectorAll('.chart')[1]?.data?.[0]?.dimensions?.length === 3"
_IS_WIDE = "() => document.documentElement.scrollWidth > innerWidth"


@pytest.mark.parametrize("width", [1400, pytest.param(390, marks=pytest.mark.slow)])
def test_jobs_are_seen_and_stopped(page, ui_server, width):
    """Catches a sweep that cannot be opened by keyboard, or closes with each refresh, a link to a job that leads
    nowhere, jobs that are in no chart, and a button that stops another job than its own."""
    name = f"sweep-{width}"
    folder = make_sweep(ui_server.root, name, phase="train", a="halved")
    page.set_viewport_size({"width": width, "height": 900})
    with owned(folder):
        open_page(page)
        job = page.locator(f"a[href$='{name}%2Fd']")
        expect(job).to_have_count(1)
        expect(job).to_be_hidden()
        opener = page.get_by_role("button", name=f"4 jobs of {name}")
        opener.press("Enter")
        expect(job).to_be_visible()
        expect(opener).to_have_attribute("aria-expanded", "true")
        page.get_by_role("link", name=name, exact=True).click()
        page.wait_for_function(_CURVES)
        page.wait_for_function(_AXES)
        table = page.get_by_role("region", name="Jobs")
        expect(table.get_by_role("link")).to_have_text(["d", "c", "b", "a"])
        expect(table).to_contain_text("halved")
        assert not page.evaluate(_IS_WIDE)
        check_axe(page)
        table.get_by_role("button", name="Stop the job c").click()
        expect(table.get_by_role("button", name="Stop the job c")).to_have_count(0)
        assert (folder / "c/stop").exists() and not (folder / "d/stop").exists()
        table.get_by_role("link", name="d", exact=True).click()
        expect(page.get_by_role("heading", name=f"{name}/d")).to_be_visible()
        expect(page.get_by_role("link", name="Sweep", exact=True)).to_be_visible()
