"""All ranks learn whether what one of them did has failed: none waits in a collective for one that has given up."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import CheckpointError, UserError
from . import dist
from .disk import find_fault

T = TypeVar("T")


def raise_on_all_ranks(action: Callable[[], T], on_rank: int | None = None) -> T | None:
    """Run `action` on every rank, or on one alone; when it raises anywhere, raise everywhere.

    Raises:
        UserError: of another rank, with its fields.
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
    told: Any = failure
    if failure is not None and not isinstance(failure, UserError):  # it may not survive the way between ranks
        told = (str(failure), find_fault(failure))
    found = dist.gather_objects(told)
    if failure is not None:
        raise failure
    for rank, error_of_rank in enumerate(found):
        if isinstance(error_of_rank, UserError):
            raise error_of_rank
        if error_of_rank is not None:
            text, fault = error_of_rank
            if fault is not None:  # every rank says the same, whichever is heard first
                raise OSError(fault, os.strerror(fault))
            raise CheckpointError(f"failed: {text}", where=f"rank {rank}")
    return result
