"""Paths as the person who started the server would write them."""

from __future__ import annotations

import os
import re


def show_paths(text: str) -> str:
    """Return a path, or a text with paths in it: what lies where the server was started from there, else under `~`."""
    text = _shorten(text, os.getcwd(), ".")
    return _shorten(text, os.path.expanduser("~"), "~")


def write_path(path: str) -> str:
    """Return a path as a command that is typed where the server was started may have it: relative, or as it is."""
    return _shorten(path, os.getcwd(), ".")


def _shorten(text: str, folder: str, name: str) -> str:
    """Call a folder by another name wherever a text has its path; what is in `.` needs no name."""
    if folder == os.sep:
        return text
    whole = re.compile(rf"(?<![\w./~-]){re.escape(folder)}(?:(?=$|[\s'\"`,:;)\]])|{os.sep}(?=(\S?)))")
    return whole.sub(lambda found: "" if found[1] and name == "." else name + found[0][len(folder) :], text)
