"""Several nodes, played by network namespaces of this machine: what crosses the wire, and that nothing else changes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import warm
from helpers.finetune import read_lines, read_losses
from helpers.netns import NODES, TwoNodes, explain_missing, make_two_nodes
from helpers.paths import ROOT
from helpers.tiny import build_base
from helpers.words import make_tokenizer
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

STEPS = 4
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
SLURM_SCRIPT = ROOT / "examples/slurm.sbatch"
Launch = Callable[[int, int, Path], list[str]]  # of a node, a free port and a folder
WORDS = ["<pad>", "</s>", "one", "two", "three", "four", "five"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    missing = explain_missing()
    if missing:
        pytest.skip(missing)
    with make_two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with rows, and a model whose base is hundreds of times as large as its adapter."""
    folder = tmp_path_factory.mktemp("task")
    make_tokenizer(WORDS).save_pretrained(folder / "model")
    base = build_base(vocab_size=len(WORDS), hidden_size=256, intermediate_size=512, eos_token_id=1)
    base.save_pretrained(folder / "model")
    rows = [{"text": " ".join(WORDS[2 + (i * j) % 5] for j in range(3 + i % 3))} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_options(task: Path, out: Path, **options: object) -> list[str]:
    values = {
        "model": task / "model",
        "dataset": task / "rows.jsonl",
        "output_dir": out,
        "dtype": "float32",
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "lora_r": 2,
        "lora_target_modules": "q_proj,v_proj",
        "save_strategy": "no",
        "placement": "shard",
    }
    return [word for key, value in (values | options).items() for word in (f"--{key}", str(value))]


def make_environment(task: Path) -> dict[str, str]:
    ours = {"HF_HOME": str(task / "hf"), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | ours


def launch_by_torchrun(node: int, port: int, job: Path) -> list[str]:
    where = ["--node_rank", str(node), "--master_addr", NODES[0], "--master_port", str(port)]
    return [*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "2", *where, "-m", "lorashard", "finetune"]


def launch_by_accelerate(node: int, port: int, job: Path) -> list[str]:
    where = ["--machine_rank", str(node), "--main_process_ip", NODES[0], "--main_process_port", str(port)]
    several = ["--multi_gpu", "--num_machines", "2", "--num_processes", "4"]
    return [*ACCELERATE, *several, *where, "-m", "lorashard", "finetune"]


def launch_by_slurm(node: int, port: int, job: Path) -> list[str]:
    """Return the words that the script has SLURM's nodes run, by an srun that knows one node alone."""
    programs = {"srun": 'shift\nexec "$@"', "scontrol": f"printf '{NODES[0]}\\n{NODES[1]}\\n'"}
    programs["torchrun"] = "printf '%s\\n' \"$@\""
    for name, body in programs.items():
        (job / name).write_text(f"#!/bin/sh\n{body}\n")
        (job / name).chmod(0o755)
    variables = {"PATH": f"{job}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_NODEID": str(node)}
    told = subprocess.run(
        ["bash", str(SLURM_SCRIPT)], env=os.environ | variables, cwd=job, capture_output=True, text=True, check=True
    )
    return [*TORCHRUN, *told.stdout.splitlines()]


@dataclass(frozen=True)
class Trained:
    """What a run left, and what it sent over the wire."""

    losses: list[float]
    adapter: dict[str, torch.Tensor]
    base_bytes: int
    gathered_bytes: int  # by rank 0
    wire_bytes: int


def read_trained(folder: Path, wire_bytes: int = 0) -> Trained:
    losses = list(read_losses(folder).values())
    last = read_lines(folder / "ranks" / "rank_0.jsonl")[-1]
    adapter = load_file(folder / "adapter_model.safetensors")
    return Trained(losses, adapter, last["base_bytes"], last["gathered_bytes"], wire_bytes)


@pytest.fixture
def train(nodes, task, tmp_path) -> Callable[..., tuple[list[int], list[str], int]]:
    """Run finetune on both nodes; give the exit codes, what was said, and how many bytes crossed the wire."""
    ports = itertools.count(29511)

    def train(launch: Launch, *folders: Path, **options: object):
        port, before_bytes = next(ports), nodes.count_bytes()
        commands = [
            [*launch(node, port, tmp_path), *make_options(task, folders[node % len(folders)], **options)]
            for node in (0, 1)
        ]
        codes, said = nodes.run(commands, make_environment(task), tmp_path)
        return codes, said, nodes.count_bytes() - before_bytes

    return train


@pytest.fixture(scope="module")
def one_node(task) -> Trained:
    command = [sys.executable, "-m", "lorashard", "finetune", *make_options(task, task / "one_node", cpu=4)]
    warm.run(command, env=make_environment(task), check=True, capture_output=True, timeout=240)
    return read_trained(task / "one_node")


@pytest.mark.parametrize(
    ("launch", "strategy"),
    [
        (launch_by_torchrun, None),
        (launch_by_accelerate, None),
        (launch_by_slurm, "FULL_SHARD"),
    ],
)
def test_the_base_crosses_the_network_only_if_told_to(train, one_node, tmp_path, launch, strategy):
    """Catches gathers across nodes, which are slow at any size, and nodes that train apart or a little differently.

    With FULL_SHARD the base does cross: the wire is seen to carry what it is asked to.
    """
    options = {} if strategy is None else {"sharding_strategy": strategy}
    codes, said, wire_bytes = train(launch, tmp_path / "run", **options)
    assert codes == [0, 0], said
    trained = read_trained(tmp_path / "run", wire_bytes)
    assert trained.losses == one_node.losses and len(trained.losses) == STEPS
    assert trained.adapter.keys() == one_node.adapter.keys()
    assert all(torch.equal(one_node.adapter[name], value) for name, value in trained.adapter.items())
    assert trained.gathered_bytes >= 2 * STEPS * 0.5 * trained.base_bytes
    if strategy is None:
        assert "each of 2 nodes" in said[0]
        assert trained.wire_bytes < trained.base_bytes / 4
    else:
        assert trained.wire_bytes > trained.gathered_bytes


def test_nodes_without_a_shared_disk_keep_checkpoints_of_their_own(train, tmp_path):
    """Catches checkpoints that the second node cannot resume from, found out when they are needed."""
    folders = [tmp_path / "disk_0", tmp_path / "disk_1"]
    codes, said, _ = train(launch_by_torchrun, *folders, save_strategy="steps", save_steps=2)
    assert codes != [0, 0] and "all nodes share" in said[0]
    assert not list(folders[0].glob("checkpoint-*"))

    own = dict(save_strategy="steps", save_steps=2, save_on_each_node="true")
    codes, said, _ = train(launch_by_torchrun, *folders, **own, overwrite_output_dir="true")
    assert codes == [0, 0], said
    whole = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    for folder in folders:
        shutil.rmtree(folder / f"checkpoint-{STEPS}")
    codes, said, _ = train(launch_by_torchrun, *folders, **own, resume_from_checkpoint="true")
    assert codes == [0, 0], said
    for folder, before in zip(folders, whole, strict=True):
        resumed = load_file(folder / "adapter_model.safetensors")
        assert resumed.keys() == before.keys()
        # DDP orders its buckets anew after a run's first step, and with them the additions of four ranks.
        assert all(torch.allclose(before[name], value, rtol=0, atol=1e-6) for name, value in resumed.items())
