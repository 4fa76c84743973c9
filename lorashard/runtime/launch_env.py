"""What a launcher tells a rank through its environment. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .plugins import is_on


@dataclass(frozen=True)
class LauncherEnv:
    """What torchrun, `accelerate launch` and `lorashard finetune` tell a rank through its environment."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None


def read_launcher_env() -> LauncherEnv | None:
    """Return this process's place among the ranks, or None where no launcher started it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return LauncherEnv(
        rank=int(os.environ["RANK"]),
        local_rank=local_rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        # accelerate writes 1 for ranks on the CPU, where nobody has told it.
        local_world_size=local_world_size if local_world_size > local_rank else None,
    )


def has_launcher_store() -> bool:
    """Tell whether the launcher keeps the store that ranks meet in; where it does not, as under `srun`, rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def is_cpu_requested() -> bool:
    """Tell whether accelerate was told through its environment to compute on the CPU."""
    return is_on(os.environ.get("ACCELERATE_USE_CPU"))
