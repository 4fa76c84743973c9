"""What a check found, how the ranks' findings become one list, and how it is shown."""

from __future__ import annotations

import copy
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ..errors import LorashardError

Result = Literal["ok", "skip", "warn", "FAIL"]
_ORDER: tuple[Result, ...] = ("skip", "ok", "warn", "FAIL")
_NAME_WIDTH = 16
_WIDTH = 110


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        found: what was measured, or what is wrong, on one line.
        fix: what to do about it, where `found` does not say it.
        figures: the values in `found`, with their units in their names.
    """

    name: str
    result: Result
    found: str
    fix: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def passed(cls, name: str, found: str, **figures: Any) -> Check:
        """Return a check that found nothing wrong."""
        return cls(name, "ok", found, None, figures)

    @classmethod
    def failed(cls, name: str, found: str, fix: str | None = None, **figures: Any) -> Check:
        """Return a check that found what stops a run, or makes its result wrong."""
        return cls(name, "FAIL", found, fix, figures)

    @classmethod
    def of_error(cls, name: str, error: LorashardError) -> Check:
        """Return a check that failed with an error, without the fix in its sentence."""
        unfixed = copy.copy(error)
        unfixed.fix = None
        return cls.failed(name, " ".join(str(unfixed).split()), error.fix)

    @classmethod
    def warned_if(cls, is_bad: bool, name: str, found: str, fix: str, **figures: Any) -> Check:
        """Return a check that found what slows a run, or may stop it later, where `is_bad`."""
        return cls(name, "warn", found, fix, figures) if is_bad else cls.passed(name, found, **figures)

    @property
    def has_failed(self) -> bool:
        return self.result == "FAIL"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        """Return the check on a line, and its fix on the next."""
        head = f"{self.result:<4}  {self.name:<{_NAME_WIDTH}}  "
        indent = " " * len(head)
        lines = textwrap.wrap(head + self.found, _WIDTH, subsequent_indent=indent, break_long_words=False)
        if self.fix:
            fix, inner = f"{indent}-> {self.fix}", indent + "   "
            lines += textwrap.wrap(fix, _WIDTH, subsequent_indent=inner, break_long_words=False)
        return "\n".join(lines)


def merge_ranks(by_rank: Sequence[Sequence[Check]]) -> list[Check]:
    """Return every check once: rank 0's, or that of the first rank with the worst result.

    Args:
        by_rank: the same checks from every rank, up to the first that fails there.
    """
    found: dict[tuple[str, int], list[tuple[int, Check]]] = {}
    for rank, checks in enumerate(by_rank):
        num_seen: Counter[str] = Counter()  # a check may report several findings
        for check in checks:
            found.setdefault((check.name, num_seen[check.name]), []).append((rank, check))
            num_seen[check.name] += 1
    return [_choose_worst(of_ranks, len(by_rank)) for of_ranks in found.values()]


def _choose_worst(of_ranks: Sequence[tuple[int, Check]], num_ranks: int) -> Check:
    """Return the worst result; it names its rank unless all ranks found the same."""
    rank, worst = max(of_ranks, key=lambda item: _ORDER.index(item[1].result))  # the first of several
    num_alike = sum((check.result, check.found) == (worst.result, worst.found) for _, check in of_ranks)
    if worst.result in ("ok", "skip") or num_alike == num_ranks:
        return worst
    return replace(worst, found=f"rank {rank}: {worst.found}")


def explain_error(error: BaseException) -> str:
    """Return an error's first line, and its type where it is not lorashard's own."""
    reason = next(iter(str(error).splitlines()), "no reason given")
    return reason if isinstance(error, LorashardError) else f"{type(error).__name__}: {reason}"


def has_failed(checks: Sequence[Check]) -> bool:
    return any(check.has_failed for check in checks)


def summarize(checks: Sequence[Check]) -> str:
    """Return on one line how many checks failed or warned."""
    failed, warned = (sum(check.result == result for check in checks) for result in ("FAIL", "warn"))
    if not failed and not warned:
        return f"all {len(checks)} checks are ok"
    warnings = f"{warned} warning{'s' if warned > 1 else ''}"
    if not failed:
        return f"{len(checks)} checks: {warnings}, nothing that stops a run"
    return f"{failed} of {len(checks)} checks failed" + (f", {warnings}" if warned else "")
