"""Process groups over the same ranks, which all models there share, and which end with the last of these."""

from __future__ import annotations

import json
import os
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import ShardError
from .rank_store import RankStore

_OWN = "lorashard:"  # begins the description of each group that is made here


class SharedGroup(weakref.ref):
    """A process group that all of this rank's models over the same ranks share, and that ends here with the last one.

    Note [The end of a shared group]
        Models are collected at different times on different ranks. The end of a gloo group is local: a rank's part ends
        when the last object that holds this does. What the others still have of it can be used no more, and nothing
        would use it but a model that this rank has dropped. The end of an NCCL group is a collective of the ranks of a
        node: that waits until all ranks meet to share groups again, and none uses it any more.

    Its users hold this, never the process group, so that the table of torch holds the last name for that.

    Ranks: local. The end of a gloo group waits for what this rank has still in flight there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Not `__del__`: what is collected in a cycle has lost its weak references by then, itself if it is one.
        weakref.finalize(self, _end_with_users, weakref.ref(group), os.getpid()).atexit = False

    def find(self) -> dist.ProcessGroup:
        """Return the process group.

        Raises:
            ShardError: it has ended, with the default one.
        """
        group = self()
        if group is None:
            raise ShardError(
                "the process group of the model has ended", fix="load or shard the model after init_process_group"
            )
        return group


def share_groups(size: int, **backends: str | None) -> list[SharedGroup]:
    """Return this rank's groups of `size` consecutive ranks: those that every rank still has, or else new ones.

    Torch's table of groups is where they are found again, so they go with the default group. Other groups that no rank
    uses any more end here; see [The end of a shared group].

    Args:
        backends: of each purpose; None is the default group's.

    Ranks: collective over all ranks: each makes the groups of all.
    """
    own = _find_own_groups()
    users = {name: _find_shared(group) for name, group in own.items()}  # held, so that none ends before all is decided
    everyone = _exchange({name: user is not None for name, user in users.items()})
    common = [name for name in own if all(name in groups for groups in everyone)]
    number = 1 + max((int(name.split()[-1]) for groups in everyone for name in groups), default=0)
    shared, reused = [], set()
    for purpose, backend in backends.items():
        kind = f"{_OWN} {purpose} over {size} ranks, number"
        names = [name for name in common if name.startswith(kind)]
        if names:
            dist.distributed_c10d._set_pg_timeout(_read_timeout(), own[names[-1]])
            shared.append(users[names[-1]] or SharedGroup(own[names[-1]]))
            reused.add(names[-1])
        else:
            shared.append(SharedGroup(_make_group(size, backend, f"{kind} {number}")))
    for name in common:
        if name not in reused and not any(groups[name] for groups in everyone):
            _end_group(weakref.ref(own.pop(name)))
    return shared


def _end_with_users(reference: weakref.ref[dist.ProcessGroup], process_id: int) -> None:
    """End a group whose last user on this rank has gone; see [The end of a shared group]."""
    is_there = reference() in dist.distributed_c10d._world.pg_map
    if process_id == os.getpid() and is_there and _is_gloo(reference()):  # a forked process has none of its threads
        _end_group(reference)


def _is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Tell whether a group knows gloo alone, whatever its devices."""
    return group is not None and {group._get_backend(d).name() for d in group._device_types} == {"gloo"}


def _end_group(reference: weakref.ref[dist.ProcessGroup]) -> None:
    """End this rank's part of a group.

    Ranks: local for gloo; collective over the group for NCCL.
    """
    group = reference()
    assert group is not None
    # These hold the threads. Their end comes with the last name for them, after the group's, since only a backend's own
    # end waits for the threads without the interpreter's lock, for which they may wait.
    backends = [group._get_backend(device) for device in group._device_types]
    dist.destroy_process_group(group)
    del group
    backends.clear()


def _find_own_groups() -> dict[str, dist.ProcessGroup]:
    """Return the groups of this rank that were made here, by description, in the order in which they were made."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return {group.group_desc: group for group in groups if group.group_desc.startswith(_OWN)}


def _find_shared(group: dist.ProcessGroup) -> SharedGroup | None:
    """Return what the users of a group hold; None if it has none on this rank."""
    return next((mark for mark in weakref.getweakrefs(group) if isinstance(mark, SharedGroup)), None)


def _exchange(facts: dict[str, bool]) -> list[dict[str, bool]]:
    """Return every rank's `facts` through the store, which NCCL's device is not needed for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [facts]
    words = RankStore.of_group("groups").exchange(json.dumps(facts), _read_timeout().total_seconds())
    return [json.loads(word) for word in words]


def _read_timeout() -> timedelta:
    """Return how long a collective of the default group may take (`ddp_timeout`); torch's `new_group` does not ask."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout


def _make_group(size: int, backend: str | None, description: str) -> dist.ProcessGroup:
    """Make groups of `size` consecutive ranks, and return this rank's.

    Ranks: collective over all ranks.
    """
    own: dist.ProcessGroup | None = None
    for begin in range(0, dist.get_world_size(), size):
        ranks = list(range(begin, begin + size))
        group = dist.new_group(ranks, _read_timeout(), backend, _put_first(backend), group_desc=description)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None, f"groups of {size} do not cover {dist.get_world_size()} ranks"
    if _is_gloo(own):
        dist.barrier(own)  # the first to end it would cut off those that still connect
    return own


def _put_first(backend: str | None) -> Any:
    """Return options by which NCCL's kernels go before the computation's; None for others, or if the user decides."""
    options = None
    if backend is None and "nccl" in dist.get_backend_config() and "TORCH_NCCL_HIGH_PRIORITY" not in os.environ:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _read_timeout()  # torch warns of another than the group's
    return options
