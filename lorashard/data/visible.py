"""Text as it is: what turns the direction of writing, or cannot be seen, is written out. Imports no library."""

from __future__ import annotations

import re
import unicodedata

# Categories of control, format (also of direction) and surrogate characters, and of separators of lines.
_UNSEEN_KINDS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# Letters and marks that have no picture: fillers of Hangul, the blank of Braille, the joiner, supplementary selectors.
_BLANKS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0" + "".join(map(chr, range(0xE0100, 0xE01F0)))
_ASCII_NAMES = {code: chr(0x2400 + code) for code in range(32)} | {127: "\u2421"}  # their pictures
_NOT_PLAIN = re.compile(f"[^\\n\\t -~]|[{_BLANKS}]")


def name_unseen(character: str) -> str | None:
    """Return what to show in place of a character: `␛` or `U+202E`; None where it shows itself."""
    if character in "\n\t" or (character not in _BLANKS and unicodedata.category(character) not in _UNSEEN_KINDS):
        return None
    return _ASCII_NAMES.get(ord(character), f"U+{ord(character):04X}")


def describe_unseen(character: str) -> str:
    """Return the code and the name of a character, such as `U+202E RIGHT-TO-LEFT OVERRIDE`."""
    return f"U+{ord(character):04X} {unicodedata.name(character, 'control character')}"


def split_unseen(text: str) -> list[tuple[str, str | None]]:
    """Return a text in parts: as (text, None) what shows itself, and each other character with what to show for it."""
    parts: list[tuple[str, str | None]] = []
    start = 0
    for found in _NOT_PLAIN.finditer(text):
        name = name_unseen(found[0])
        if name is not None:
            parts += [(text[start : found.start()], None)] if found.start() > start else []
            parts.append((found[0], name))
            start = found.end()
    return [*parts, (text[start:], None)] if start < len(text) else parts


def show_unseen(text: str) -> str:
    """Return a text for a terminal, which it cannot control: `␛` for an escape, `⟨U+202E⟩` for an override."""
    shown = ((part, name) for part, name in split_unseen(text))
    return "".join(part if name is None else name if len(name) == 1 else f"\u27e8{name}\u27e9" for part, name in shown)
