"""How a page looks: its contrast by axe-core, in both themes and at both widths, and its picture."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from helpers.browser import check_no_overflow, makes_pictures
from helpers.paths import ROOT as REPOSITORY

WIDTHS = {"wide": 1440, "phone": 390}
SCHEMES = ("light", "dark")
_SERIOUS = ("serious", "critical")  # what keeps somebody who cannot see, or not well, from using the page
_OPTIONS = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa"]}
_GRADIOS = {("scrollable-region-focusable", "cm-scroller")}  # rules that parts of Gradio break, by their class


def check_axe(page: Page) -> None:
    """Fail where axe-core finds something serious: text with a contrast below 4.5:1, a field without a name."""
    found = Axe().run(page, options=_OPTIONS).response["violations"]
    said = [
        f"{rule['id']}: {node['target']} {node['html'][:160]} {' '.join(node['failureSummary'].split())[:240]}"
        for rule in found
        if rule["impact"] in _SERIOUS
        for node in rule["nodes"]
        if not any(rule["id"] == name and class_ in node["html"] for name, class_ in _GRADIOS)
    ]
    assert not said, f"{page.url}, {page.viewport_size}:\n" + "\n".join(said)


def check_looks(page: Page, picture: str = "", height: int = 900) -> None:
    """Check an open page in both themes and at both widths, and leave it light and wide.

    Args:
        picture: where LORASHARD_SCREENSHOTS is set, docs/img/PICTURE-{wide,phone}[-dark].png are made anew.
    """
    for width_name, width in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": height if width_name == "wide" else 844})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.evaluate("window.scrollTo(0, 0)")
            page.wait_for_timeout(500)  # charts follow the window
            check_no_overflow(page)
            if (width_name, scheme) in (("wide", "light"), ("phone", "dark")):  # the same elements, mostly
                check_axe(page)
            if picture and makes_pictures():
                suffix = "-dark" if scheme == "dark" else ""
                page.screenshot(path=REPOSITORY / f"docs/img/{picture}-{width_name}{suffix}.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": WIDTHS["wide"], "height": height})
