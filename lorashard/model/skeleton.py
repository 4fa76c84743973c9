"""The model of a checkpoint's config, with placeholders for its weights: what PEFT puts an adapter on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import TaskType
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..engine import Placeholder
from ..errors import CheckpointError, ConfigError
from ..weights.model_config import describe_error, explain_code, read_generation_config, read_model_config
from ..weights.model_folder import CONFIG_NAME, read_config_json
from ..weights.safetensors_files import Checkpoint
from ..weights.weights import BaseWeights

_AUTO_CLASSES = {
    None: AutoModelForCausalLM,
    TaskType.CAUSAL_LM: AutoModelForCausalLM,
    TaskType.SEQ_CLS: AutoModelForSequenceClassification,
}
# By task: the head that a checkpoint of another task lacks, which is initialized and then trained, and the one that it
# has in its place.
NEW_HEADS = {TaskType.SEQ_CLS: ("score.", "classifier.")}
UNUSED_HEADS = {TaskType.SEQ_CLS: ("lm_head.",)}


def choose_auto_class(config: PreTrainedConfig, task_type: TaskType | str | None) -> Any:
    """Return the auto class that loads a checkpoint: one for images and text where it makes no causal LM.

    Raises:
        ConfigError: none is known for `task_type`, or the model is of another kind.
    """
    if task_type not in _AUTO_CLASSES:
        expected = ", ".join(str(known.value) for known in _AUTO_CLASSES if known)
        raise ConfigError(option="task_type", expected=f"one of {expected}", found=f"'{task_type}'")
    auto_class = _AUTO_CLASSES[task_type]
    candidates = [auto_class, AutoModelForImageTextToText] if auto_class is AutoModelForCausalLM else [auto_class]
    own_code = getattr(config, "auto_map", None) or {}
    for candidate in candidates:
        if type(config) in candidate._model_mapping or candidate.__name__ in own_code:
            return candidate
    names = " or ".join(candidate.__name__ for candidate in candidates)
    raise ConfigError(
        expected=f"a model that is known to {names}",
        found=f"one of type '{config.model_type}'",
        fix="build it yourself, put an adapter on it with PEFT, and give it to lorashard.shard",
    )


def build_skeleton(
    model_name_or_path: str,
    folder: Path,
    task_type: TaskType | str | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
    attn_implementation: str | None,
    num_labels: int | None = None,
) -> PreTrainedModel:
    """Return the model of a checkpoint's config with weights on the meta device and real rotary buffers.

    Args:
        num_labels: of a classifier's head; None is the config's.

    Raises:
        CheckpointError: the config is damaged, describes no model, or needs code that comes with it.
        ConfigError: no auto class is known for `task_type`, or the attention implementation is not available.
    """
    config = read_model_config(folder, trust_remote_code)
    if num_labels is not None:
        config.num_labels = num_labels
    # PEFT writes this name into the adapter's config; a relative path would mean nothing elsewhere.
    config.name_or_path = os.path.abspath(folder) if Path(model_name_or_path).is_dir() else model_name_or_path
    # Some models draw random values even for meta tensors; adapters must be drawn as if they had not.
    with torch.random.fork_rng(devices=[]):
        with _explained(folder, attn_implementation), init_empty_weights(include_buffers=False):
            model: PreTrainedModel = choose_auto_class(config, task_type).from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
            )
        _fill_buffers(model, model)
    model.tie_weights()
    if model.can_generate():
        model.generation_config = read_generation_config(folder) or model.generation_config
    return model.eval()


def plan_weights(
    skeleton: PreTrainedModel,
    checkpoint: Checkpoint,
    task_type: TaskType | None,
    dtype: torch.dtype,
    allow_unexpected: Sequence[str] = (),
) -> BaseWeights:
    """Return where the weights of a skeleton are in a checkpoint that may have been saved for another task.

    Args:
        allow_unexpected: prefixes of more stored keys that the model may have no place for.
    """
    return BaseWeights.plan(
        skeleton,
        checkpoint,
        dtype,
        allow_missing=NEW_HEADS.get(task_type, ()),
        allow_unexpected=(*UNUSED_HEADS.get(task_type, ()), *allow_unexpected),
    )


@contextmanager
def _explained(folder: Path, attn_implementation: str | None) -> Iterator[None]:
    """Name the option or the file, where no model can be built."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        if attn_implementation is not None:
            reason = f"{attn_implementation}: {' '.join(str(error).split())}"
            raise ConfigError(reason, option="attn_implementation") from error
        if not isinstance(error, ValueError):
            raise
        raise _explain_config(error, folder) from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise _explain_config(error, folder) from error


def _explain_config(error: Exception, folder: Path) -> CheckpointError:
    reason = explain_code(error, folder, read_config_json(folder))
    if reason is not None:
        return CheckpointError(reason)
    return CheckpointError(
        f"it describes a model that cannot be built ({describe_error(error)})",
        where=folder / CONFIG_NAME,
        fix="download the file again",
    )


def _fill_buffers(module: nn.Module, model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds again, as `from_pretrained` does.

    The first time was while the model was built, where torch makes tensors in the model's dtype: position frequencies
    that are computed in bfloat16 differ.
    """
    model = module if isinstance(module, PreTrainedModel) else model
    for child in module.children():
        _fill_buffers(child, model)
    if module._non_persistent_buffers_set:
        with torch.no_grad():
            model._init_weights(module)


def put_placeholders(model: PreTrainedModel, weights: BaseWeights, device: torch.device) -> None:
    """Replace every meta parameter by a placeholder on the real device, and make every buffer real there."""
    made: dict[nn.Parameter, torch.Tensor] = {}  # tied parameters stay tied
    names = {parameter: name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = names[parameter]
            if parameter not in made:
                if name in weights.names:
                    placeholder = Placeholder(name, parameter.shape, weights.target_dtype(name), device)
                    placeholder.reader = partial(_read, weights, name, device)
                    made[parameter] = placeholder
                else:
                    made[parameter] = _initialize(attribute, parameter, module, model, device)
            module._parameters[attribute] = made[parameter]
        for attribute, buffer in module._buffers.items():
            name = f"{path}.{attribute}" if path else attribute
            if buffer is not None:
                value = weights.read(name) if name in weights.names else buffer
                module._buffers[attribute] = value.to(device)


def _read(weights: BaseWeights, name: str, device: torch.device) -> torch.Tensor:
    return weights.read(name).to(device)


def _initialize(
    attribute: str, parameter: nn.Parameter, module: nn.Module, model: PreTrainedModel, device: torch.device
) -> nn.Parameter:
    """Return a parameter of a new head, which the checkpoint does not have."""
    made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
    module._parameters[attribute] = made
    model._init_weights(module)
    return made
