"""From a checkpoint to a sharded PeftModel, without a whole model on any rank."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

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

from ..config.placement import ResolvedPlacement
from ..config.quantization_options import Quantization
from ..engine import Home, HostCopies, Placeholder
from ..errors import CheckpointError, ConfigError
from ..quantization.format import Quantizer
from ..runtime import dist
from ..runtime.dist import ShardGroup
from ..runtime.progress import Progress, told_progress
from ..weights.derived_from import read_origin
from ..weights.fingerprint import BaseIdentity
from ..weights.hub import resolve_folder
from ..weights.model_config import describe_error, explain_code, read_generation_config, read_model_config
from ..weights.model_folder import CONFIG_NAME, read_config_json
from ..weights.safetensors_files import Checkpoint
from ..weights.stored_formats import settle_quantization
from ..weights.weights import BaseWeights
from .adapters import base_test, check_coverage, inject
from .embeddings import put_saved_embeddings
from .homes import FileHomes, MakeHome, ShardedHomes, choose_resident, find_quantized
from .loftq import check_loftq, initialize_loftq, is_loftq
from .quantizing import find_quantizers
from .refusals import check_config, check_frozen
from .saved import count_labels, restore
from .sharding import LoadedBase, refuse_merging, remember_base, shard_structure
from .sources import CheckpointSource, read_weight
from .stacks import name_units
from .units import FoundUnit, FoundWeight, find_structure

_logger = logging.getLogger(__name__)

_AUTO_CLASSES = {
    None: AutoModelForCausalLM,
    TaskType.CAUSAL_LM: AutoModelForCausalLM,
    TaskType.SEQ_CLS: AutoModelForSequenceClassification,
}
# What PEFT may put on top of a checkpoint that was saved for another task: initialized, then trained.
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
    quantization: Quantization | None = None,
    cache_quantized: bool = False,
    is_identified: bool = True,
    allow_unexpected: Sequence[str] = (),
    num_labels: int | None = None,
    may_link: bool = False,
    progress: Progress | None = None,
) -> PeftModel:
    """Return a sharded PeftModel; each rank reads only its own bytes of each unit.

    Args:
        adapter: the folder of a saved adapter, whose config is `lora`, to go on with; without it a new one is made.
        quantization: what the base is quantized to while it is read.
        cache_quantized: keep what is quantized in files, and read those the next time.
        is_identified: hash the files, once, so that adapters can tell their base.
        allow_unexpected: prefixes of stored keys for which the model need have no place.
        num_labels: of a new classifier; a saved one's head tells.
        may_link: as for `resolve_folder`.
        progress: as for `resolve_folder`; then told how many "bytes hashed" there are, "units converted", and "units",
            of how many. By default the person is told on stderr of what takes longer than two seconds.

    Raises:
        CheckpointError: files are missing, damaged or do not fit the model or each other.
        ConfigError: the adapter cannot be made on a sharded base, or was trained on another one.

    Ranks: collective over all ranks, once the checkpoint has been checked.
    Memory: the shards, the slots, and never more than one unit beside them.
    """
    check_config(lora, quantization=quantization if adapter is None else None)
    task_type = TaskType(lora.task_type) if lora.task_type else None
    folder = resolve_folder(model_name_or_path, revision, may_link=may_link, progress=progress)
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
        own = put_saved_embeddings(skeleton, adapter, device) if adapter is not None else {}
        name_units(skeleton, placement.unit_paths)
        source = CheckpointSource(weights)
        quantization = settle_quantization(weights.stored_format, quantization, str(folder))
        is_stored_quantized = weights.stored_format is not None and weights.stored_format.quantization is not None
        check_loftq(lora, is_stored_quantized)
        # Modules that a quantized checkpoint left as they are stay so.
        own_parameters = set(own.values())
        quantizers = (
            {name: quantizer for name, quantizer in weights.stored_quantizers().items() if name not in own}
            if is_stored_quantized
            else find_quantizers(skeleton, quantization, lambda p: isinstance(p, Placeholder) or p in own_parameters)
        )
        read_quantized(skeleton, quantizers, source, device)
        line = weights.describe_stored()
        if line is not None and dist.get_rank() == 0:
            _logger.warning(line)
        asked = copy.copy(lora)  # PEFT writes into a config what it makes of it
        model = inject(skeleton, lora, revision=revision)
        check_frozen(model)
        if adapter is None:
            check_coverage(model, asked)
            if is_loftq(asked):
                initialize_loftq(model, weights, quantizers.keys(), device)
        structure = find_structure(model, base_test(model))
        for weight in (weight for unit in structure.units for weight in unit.weights):
            weight.quantizer = quantizers.get(weight.name)
        resident = choose_resident(structure, placement.resident_layers)
        _check_commit(folder)  # the first collective: nothing can be wrong on one rank alone
        identity = BaseIdentity.of(weights.files, progress) if is_identified else None
        if adapter is not None:
            if identity is not None:
                identity.check(adapter, model_name_or_path, allow_base_mismatch)
            restore(model, adapter)
        group = ShardGroup.of_size(placement.group_size, placement.wait_warning_s)
        make_home: MakeHome
        if placement.placement == "file":
            make_home = FileHomes(structure, weights, device, resident, identity, progress)
        else:
            is_on_host = placement.placement == "host"
            converted = find_quantized(
                structure, weights, identity, device, is_asked_for=cache_quantized, is_file=False, progress=progress
            )
            make_home = ShardedHomes(is_on_host, group, device, source, resident, HostCopies(device), converted)
        with told_progress("loading the base", dist.get_rank() == 0, progress) as tell:
            make_home = _counted(make_home, len(structure.units), tell)
            shard_structure(model, structure, make_home, group, device, placement.prefetch, bool(own))
    if placement.placement == "file":
        refuse_merging(model)
    if identity is not None:
        remember_base(model, LoadedBase(folder, identity, quantization, read_origin(folder)))
    return model.to(device)


def _counted(make_home: MakeHome, num_units: int, progress: Progress) -> MakeHome:
    numbers = count(1)

    def make(unit: FoundUnit) -> Home:
        home = make_home(unit)
        progress(next(numbers), num_units, "units")
        return home

    return make


def read_quantized(
    skeleton: PreTrainedModel, quantizers: Mapping[str, Quantizer], source: CheckpointSource, device: torch.device
) -> None:
    """Let who reads a weight that is to be quantized get the numbers that are computed with, not those in the files.

    Adapters that look at the base when they are made, such as DoRA and whole modules that train, begin from these.
    """
    for placeholder in skeleton.parameters():
        if isinstance(placeholder, Placeholder) and placeholder.full_name in quantizers:
            name = placeholder.full_name
            weight = FoundWeight(name, cast(nn.Parameter, placeholder), quantizer=quantizers[name])
            placeholder.reader = partial(read_weight, weight, source, device)


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
