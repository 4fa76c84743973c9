"""What an adapter changes in a base: PEFT's own merge, of one wrapped module at a time, on copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError

_WRAPPER_PARTS = {"base_layer", "original_module", "token_adapter"}


@dataclass
class Target:
    """A module that PEFT has wrapped.

    Attributes:
        path: the module's path in the base.
        module: the outermost wrapper; never changed.
        base: the base's tensors in it that merging reads, by the name in the base.
        ignored: tensors of the base in it that merging does not read.
        made: what merging gives, by the name in the base: on the meta device, with shapes and dtypes.
    """

    path: str
    module: nn.Module
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    ignored: list[torch.Tensor] = field(default_factory=list)
    made: dict[str, torch.Tensor] = field(default_factory=dict)


def to_base_name(path: str) -> str:
    """Return the name in the base of a module or tensor in a PeftModel, without what PEFT's wrappers add."""
    parts = path.removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part not in _WRAPPER_PARTS)


def named_base_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer of `module` by what would be its name in the base, tied ones again.

    An adapter's tensors come too, under names that the base does not have.
    """
    for path, inner in module.named_modules(prefix=prefix, remove_duplicate=False):
        buffers = {key: value for key, value in inner._buffers.items() if key not in inner._non_persistent_buffers_set}
        for attribute, tensor in {**inner._parameters, **buffers}.items():
            if tensor is not None:
                yield to_base_name(f"{path}.{attribute}" if path else attribute), tensor


def find_tuner(model: PeftModel) -> BaseTuner:
    """Return the part of a PeftModel that merges.

    Raises:
        ConfigError: an adapter of this kind cannot become part of the base's weights.
    """
    tuner = model.base_model
    kind = getattr(model.active_peft_config.peft_type, "value", model.active_peft_config.peft_type)
    if not isinstance(tuner, BaseTuner) or not hasattr(type(tuner), "merge_and_unload"):
        raise ConfigError(f"PEFT cannot merge a {kind} adapter into its base", fix="serve it beside the base instead")
    return tuner


def find_targets(model: PeftModel, names: Mapping[str, torch.Tensor]) -> list[Target]:
    """Return every module that PEFT has wrapped, with what merging it gives.

    Args:
        names: shape and dtype of every tensor of the base, on the meta device; what merging makes must be among them.

    Raises:
        ConfigError: PEFT cannot merge one of them; or what it makes has no place in the base.
    """
    tuner = find_tuner(model)
    targets: list[Target] = []
    outer = ""
    for path, module in tuner.model.named_modules():
        if outer and path.startswith(outer):
            continue
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            outer = f"{path}."
            targets.append(_describe(Target(to_base_name(path), module), path, names))
    for target in targets:
        _rehearse(tuner, target, names)
    return targets


def merge_target(model: PeftModel, target: Target, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a target's module with the adapter merged into them, by the name in the base.

    Args:
        read: returns a tensor of the base, in memory that nobody else uses.

    Memory: the module's tensors, and what PEFT's merge takes beside them.
    """
    memo: dict[int, object] = {id(tensor): _bare(tensor) for tensor in target.ignored}
    for name, tensor in target.base.items():
        value = read(name)
        memo[id(tensor)] = nn.Parameter(value, requires_grad=False) if _is_parameter(tensor) else value
    return _merge(find_tuner(model), target, memo)


def _describe(target: Target, path: str, names: Mapping[str, torch.Tensor]) -> Target:
    replaced = None
    if isinstance(target.module, ModulesToSaveWrapper) and target.module.active_adapters:
        replaced = target.module.original_module
    ignored = {id(tensor) for _, tensor in named_base_tensors(replaced)} if replaced is not None else set()
    for name, tensor in named_base_tensors(target.module, path):
        if id(tensor) in ignored:
            target.ignored.append(tensor)
        elif name in names:
            target.base[name] = tensor
    return target


def _rehearse(tuner: BaseTuner, target: Target, names: Mapping[str, torch.Tensor]) -> None:
    """Merge on the meta device, so that whatever PEFT refuses is raised before anything is read or written."""
    memo: dict[int, object] = {}
    for parameter in target.module.parameters():
        memo[id(parameter)] = nn.Parameter(_bare(parameter), requires_grad=False)
    try:
        target.made = _merge(tuner, target, memo)
    except Exception as error:  # PEFT's tuners raise what they like
        reason = " ".join(str(error).split())
        raise ConfigError(f"PEFT cannot merge '{target.path}': {reason}") from error
    for name, tensor in target.made.items():
        if name not in names or tensor.shape != names[name].shape:
            raise ConfigError(
                f"merging the adapter makes '{name}', which does not fit the base",
                option="base",
                expected=f"shape {list(names[name].shape)}" if name in names else "no such tensor",
                found=f"shape {list(tensor.shape)}",
                fix="give the base that it was trained on; adapters that add layers or tokens cannot be merged",
            )


def _merge(tuner: BaseTuner, target: Target, memo: dict[int, object]) -> dict[str, torch.Tensor]:
    for inner in target.module.modules():
        for leaf in tree_leaves([value for value in vars(inner).values() if isinstance(value, dict)]):
            if isinstance(leaf, torch.Tensor) and not leaf.is_leaf:  # which deepcopy refuses
                memo[id(leaf)] = leaf.detach()
    shell = nn.Module()
    shell.target = copy.deepcopy(target.module, memo)
    twin = copy.copy(tuner)
    twin._modules = {"model": shell}
    with torch.no_grad():
        twin.merge_and_unload()
    return {f"{target.path}.{key}": value for key, value in shell.target.state_dict().items()}


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or getattr(tensor, "_is_param", False)
