"""Which tensors of the base's files a merged or derived model has, and in which dtype they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftConfig, TaskType
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ..engine import Placeholder
from ..model.skeleton import UNUSED_HEADS, build_skeleton, plan_weights
from ..weights.fingerprint import ADAPTER_NAME
from ..weights.model_config import read_model_config
from ..weights.safetensors_files import Checkpoint, StoredTensor
from ..weights.weights import PIECE_BYTES, BaseWeights
from .base_values import BaseTensors
from .targets import to_base_name
from .writing import TensorWriter


def find_dtype(folder: Path, checkpoint: Checkpoint, trust_remote_code: bool = False) -> torch.dtype:
    """Return the dtype that `from_pretrained` with dtype "auto" loads a model in."""
    found = getattr(read_model_config(folder, trust_remote_code), "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found)
    stored = (tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype.is_floating_point)
    return found or next(stored, torch.get_default_dtype())


def plan_base(
    folder: Path,
    checkpoint: Checkpoint,
    config: PeftConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    num_labels: int | None = None,
) -> tuple[PreTrainedModel, BaseWeights]:
    task_type = TaskType(config.task_type) if config.task_type else None
    skeleton = build_skeleton(str(folder), folder, task_type, dtype, trust_remote_code, None, num_labels)
    return skeleton, plan_weights(skeleton, checkpoint, task_type, dtype)


def find_dropped_keys(config: PeftConfig) -> Sequence[str]:
    """Return the beginnings of keys in the base's files that the adapter's task has no use for: another head's."""
    return UNUSED_HEADS.get(TaskType(config.task_type) if config.task_type else None, ())


def find_held(skeleton: PreTrainedModel, base: BaseTensors, adapter: Path, config: PeftConfig) -> set[str]:
    """Give memory to what the adapter's file overwrites in the base itself: biases, a saved embedding.

    Returns:
        The names of these tensors in the base, with those tied to them.
    """
    with safe_open(adapter / ADAPTER_NAME, framework="pt") as opened:
        names = {to_base_name(key) for key in opened.keys()} & base.tensors.keys()  # noqa: SIM118
    wrapped = tuple(f".{name}" for name in getattr(config, "modules_to_save", None) or ())
    held = {name for name in names if not f".{name.rpartition('.')[0]}".endswith(wrapped)}
    held = held.union(*(tied for tied in base.ties if held.intersection(tied)))
    made: dict[int, nn.Parameter] = {}
    for path, module in skeleton.named_modules():
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, Placeholder) and f"{path}.{attribute}" in held:
                value = made.setdefault(id(parameter), nn.Parameter(parameter.detach().clone(), requires_grad=False))
                module._parameters[attribute] = value
    return held


def copy_stored(weights: BaseWeights, stored: StoredTensor, writer: TensorWriter) -> None:
    """Write a stored tensor as it is, a piece at a time."""
    step = max(1, PIECE_BYTES // stored.dtype.itemsize)
    numel = math.prod(stored.shape)
    for begin in range(0, numel, step):
        writer.write(stored.key, begin, weights.read_elements(stored, begin, min(begin + step, numel)))
