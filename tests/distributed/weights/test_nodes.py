"""The base on several nodes, and what nodes must have in common; a rank's node is set by environment variables."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_base
from peft import LoraConfig
from transformers import TrainingArguments

import lorashard
from lorashard.errors import ConfigError
from lorashard.runtime import dist
from lorashard.runtime.launch_env import read_launcher_env
from lorashard.training.nodes import check_nodes

LORA = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def set_node(local_rank: int, num_local: int | None) -> None:
    os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if num_local is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(num_local)


class Lines(logging.Handler):
    """Collects the logged lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load_all(rank: int, folder: str, cases: list[tuple]) -> list[tuple[int, list[str]]]:
    found = []
    for places, options in cases:
        set_node(*places[rank])
        lines = Lines()
        logging.getLogger("lorashard").addHandler(lines)
        model = lorashard.load(folder, LoraConfig(**LORA), dtype=torch.float32, **options)
        logging.getLogger("lorashard").removeHandler(lines)
        base_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
        found.append((round(base_bytes / max(1, lorashard.stats(model).bytes_at_rest)), lines.lines))
    return found


def test_each_node_holds_the_base_by_default(tmp_path):
    """Catches a base that crosses the network without a request, or that no rank shares with another."""
    build_base(num_hidden_layers=2).save_pretrained(tmp_path)
    two_nodes = [(0, 2), (1, 2), (0, 2), (1, 2)]
    cases = [
        (two_nodes, {"placement": "shard"}, 2, ["became node", "FULL_SHARD"]),
        (two_nodes, {}, 2, ["became node"]),
        (two_nodes, {"sharding_strategy": "FULL_SHARD"}, 4, ["shard_group_size: all"]),
        (two_nodes, {"placement": "shard", "shard_group_size": "all"}, 4, []),
        (two_nodes, {"sharding_strategy": "HYBRID_SHARD"}, 2, ["shard_group_size: node"]),
        ([(0, 1)] * 4, {"placement": "shard"}, 4, ["one rank", "network"]),
        ([(0, 4), (1, 4), (2, 4), (3, 4)], {"placement": "shard"}, 4, []),
        ([(0, 3), (1, 3), (2, 3), (0, 1)], {"placement": "shard"}, 4, ["one node", "2 of 3, 0 of 1"]),
        ([(0, 2), (0, 2), (1, 2), (1, 2)], {"placement": "shard"}, 4, ["one node"]),
        ([(0, None), (1, None), (2, None), (3, None)], {"placement": "shard"}, 4, []),
    ]
    by_rank = run_ranks(load_all, 4, str(tmp_path), [case[:2] for case in cases])
    for number, (_, _, group_size, words) in enumerate(cases):
        assert [found[number][0] for found in by_rank] == [group_size] * 4, cases[number]
        said = by_rank[0][number][1]
        assert len(said) == min(1, len(words)) and all(word in said[0] for word in words), said
        assert not any(found[number][1] for found in by_rank[1:])


def check_all(rank: int, folders: list[str], cases: list[tuple]) -> list[object]:
    found: list[object] = []
    for is_shared, options, data, checkpoint in cases:
        set_node(rank % 2, 2)
        folder = folders[0 if is_shared else rank // 2]
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", **options)
        try:
            found.append(check_nodes(Path(folder), arguments, data[rank // 2], checkpoint[rank // 2]))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_nodes_that_differ_are_refused(tmp_path):
    """Catches ranks that train on different rows, resume from different steps, or lose checkpoints, all unnoticed."""
    folders = [tmp_path / "disk_0", tmp_path / "disk_1"]
    for folder in folders:
        folder.mkdir()
    same, nowhere, each = ("rows", "rows"), (None, None), {"save_on_each_node": True}
    cases = [
        (True, {}, same, nowhere, True),
        (False, each, same, nowhere, False),
        (False, {"save_strategy": "no"}, same, nowhere, False),
        (False, {}, same, nowhere, "shared disk"),
        (True, each, same, nowhere, "save_on_each_node: expected"),
        (True, {}, ("rows", "others"), nowhere, "others"),
        (
            True,
            {},
            same,
            (Path("runs/checkpoint-2"), Path("runs/checkpoint-4")),
            "checkpoint-4",
        ),
        (True, {}, same, (Path("runs/checkpoint-2"), None), "checkpoint-2"),
    ]
    for found in run_ranks(check_all, 4, [str(folder) for folder in folders], [case[:4] for case in cases]):
        for one, (*_, expected) in zip(found, cases, strict=True):
            assert one == expected if isinstance(expected, bool) else expected in one, one
    assert not any(any(folder.iterdir()) for folder in folders)


def read_size(rank: int) -> int | None:
    dist.gather_objects(rank)
    env = read_launcher_env()
    assert env is not None
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    poisoned = read_launcher_env()
    assert poisoned is not None
    return poisoned.local_world_size


@pytest.mark.parametrize("world_size", [2])
def test_a_local_size_that_accelerate_invented_is_ignored(world_size):
    """accelerate sets LOCAL_WORLD_SIZE to 1 for CPU ranks if nobody has: no second rank can be on such a node."""
    assert run_ranks(read_size, world_size) == [1, None]
