"""Which tests read, import or patch private names of our own code: `python tests/helpers/privates.py` lists them all.

A private name is one that begins with an underscore and that a file of `lorashard/` or `ui/` defines; those of other
libraries are not looked for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("lorashard", "lorashard_ui")
_OF_NAMED_TUPLES = {"_replace", "_asdict"}  # public, whatever they begin with
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def find_uses(*folders: str) -> dict[str, list[str]]:
    """Return the private names that tests use, by `file::function`; of what is in no function, by `file::variable`.

    Args:
        folders: files or folders of tests, from the project's root.
    """
    own = find_own_names()
    files = [path for folder in folders for path in _list_files(folder)]
    return {
        f"{path.relative_to(_ROOT)}::{place}": names
        for path in files
        for place, names in find_uses_in(path.read_text(encoding="utf-8"), own).items()
    }


def find_uses_in(source: str, own: set[str]) -> dict[str, list[str]]:
    """Return which of our own private names a test file's source uses, by function or variable."""
    found: dict[str, set[str]] = {}
    for statement in ast.parse(source).body:
        names = set(_use(statement, own))
        if names:
            found.setdefault(_name(statement), set()).update(names)
    return {place: sorted(names) for place, names in found.items()}


@cache
def find_own_names() -> set[str]:
    """Return the private names of functions, classes, variables and attributes that our own files define."""
    names = {name for folder in ("lorashard", "ui") for path in _list_files(folder) for name in _define(path)}
    return names - _OF_NAMED_TUPLES


def _list_files(folder: str) -> list[Path]:
    place = _ROOT / folder
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def _define(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = ""
        if isinstance(node, _DEFINITIONS):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            name = node.attr
        if re.match(r"_[A-Za-z]", name):
            yield name


def _use(statement: ast.AST, own: set[str]) -> Iterator[str]:
    pieces = [piece for node in ast.walk(statement) if isinstance(node, ast.JoinedStr) for piece in node.values]
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and node.attr in own and not _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _PACKAGES:
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            yield from _use_in_text(node.value, own)


def _use_in_text(text: str, own: set[str]) -> Iterator[str]:
    """Yield the private names in a string: it is a name, as `setattr` takes it, or a script that a process runs."""
    if re.fullmatch(r"(\w+\.)*_\w+", text):
        yield from {text.rpartition(".")[2]} & own
    elif "\n" in text:
        try:
            script = ast.parse(text)
        except SyntaxError:
            return
        yield from _use(script, own)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _name(statement: ast.stmt) -> str:
    if isinstance(statement, _DEFINITIONS):
        return statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else "import"


if __name__ == "__main__":
    uses = find_uses(*(sys.argv[1:] or ["tests"]))
    for place, names in uses.items():
        print(f"{place}: {', '.join(names)}")
    print(f"{len(uses)} functions")
