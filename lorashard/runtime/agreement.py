"""All ranks learn whether what one of them did has failed: none waits in a collective for one that has given up."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from ..errors import CheckpointError, UserError
from . import dist
from .disk import find_fault

T = TypeVar("T")


def raise_on_all_ranks(action: Callable[[], T], on_rank: int | None = None) -> T | None:
    """Run `action` on every rank, or on one alone; when it raises anywhere, raise everywhere.

    Raises:
        UserError: `action` has raised it, on this rank or on another.
        OSError: the disk of another rank has refused something.
        CheckpointError: `action` has failed on another rank in another way.

    Ranks: collective over all ranks.
    """
    result: T | None = None
    failure: Exception | None = None
    if on_rank in (None, dist.get_rank()):
        try:
            result = action()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure = error
    outcome: UserError | tuple[str, int | None] | None = None
    if isinstance(failure, UserError):
        outcome = failure
    elif failure is not None:
        outcome = str(failure), find_fault(failure)
    outcomes = dist.gather_objects(outcome)
    if failure is not None:
        raise failure
    for rank, of_rank in enumerate(outcomes):
        if isinstance(of_rank, UserError):
            raise of_rank
        if of_rank is not None:
            text, fault = of_rank
            if fault is not None:  # every rank raises the same, whichever is heard first
                raise OSError(fault, os.strerror(fault))
            raise CheckpointError(f"failed: {text}", where=f"rank {rank}")
    return result
