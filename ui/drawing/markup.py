"""HTML that is safe against injection: all text is escaped, and only `tag` makes markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from .wording import NONE


class Markup(str):
    """Text that is already HTML."""


# An icon for each state, so that states can be told apart without color.
_ICONS = {
    "queued": "\u25f7",
    "starting": "\u2026",
    "running": "\u25b6",
    "stopping": "\u25a0",
    "done": "\u2713",
    "stopped": "\u25a0",
    "failed": "\u2715",
    "dead": "\u26a0",
    "canceled": "\u25a0",
    "lost": "\u26a0",
    "waiting": "\u25f7",
    "halved": "\u25a0",
}
_TAGS = re.compile(r"<span.*?</span>|<[^>]*>")
_AS_TEXT = "\ufe0e"  # or a phone draws an emoji


def tag(name: str, /, *children: str, **attributes: str | int | bool | None) -> Markup:
    """Return an element; children and attributes are escaped, except for children that are markup.

    Args:
        attributes: `class_`, `aria_label`, `data_name` and so on; True is an attribute without a value, None and False
            are none.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.strip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening if name == "input" else f"{opening}{join(children)}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Return the parts one after the other, each escaped unless it is markup."""
    return Markup(_escape(between).join(_escape(part) for part in parts))


def link(page: str, text: str, class_: str | None = None, /, **query: str) -> Markup:
    """Return a link to a page of this app, relative, so that it works behind a proxy's path."""
    words = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
    return tag("a", text, href=f"{page}?{words}" if words else page, class_=class_)


def badge(state: str) -> Markup:
    """Return a state as an icon and a word."""
    icon = tag("span", _ICONS.get(state, "") + _AS_TEXT, aria_hidden="true")
    return tag("span", icon, " ", state, class_=f"state state-{state}")


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str, num_text: int = 1, class_: str = ""
) -> Markup:
    """Return a table, scrolled sideways where it is wider than the screen.

    Args:
        headers: text, or markup of `th` elements.
        caption: what the table shows, for screen readers.
        num_text: how many columns at the left are text; the others are numbers, and stand at the right.
        class_: `cards` shows each row as a card of its own on a phone.
    """
    kinds = ["text" if number < num_text else "number" for number in range(len(headers))]
    head = tag("tr", *(_head(header, kind) for header, kind in zip(headers, kinds, strict=True)))
    names = [_TAGS.sub("", header).strip() for header in headers]
    columns = list(zip(kinds, names, strict=True))
    body = [tag("tr", *(_cell(cell, *column) for cell, column in zip(row, columns, strict=True))) for row in rows]
    content = join((tag("caption", caption), tag("thead", head), tag("tbody", *body)))
    around = f"wide-table {class_}".strip()
    return tag("div", tag("table", content), class_=around, tabindex=0, role="region", aria_label=caption)


def facts(pairs: Iterable[tuple[str, str]]) -> Markup:
    """Return short facts in a row, each under its name."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def figures(found: Iterable[tuple[str, str, str]]) -> Markup:
    """Return what matters of a page, large: for each its name, its value, and what to compare it with, or nothing."""
    cards = []
    for name, value, more in found:
        below = tag("dd", more, class_="more") if more else ""
        cards.append(tag("div", tag("dt", name), tag("dd", value, class_="value"), below, class_="figure"))
    return tag("dl", *cards, class_="figures")


def note(text: str, kind: str = "info") -> Markup:
    """Return a sentence that screen readers announce; kind is info, warning or error."""
    mark = {"info": "", "warning": "\u26a0" + _AS_TEXT + " ", "error": "\u2715" + _AS_TEXT + " "}[kind]
    return tag("p", mark, text, class_=f"note note-{kind}", role="alert" if kind == "error" else "status")


def _cell(cell: str, kind: str, name: str) -> Markup:
    blank = " blank" if cell in ("", NONE) else ""
    return tag("td", cell, class_=kind + blank, data_label=name)


def _head(header: str, kind: str) -> Markup:
    return header if isinstance(header, Markup) else tag("th", header, scope="col", class_=kind)


def _escape(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(text)
