"""From a checkpoint to a sharded PeftModel, without a whole model on any rank."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftConfig, PeftModel, TaskType
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from .. import dist
from ..dist import ShardGroup
from ..engine import HostCopies, Placeholder
from ..errors import CheckpointError, ConfigError
from ..placement import ResolvedPlacement
from .adapters import base_test, check_coverage, inject
from .checkpoint import CONFIG_NAME, Checkpoint, read_config_json, resolve_folder
from .homes import FileHomes, MakeHome, ShardedHomes, choose_resident
from .identity import BaseIdentity
from .model_config import describe_error, explain_code, read_generation_config, read_model_config
from .refusals import check_config, check_frozen
from .saved import count_labels, restore
from .sharding import LoadedBase, refuse_merging, remember_base, shard_structure
from .sources import CheckpointSource
from .stacks import name_units
from .units import find_structure
from .weights import BaseWeights

_AUTO_CLASSES = {
    None: AutoModelForCausalLM,
    TaskType.CAUSAL_LM: AutoModelForCausalLM,
    TaskType.SEQ_CLS: AutoModelForSequenceClassification,
}
# What PEFT may put on top of a checkpoint that was saved for another task: initialised, then trained.
NEW_HEADS = {TaskType.SEQ_CLS: ("score.", "classifier.")}
UNUSED_HEADS = {TaskType.SEQ_CLS: ("lm_head.",)}


def choose_auto_class(config: PreTrainedConfig, task_type: TaskType | str | None) -> Any:
    """Return the auto class that loads a checkpoint: one for images and text where it makes no causal LM.

    Raises:
        ConfigError: none is known for `task_type`, or the model is of another kind.
    """
    if task_type not in _AUTO_CLASSES:
        expected = ", ".join(str(known.value) for known in _AUTO_CLASSES if known)
        raise ConfigError(f"task_type: expected one of {expected}, found '{task_type}'")
    auto_class = _AUTO_CLASSES[task_type]
    candidates = [auto_class, AutoModelForImageTextToText] if auto_class is AutoModelForCausalLM else [auto_class]
    own_code = getattr(config, "auto_map", None) or {}
    for candidate in candidates:
        if type(config) in candidate._model_mapping or candidate.__name__ in own_code:
            return candidate
    names = " or ".join(candidate.__name__ for candidate in candidates)
    raise ConfigError(
        f"expected a model that is known to {names}, found one of type '{config.model_type}'; build it yourself, put "
        "an adapter on it with PEFT, and give it to lorashard.shard"
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
        num_labels: what a classifier's head tells apart; None takes the config's number.

    Raises:
        CheckpointError: the config is damaged, describes no model, or needs code that comes with it.
        ConfigError: no auto class is known for `task_type`, or the attention cannot be had.
    """
    config = read_model_config(folder, trust_remote_code)
    if num_labels is not None:
        config.num_labels = num_labels
    # PEFT writes this name into the adapter's config, which is read from other folders.
    config.name_or_path = os.path.abspath(folder) if Path(model_name_or_path).is_dir() else model_name_or_path
    # Some models draw numbers even for meta tensors: adapters must come from those that a seed set before.
    with torch.random.fork_rng(devices=[]):
        with (
            _explained_config(folder),
            init_empty_weights(include_buffers=False),
            _explained_attention(attn_implementation),
        ):
            model: PreTrainedModel = choose_auto_class(config, task_type).from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
            )
        _fill_buffers(model, model)
    model.tie_weights()
    if model.can_generate():
        model.generation_config = read_generation_config(folder) or model.generation_config
    return model.eval()


@contextlib.contextmanager
def _explained_config(folder: Path) -> Iterator[None]:
    """Say of which file the values are that no model can be made of."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            explain_code(error, folder, read_config_json(folder))
            or f"{folder / CONFIG_NAME} describes a model that cannot be made ({describe_error(error)}). Download the "
            "file again."
        ) from error


@contextlib.contextmanager
def _explained_attention(attn_implementation: str | None) -> Iterator[None]:
    """Pass on in a line what transformers says of an attention that it cannot give."""
    try:
        yield
    except (ImportError, ValueError, OSError) as error:
        if attn_implementation is None:
            raise
        raise ConfigError(f"attn_implementation: {attn_implementation}: {' '.join(str(error).split())}") from error


def _fill_buffers(module: nn.Module, model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds again, as `from_pretrained` does.

    The first time was while the model was built, where torch makes tensors in the model's dtype: frequencies of
    positions that are computed in bfloat16 are others.
    """
    model = module if isinstance(module, PreTrainedModel) else model
    for child in module.children():
        _fill_buffers(child, model)
    if module._non_persistent_buffers_set:
        with torch.no_grad():
            model._init_weights(module)


