"""The mapping from stored tensors to model tensors, by the rules of transformers' own loader.

The one file that depends on the internals of transformers' weight loading (`core_model_loading`, `conversion_mapping`);
it follows `convert_and_load_state_dict_in_model`, from 5.17 on, without reading any data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ..errors import CheckpointError
from .safetensors_files import StoredTensor
from .segments import SegmentedTensor


@dataclass
class Group:
    """Stored tensors that are loaded together, and their conversion to model tensors.

    Attributes:
        name: The model tensor, or the first of those that the conversion returns.
        converter: transformers' conversion; None if the one stored tensor is not converted.
        dtype: The stored tensors are cast to it before they are converted.
        sources: The stored tensors for each source pattern of the conversion, in the loader's order.
    """

    name: str
    converter: WeightConverter | None
    dtype: torch.dtype
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)

    def convert(self, model: Skeleton, load: Callable[[StoredTensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the converted model tensors; `load` returns a complete stored tensor."""
        if self.converter is None:
            ((stored,),) = self.sources.values()
            return {self.name: load(stored)}
        converter = deepcopy(self.converter)
        for pattern, tensors in self.sources.items():
            for stored in tensors:
                converter.add_tensor(self.name, stored.key, pattern, load(stored))
        converted = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def find_segments(self, converted: Mapping[str, torch.Tensor]) -> dict[str, SegmentedTensor] | None:
        """Return the converted tensors as segments of stored ones; None if the conversion does more than concatenate.

        Supports the operations that move contiguous elements: stacking along dim 0, concatenating along dim 0 (or along
        dim 1 after stacking: each expert's gate, then its up projection), and chunking along dim 0. The result must
        have the shapes that transformers' own conversion returns (`converted`).
        """
        if self.converter is None:
            ((stored,),) = self.sources.values()
            return {self.name: SegmentedTensor.of(stored)}
        patterns = self.converter.source_patterns
        values = {
            pattern: [SegmentedTensor.of(stored) for stored in tensors] for pattern, tensors in self.sources.items()
        }
        is_stacked = False
        for operation in self.converter.operations:
            inputs = [tensor for pattern in patterns for tensor in values.get(pattern, [])]
            if type(operation) is MergeModulelist and operation.dim == 0:
                values = {pattern: [SegmentedTensor.stack(tensors)] for pattern, tensors in values.items()}
                is_stacked = True
            elif type(operation) is Concatenate and (operation.dim == 0 or (operation.dim == 1 and is_stacked)):
                values = {patterns[0]: [SegmentedTensor.cat(inputs, operation.dim)]}
            elif type(operation) is Chunk and operation.dim == 0 and len(inputs) == 1:
                values = {patterns[0]: inputs[0].split([tensor.shape[0] for tensor in converted.values()])}
            else:
                return None
        found = [tensor for tensors in values.values() for tensor in tensors]
        if [tensor.shape for tensor in found] != [tuple(tensor.shape) for tensor in converted.values()]:
            return None
        return dict(zip(converted, found, strict=True))


class Skeleton:
    """The model that conversions may inspect: its config and its tensors' shapes before adapters are injected."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config = model.config
        self._tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in model.state_dict().items()
        }

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return the meta tensor called `name`."""
        return self._tensors[name]


def map_keys(
    model: PreTrainedModel, stored_tensors: Mapping[str, StoredTensor], dtype: torch.dtype
) -> tuple[list[Group], dict[str, str]]:
    """Return the groups in which stored tensors are loaded, and the names unknown to the model with their stored keys.

    Args:
        model: Skeleton without adapters, built in `dtype`.

    Raises:
        CheckpointError: Two stored tensors have the name of one model tensor.
    """
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    dtype_of = _choose_dtypes(model, expected, dtype)

    groups: dict[str, Group] = {}
    unexpected: dict[str, str] = {}
    # The loader's order: it determines the order of experts, and some renamings depend on earlier ones.
    for key in sorted(stored_tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
        converter = converter_of[pattern] if pattern is not None else None
        if name not in expected:
            targets = converter.target_patterns if converter else []
            unexpected.update({name.replace(targets[0], target): key for target in targets} or {name: key})
            continue
        group = groups.setdefault(name, Group(name, converter, dtype_of[name]))
        if group.sources and (converter is None or group.converter is not converter):
            first = next(iter(group.sources.values()))[0].key
            raise CheckpointError(
                f"model tensor {name} is stored twice, as {first} and as {key}",
                where=stored_tensors[key].file.parent,
                fix="remove one, or save the model again with transformers",
            )
        group.sources.setdefault(pattern or key, []).append(stored_tensors[key])
    return list(groups.values()), unexpected


def _choose_dtypes(
    model: PreTrainedModel, expected: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Return each tensor's dtype: float32 where the model requires it, else the skeleton's own."""
    plan = {re.compile(pattern.replace("*", ".*")): kept for pattern, kept in model._get_dtype_plan(dtype).items()}
    return {
        name: next((kept for pattern, kept in plan.items() if pattern.search(name)), tensor.dtype)
        for name, tensor in expected.items()
    }


def revert(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`, named as in the model, by the keys and in the shapes in which `save_pretrained` stores them."""
    with torch.no_grad():
        return revert_weight_conversion(model, dict(tensors)) if tensors else {}


def drop_ignored(
    model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Return missing and unexpected names without those that the model's class ignores."""
    report = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(report)
    return report.missing_keys, report.unexpected_keys
