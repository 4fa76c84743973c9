"""What the nodes of a run must have in common, looked at before the base is loaded: folder, data, checkpoint."""

from __future__ import annotations

import uuid
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..errors import ConfigError
from ..runtime import dist


def check_nodes(folder: Path, arguments: TrainingArguments, data: str, checkpoint: Path | None) -> bool:
    """Return whether all ranks write into one folder; if not, each node has its own, on its own disk.

    Args:
        folder: the run's, which exists.
        data: a name for what this rank trains on.
        checkpoint: what this rank resumes from.

    Raises:
        ConfigError: ranks have other data or another checkpoint, or checkpoints would be lost to some nodes or written
            twice into one place; on all ranks alike.

    Ranks: collective over all ranks.
    """
    for name, found in (("data", data), ("checkpoint to resume from", checkpoint.name if checkpoint else "none")):
        everyone = dist.gather_objects(found)
        other = next((rank for rank, value in enumerate(everyone) if value != everyone[0]), None)
        if other is not None:
            raise ConfigError(
                expected=f"the same {name} on all nodes",
                found=f"{everyone[0]} on rank 0 and {everyone[other]} on rank {other}",
                fix="copy what is missing, or use a disk that all nodes share",
            )
    is_shared = _is_shared(folder)
    if not is_shared and arguments.save_strategy != SaveStrategy.NO and not arguments.save_on_each_node:
        raise ConfigError(
            "rank 0 writes the checkpoints and all ranks resume from them",
            option="output_dir",
            expected="a folder that all nodes share",
            found=folder,
            fix="put it on a shared disk, or give save_on_each_node: true, or save_strategy: no",
        )
    num_nodes = sum(dist.gather_objects(arguments.local_process_index == 0))
    if is_shared and arguments.save_on_each_node and num_nodes > 1:
        raise ConfigError(
            option="save_on_each_node",
            expected="nodes with disks of their own",
            found=f"one output_dir for all, {folder}, in which they would write the same files",
            fix="leave it out",
        )
    return is_shared


def _is_shared(folder: Path) -> bool:
    """Tell whether every rank sees what rank 0 writes into `folder`."""
    mark = folder / dist.broadcast_object(f".shared-{uuid.uuid4().hex}")
    if dist.get_rank() == 0:
        mark.touch()
    dist.gather_objects(None)  # none looks before it is there
    is_seen = all(dist.gather_objects(mark.exists()))
    if dist.get_rank() == 0:
        mark.unlink()
    return is_seen