def load_sharded(
    model_name_or_path: str,
    lora: PeftConfig,
    placement: ResolvedPlacement,
    device: torch.device,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    adapter: Path | None = None,
    allow_base_mismatch: bool = False,
    is_identified: bool = True,
    allow_unexpected: Sequence[str] = (),
    num_labels: int | None = None,
    may_link: bool = False,
) -> PeftModel:
    """Return a sharded PeftModel; each rank reads only its own bytes of each unit.

    Args:
        adapter: the folder of a saved adapter, whose config is `lora`, to go on with; without it a new one is made.
        is_identified: hash the files, once, so that adapters can tell their base.
        allow_unexpected: prefixes of stored keys for which the model need have no place.
        num_labels: of a new classifier; a saved one's head tells.
        may_link: as for `resolve_folder`.

    Raises:
        CheckpointError: files are missing, damaged or do not fit the model or each other.
        ConfigError: the adapter cannot be made on a sharded base, or was trained on another one.

    Ranks: collective over all ranks, once the checkpoint has been checked.
    Memory: the shards, the slots, and never more than one unit beside them.
    """
    check_config(lora)
    task_type = TaskType(lora.task_type) if lora.task_type else None
    folder = resolve_folder(model_name_or_path, revision, may_link=may_link)
    num_labels = num_labels if adapter is None else count_labels(adapter)
    with Checkpoint.open(folder) as checkpoint:
        skeleton = build_skeleton(
            model_name_or_path, folder, task_type, dtype, trust_remote_code, attn_implementation, num_labels
        )
        weights = BaseWeights.plan(
            skeleton,
            checkpoint,
            dtype,
            allow_missing=NEW_HEADS.get(task_type, ()),
            allow_unexpected=(*UNUSED_HEADS.get(task_type, ()), *allow_unexpected),
        )
        put_placeholders(skeleton, weights, device)
        name_units(skeleton, placement.unit_paths)
        asked = copy.copy(lora)  # PEFT writes into a config what it makes of it
        model = inject(skeleton, lora, revision=revision)
        check_frozen(model)
        if adapter is None:
            check_coverage(model, asked)
        structure = find_structure(model, base_test(model))
        resident = choose_resident(structure, placement.resident_layers)
        _check_commit(folder)  # the first collective: nothing can be wrong on one rank alone
        identity = BaseIdentity.of(weights.files) if is_identified else None
        if adapter is not None:
            if identity is not None:
                identity.check(adapter, model_name_or_path, allow_base_mismatch)
            restore(model, adapter)
        group = ShardGroup.of_size(placement.group_size)
        make_home: MakeHome
        if placement.placement == "file":
            make_home = FileHomes(structure, weights, device, resident)
        else:
            source = CheckpointSource(weights)
            is_on_host = placement.placement == "host"
            make_home = ShardedHomes(is_on_host, group, device, source, resident, HostCopies(device))
        shard_structure(model, structure, make_home, group, device, placement.prefetch)
    if placement.placement == "file":
        refuse_merging(model)
    if identity is not None:
        remember_base(model, LoadedBase(folder, identity))
    return model.to(device)


def _check_commit(folder: Path) -> None:
    """Refuse a hub model whose branch has moved between one rank's look and another's."""
    commits = set(dist.gather_objects(folder.name if folder.parent.name == "snapshots" else ""))
    if len(commits) > 1:
        raise CheckpointError(
            f"expected one commit of the model on all ranks, found {' and '.join(sorted(commits))}: its branch moved, "
            "or their caches differ; start again with --model_revision and the commit"
        )


def put_placeholders(model: PreTrainedModel, weights: BaseWeights, device: torch.device) -> None:
    """Replace every meta parameter by a placeholder on the real device, and make every buffer real there."""
    twins: dict[nn.Parameter, torch.Tensor] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = names[parameter]
            if parameter not in twins:
                twins[parameter] = _stand_in(name, parameter, module, model, weights, device)
            module._parameters[attribute] = twins[parameter]
        for attribute, buffer in module._buffers.items():
            name = f"{path}.{attribute}" if path else attribute
            if buffer is not None:
                value = weights.read(name) if name in weights.names else buffer
                module._buffers[attribute] = value.to(device)


def _stand_in(
    name: str,
    parameter: nn.Parameter,
    module: nn.Module,
    model: PreTrainedModel,
    weights: BaseWeights,
    device: torch.device,
) -> torch.Tensor:
    if name not in weights.names:  # a new head that the checkpoint does not have
        attribute = name.rpartition(".")[2]
        made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        module._parameters[attribute] = made
        model._init_weights(module)
        return made
    placeholder = Placeholder(name, parameter.shape, weights.target_dtype(name), device)
    placeholder.reader = lambda: weights.read(name).to(device)
    return placeholder
