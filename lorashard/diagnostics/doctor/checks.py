"""What a check found, and how it is shown."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...errors import LorashardError

Result = Literal["ok", "skip", "warn", "FAIL"]
_ORDER: tuple[Result, ...] = ("skip", "ok", "warn", "FAIL")
_NAME_WIDTH = 16
_WIDTH = 110


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        found: what was measured, or what is wrong.
        fix: what to do about it, where `found` does not say it.
        figures: the numbers in `found`, with their units in their names.
    """

    name: str
    result: Result
    found: str
    fix: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """Return the check in a line, and what to do in the next."""
        head = f"{self.result:<4}  {self.name:<{_NAME_WIDTH}}  "
        indent = " " * len(head)
        lines = textwrap.wrap(head + self.found, _WIDTH, subsequent_indent=indent, break_long_words=False)
        if self.fix:
            lines += textwrap.wrap(
                f"{indent}-> {self.fix}", _WIDTH, subsequent_indent=indent + "   ", break_long_words=False
            )
        return "\n".join(lines)


def merge_ranks(by_rank: Sequence[Sequence[Check]]) -> list[Check]:
    """Return every check once: rank 0's, or that of the first rank for which it went worst."""
    merged: dict[tuple[str, int], tuple[int, Check]] = {}
    for rank, checks in enumerate(by_rank):
        num_seen: Counter[str] = Counter()  # a check may have found several things
        for check in checks:
            key = check.name, num_seen[check.name]
            num_seen[check.name] += 1
            known = merged.get(key)
            if known is None or _ORDER.index(check.result) > _ORDER.index(known[1].result):
                merged[key] = rank, check
    return [
        check if check.result in ("ok", "skip") or len(by_rank) == 1 else _of_rank(rank, check)
        for rank, check in merged.values()
    ]


def _of_rank(rank: int, check: Check) -> Check:
    return Check(check.name, check.result, f"rank {rank}: {check.found}", check.fix, check.figures)


def explain_error(error: BaseException) -> str:
    """Return an error's first line, and its type where it is not lorashard's own."""
    reason = next(iter(str(error).splitlines()), "no reason given")
    return reason if isinstance(error, LorashardError) else f"{type(error).__name__}: {reason}"


def has_failed(checks: Sequence[Check]) -> bool:
    return any(check.result == "FAIL" for check in checks)


def summarize(checks: Sequence[Check]) -> str:
    """Say in a line how many checks went wrong."""
    failed, warned = (sum(check.result == result for check in checks) for result in ("FAIL", "warn"))
    if not failed and not warned:
        return f"all {len(checks)} checks are ok"
    warnings = f"{warned} warning{'s' if warned > 1 else ''}"
    if not failed:
        return f"{len(checks)} checks: {warnings}, nothing that stops a run"
    return f"{failed} of {len(checks)} checks failed" + (f", {warnings}" if warned else "")


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the checks as JSON."""
    return {
        "is_ok": not has_failed(checks),
        "checks": [check.to_json() for check in checks],
    }
