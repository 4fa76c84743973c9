"""What a check found, the same on all ranks, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import VerificationError
from ...runtime import dist
from ...runtime.output import give


@dataclass(frozen=True)
class Verdict:
    """What one check found.

    Attributes:
        text: in words, on one line.
        facts: the same in numbers, for JSON.
    """

    name: str
    text: str
    is_right: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)


def are_right(verdicts: Sequence[Verdict]) -> bool:
    """Tell whether every check passed."""
    return all(verdict.is_right for verdict in verdicts)


def agree(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of all ranks as one list: where a rank found a fault, that of the first which did.

    A rank that stopped at a fault of its own would leave the others waiting for it in the next gather.

    Ranks: collective over all ranks, each with the same checks up to its first fault.
    """
    found: dict[str, Verdict] = {}
    for rank, of_rank in enumerate(dist.gather_objects(list(verdicts))):
        for verdict in of_rank:
            known = found.setdefault(verdict.name, verdict)
            if known.is_right and not verdict.is_right:
                found[verdict.name] = verdict if rank == 0 else replace(verdict, text=f"rank {rank}: {verdict.text}")
    return list(found.values())


def conclude(subject: Mapping[str, Any], verdicts: Sequence[Verdict], as_json: bool) -> None:
    """Give the result: a line for each check, or JSON.

    Args:
        subject: what was checked, for JSON.

    Raises:
        VerificationError: a check failed.

    Ranks: call on all ranks, with verdicts that they agree on.
    """
    wrong = [verdict for verdict in verdicts if not verdict.is_right]
    checks = {v.name: {"is_right": v.is_right, "verdict": v.text} | dict(v.facts) for v in verdicts}
    lines = [f"{v.name}: {v.text}" if v.is_right else f"{v.name}: WRONG: {v.text}" for v in verdicts]
    give(dist.get_rank(), {"is_right": not wrong, **subject, "checks": checks}, "\n".join(lines), as_json)
    if wrong:
        others = f" (and {len(wrong) - 1} more of {len(verdicts)} checks)" if len(wrong) > 1 else ""
        raise VerificationError(f"{wrong[0].name}: {wrong[0].text}{others}")
