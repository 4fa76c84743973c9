"""Ranks that gather together compare what they are about to do: one that differs would read the others' wrong units."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import ShardError
from ..runtime.dist import ShardGroup

CHECKS = ("a forward without gradients", "a forward with gradients", "an optimizer step", "a read of base weights")


def check_ranks_agree(group: ShardGroup, check: int, rolling_hash: int, jobs: Collection[int] = ()) -> None:
    """Compare what the ranks are about to do with their gathers before.

    Args:
        check: the index in `CHECKS` of what this rank is about to do.
        rolling_hash: of the units that it has gathered.
        jobs: that do it; none where there are no jobs. A rank that has lost one alone would add up others' gradients.

    Raises:
        ShardError: they have diverged; on all ranks.

    Ranks: collective over the shard group.
    """
    if group.size == 1:
        return
    differing = group.compare(
        [check, group.num_gathers, len(jobs), hash((rolling_hash, *sorted(jobs)))],
        f"begin {CHECKS[check]} after {group.num_gathers} gathers",
    )
    if differing is None:
        return
    found = "; ".join(
        f"rank {rank} begins {CHECKS[kind]}{f' of {num_jobs} jobs' if num_jobs else ''} after {num_gathers} gathers"
        for rank, (kind, num_gathers, num_jobs, _) in enumerate(differing)
    )
    raise ShardError(
        "the ranks have diverged",
        expected="the same forwards and backwards in the same order on all of them, or they would read each "
        "other's wrong units",
        found=found,
        fix="give every rank the same number of batches, evaluate on all ranks, and call generate equally often on all",
    )
