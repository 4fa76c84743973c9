"""How a process takes its place among the ranks of its launch, and on which device it computes."""

from __future__ import annotations

import logging
import os

import torch
from accelerate.state import DistributedType, PartialState

from ..errors import ConfigError
from .launch_env import is_cpu_requested, read_launcher_env
from .plugins import explain_plugin, refuse_plugins

_logger = logging.getLogger(__name__)


def join_launch(backend: str | None = None, *, will_train: bool = False) -> torch.device:
    """Take this process's place among the ranks of its launch, if a launcher started it; accelerate does the work.

    Returns the device that accelerate, and so Trainer, computes on: the GPU of the local rank, with its index, or the
    CPU.

    On a machine without GPUs accelerate sees a single process unless it is told: two ranks would train alone, and both
    would look healthy.

    Args:
        backend: of torch.distributed; the default is nccl, or gloo on the CPU.
        will_train: warn where transformers' Trainer would use several GPUs from this one process.

    Raises:
        ConfigError: the launcher's world size and accelerate's differ, the device is neither a CUDA GPU nor the CPU, or
            accelerate is told to shard or compile the model itself.

    Ranks: collective over all ranks of the launch.
    """
    refuse_plugins(os.environ)
    env = read_launcher_env()
    try:
        state = PartialState(cpu=is_cpu_requested(), backend=backend)
    except ValueError as error:  # of a backend that torch has not been built with
        if backend is None:  # then of the launch: a MASTER_ADDR that is missing, a rank that is no number
            raise
        raise ConfigError(
            str(error), option="ddp_backend", expected="one that is there", found=repr(backend)
        ) from error
    if state.distributed_type == DistributedType.DEEPSPEED:  # the trainer's arguments leave no variable behind
        raise ConfigError(explain_plugin("DeepSpeed", "by the trainer's arguments", "deepspeed=..."))
    if env is not None and env.world_size != state.num_processes:
        raise ConfigError(
            "the ranks would train alone",
            expected=f"{env.world_size} ranks, as the launcher has started",
            found=f"{state.num_processes} that accelerate sees",
            fix="for ranks on the CPU set ACCELERATE_USE_CPU=true, or make Accelerator(cpu=True) or the trainer's "
            "arguments with use_cpu=True before lorashard.load",
        )
    if state.device.type not in ("cuda", "cpu"):
        raise ConfigError(
            expected="a CUDA GPU or the CPU", found=f"{state.device}, by accelerate", fix="set ACCELERATE_USE_CPU=true"
        )
    if state.device.type == "cpu":
        return torch.device("cpu")  # accelerate may say cpu:0
    device = with_index(state.device)
    num_gpus = torch.cuda.device_count()
    if will_train and num_gpus > 1 and state.distributed_type == DistributedType.NO:
        _logger.warning(
            "%d GPUs are visible, but no launcher has started this process, so the base is on %s alone: start the "
            "script with accelerate launch or torchrun to train on all of them, or set CUDA_VISIBLE_DEVICES to one. "
            "transformers' Trainer would wrap the model in nn.DataParallel, which cannot copy a sharded base",
            num_gpus,
            device,
        )
    return device


def with_index(device: torch.device) -> torch.device:
    """Return `device`, and if it is a GPU without an index, as accelerate's is without a launcher, the current GPU.

    Tensors always have an index: a sharded weight on `cuda` would look as if `model.to(device)` moved it to `cuda:0`.
    """
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
