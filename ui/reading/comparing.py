"""What several runs were told differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .reader import RunReader
from .sanitize import show_safely

# Where a run lies and how it was begun, of which no two runs have the same.
_ITS_OWN = ("output_dir", "resume_from_checkpoint", "overwrite_output_dir")
_NOT_GIVEN = "(not given)"


def differences(readers: Sequence[RunReader]) -> list[tuple[str, list[str]]]:
    """Return the options, and the versions of libraries, in which runs differ, each with its value in each run.

    Names of options come in the order of the first run that has them; versions come last, as `version of torch`.
    """
    options = [{key: value for key, value in one.options().items() if key not in _ITS_OWN} for one in readers]
    versions = [{f"version of {name}": version for name, version in one.versions().items()} for one in readers]
    return [*_find_differences(options), *_find_differences(versions)]


def _find_differences(given: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    names = list(dict.fromkeys(name for one in given for name in one))
    rows = [(name, [_show(one, name) for one in given]) for name in names]
    return [(name, shown) for name, shown in rows if len(set(shown)) > 1]


def _show(given: Mapping[str, Any], name: str) -> str:
    if name not in given:
        return _NOT_GIVEN
    return show_option(given[name])


def show_option(value: Any) -> str:
    """Return an option's value as text: two that mean the same to an option are the same text."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))  # 1.0 and 1 are the same to every option
    if isinstance(value, str):
        value = _as_number(value)
    return show_safely(str(value))


def _as_number(text: str) -> str | float:
    """Return the number that YAML has left as a text: it does not know `5e-3` as one."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() and abs(number) < 1e15 else number
