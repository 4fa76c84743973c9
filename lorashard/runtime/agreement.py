"""What one rank does, all ranks know of: none waits in a collective for one that has given up."""

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
        OSError: the disk of another rank has refused something.
        CheckpointError: `action` has failed on another rank in another way.

    Ranks: collective over all ranks.
    """
    result, failure = None, None
    if on_rank in (None, dist.get_rank()):
        try:
            result = action()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure = error
    told = None
    if failure is not None:
        is_plain = isinstance(failure, UserError)
        told = (is_plain, str(failure), None if is_plain else find_fault(failure))
    found = dist.gather_objects(told)
    if failure is not None:
        raise failure
    for rank, error_of_rank in enumerate(found):
        if error_of_rank is not None:
            is_plain, text, fault = error_of_rank
            if fault is not None:  # every rank says the same, whichever is heard first
                raise OSError(fault, os.strerror(fault))
            raise CheckpointError(text if is_plain else f"rank {rank} failed: {text}")
    return result
