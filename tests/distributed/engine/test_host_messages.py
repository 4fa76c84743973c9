"""What ranks tell each other on the host goes over gloo: NCCL sends nothing that is on a CPU."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_model

from lorashard.model.adapters import find_adapter_tensors
from lorashard.model.added_adapters import share_adapters
from lorashard.runtime.dist import HostGroup


def join_without_host(rank: int, store: str) -> None:
    """Join a default group that knows no CPU, as that of NCCL does not."""
    dist.barrier()  # the others may still be connecting
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def share_on_host(rank: int, folder: str) -> bool:
    join_without_host(rank, f"{folder}/adapters")
    model = build_model()
    expected = [tensor.detach().clone() for tensor in find_adapter_tensors(model)]
    if rank == 1:
        for tensor in find_adapter_tensors(model):
            tensor.detach().add_(1)
    share_adapters(model)
    return all(map(torch.equal, find_adapter_tensors(model), expected))


def test_adapters_on_the_host_are_shared_without_a_default_group_for_it():
    """Catches an adapter that is added after load with tensors on the CPU, and fails on GPUs alone."""
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(share_on_host, 2, folder) == [True, True]


def find_largest(rank: int) -> list[int]:
    own = [-5 - rank, 2**62 + rank, rank == 1]
    return [found for _ in range(2) for found in HostGroup.of_all().find_largest(own)]


def test_every_rank_knows_the_largest_of_each_value():
    """Catches a stop that only some ranks hear of, or one rank's value in all places."""
    assert run_ranks(find_largest, 3) == [[-5, 2**62 + 2, 1] * 2] * 3


def talk_on_host(rank: int, folder: str) -> list:
    join_without_host(rank, f"{folder}/chat")
    host_group = HostGroup.of_all()
    return [host_group.find_largest([rank]), host_group.broadcast_object(f"of {rank}")]


def test_ranks_talk_on_the_host():
    """Catches a question before each token of a chat that waits for the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(talk_on_host, 2, folder) == [[[1], "of 0"]] * 2
