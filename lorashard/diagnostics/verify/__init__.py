"""`lorashard verify`: is a saved adapter what it should be, and does sharding change a gradient on this machine?

Read in this order: `rows` (the tokens that are compared on), `memory` (how much of a model fits), `adapter`,
`differences`, `gradients`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...config.use_options import VerifyOptions
from ...errors import VerificationError
from ...runtime import dist
from ...runtime.output import give
from ..checks import Check, has_failed

__all__ = ["verify"]


def verify(options: VerifyOptions) -> None:
    """Check an adapter, and a model that it was merged into; or a model's gradients, sharded against unsharded.

    Prints a line for each check, or JSON.

    Raises:
        VerificationError: a check failed; on all ranks.
        UserError: there is nothing that could be checked.

    Ranks: run by every rank.
    """
    if options.model_name_or_path is not None:
        from .gradients import verify_gradients

        subject, checks = verify_gradients(options)
    else:
        from .adapter import verify_adapter

        subject, checks = verify_adapter(options)
    _print(subject, checks, options.as_json)
    if failed := [check for check in checks if check.has_failed]:
        others = f" (and {len(failed) - 1} more of {len(checks)} checks)" if len(failed) > 1 else ""
        raise VerificationError(f"{failed[0].found}{others}", where=failed[0].name, fix=failed[0].fix)


def _print(subject: Mapping[str, Any], checks: Sequence[Check], as_json: bool) -> None:
    texts = [f"{check.found}; {check.fix}" if check.fix else check.found for check in checks]
    found = {
        check.name: {"is_right": not check.has_failed, "verdict": text} | dict(check.figures)
        for check, text in zip(checks, texts, strict=True)
    }
    marks = ["WRONG: " if check.has_failed else "" for check in checks]
    lines = [f"{check.name}: {mark}{text}" for check, mark, text in zip(checks, marks, texts, strict=True)]
    result = {"is_right": not has_failed(checks), **subject, "checks": found}
    give(dist.get_rank(), result, "\n".join(lines), as_json)
