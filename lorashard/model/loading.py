"""From a checkpoint to a sharded PeftModel, without a whole model on any rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from peft import PeftConfig, PeftModel, TaskType
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)

from .. import dist
from ..dist import ShardGroup
from ..engine import HostCopies, Placeholder
from ..errors import CheckpointError, ConfigError
from ..placement import ResolvedPlacement
from .adapters import base_test, inject
from .checkpoint import Checkpoint, resolve_folder
from .homes import FileHomes, MakeHome, ShardedHomes, choose_resident
from .identity import BaseIdentity
from .saved import restore
from .sharding import LoadedBase, refuse_merging, remember_base, shard_structure
from .sources import CheckpointSource
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
_REWRITING_INITIALISATIONS = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga")


def build_skeleton(
    model_name_or_path: str,
    folder: Path,
    task_type: TaskType | str | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
    attn_implementation: str | None,
) -> PreTrainedModel:
    """Return the model of a checkpoint's config with weights on the meta device and real rotary buffers.

    Raises:
        ConfigError: no auto class is known for `task_type`, or the model needs code of its own.
    """
    if task_type not in _AUTO_CLASSES:
        expected = ", ".join(str(known.value) for known in _AUTO_CLASSES if known)
        raise ConfigError(f"task_type: expected one of {expected}, found '{task_type}'")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # PEFT writes this name into the adapter's config, which is read from other folders.
    config.name_or_path = os.path.abspath(folder) if Path(model_name_or_path).is_dir() else model_name_or_path
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = _AUTO_CLASSES[task_type].from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attn_implementation
        )
    model.tie_weights()
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


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
) -> PeftModel:
    """Return a sharded PeftModel; each rank reads only its own bytes of each unit.

    Args:
        adapter: the folder of a saved adapter, whose config is `lora`, to go on with; without it a new one is made.
        is_identified: hash the files, once, so that adapters can tell their base.
        allow_unexpected: prefixes of stored keys for which the model need have no place.

    Raises:
        CheckpointError: files are missing, damaged or do not fit the model or each other.
        ConfigError: the adapter cannot be made on a sharded base, or was trained on another one.

    Ranks: collective over all ranks, once the checkpoint has been checked.
    Memory: the shards, the slots, and never more than one unit beside them.
    """
    check_initialisation(lora)
    task_type = TaskType(lora.task_type) if lora.task_type else None
    folder = resolve_folder(model_name_or_path, revision)
    with Checkpoint.open(folder) as checkpoint:
        skeleton = build_skeleton(model_name_or_path, folder, task_type, dtype, trust_remote_code, attn_implementation)
        weights = BaseWeights.plan(
            skeleton,
            checkpoint,
            dtype,
            allow_missing=NEW_HEADS.get(task_type, ()),
            allow_unexpected=(*UNUSED_HEADS.get(task_type, ()), *allow_unexpected),
        )
        put_placeholders(skeleton, weights, device)
        model = inject(skeleton, lora, revision=revision)
        _check_frozen(model)
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


def check_initialisation(lora: PeftConfig) -> None:
    """Refuse what makes another base than the one in the files, of a new adapter and of a saved one.

    Raises:
        ConfigError: the adapter's initialisation rewrites the base, or it is no part of the base's layers.
    """
    if getattr(lora, "is_prompt_learning", False):
        raise ConfigError(f"expected an adapter inside the base's layers, such as LoRA, found {lora.peft_type}")
    wanted = str(getattr(lora, "init_lora_weights", True)).lower()
    if wanted.startswith(_REWRITING_INITIALISATIONS):
        raise ConfigError(
            f"init_lora_weights: '{wanted}' rewrites the base when PEFT makes or loads the adapter, and lorashard "
            "reads the base as it is: expected true, false or 'gaussian'; a saved adapter is converted once by PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _check_frozen(model: PeftModel) -> None:
    trained = [n for n, p in model.named_parameters() if p.requires_grad and isinstance(p, Placeholder)]
    if trained:
        raise ConfigError(
            f"the adapter would train weights of the base itself ({trained[0]}), which is shared read-only: leave out "
            "PEFT's bias option, or name whole modules in modules_to_save"
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
