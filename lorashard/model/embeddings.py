"""Embeddings that belong in a saved adapter: those of a resized vocabulary are in no file of the base.

Note [Who reads the embeddings]
    PEFT saves them where the vocabulary is not that of the base's config. Trainer saves on rank 0 alone, where nothing
    may be gathered: so each rank copies them to its host when the base is sharded, while it has them all anyway.
    Where a script asks for embeddings that are the base's own (`save_embedding_layers=True`) they are gathered; where
    not all ranks ask, they all raise an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..engine import Engine, Unit
from ..errors import CheckpointError
from ..weights.fingerprint import ADAPTER_NAME, open_adapter
from .units import Structure

# What PEFT's wrappers put between the path of an embedding and the name of its own weight.
_WRAPPED = ("", "base_layer.", "original_module.", "token_adapter.base_layer.")

Copies = dict[str, torch.Tensor]


def is_resized(model: PeftModel) -> bool:
    """Return whether the vocabulary of a model in memory is not that of the base it was loaded from, as PEFT does.

    A base whose config is not on this machine counts as not resized.
    """
    base = model.get_base_model()
    name = next((c.base_model_name_or_path for c in model.peft_config.values() if c.base_model_name_or_path), None)
    if name is None or not isinstance(base, PreTrainedModel):
        return False
    try:
        stored = type(base.config).from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return False
    return _vocab_size(base.config) != _vocab_size(stored)


def _vocab_size(config: PreTrainedConfig) -> int | None:
    return getattr(config.get_text_config(), "vocab_size", None)


def copy_embeddings(model: PeftModel, structure: Structure) -> Copies:
    """Return the frozen weights of the embeddings on the host, by name, while they are unsharded.

    Memory: none where they are on the host already, else a copy.
    """
    modules = _find_modules(model)
    return {
        weight.name: weight.parameter.detach().cpu()
        for unit in structure.units
        for weight in unit.weights
        if any(owner.module in modules for owner in weight.owners)
    }


def _find_modules(model: PeftModel) -> set[nn.Module]:
    """Return the input and the output embedding and what wraps them; one in `modules_to_save` is in the adapter."""
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModel):
        return set()
    parts = (base.get_input_embeddings(), base.get_output_embeddings())
    frozen = (part for part in parts if part is not None and not isinstance(part, ModulesToSaveWrapper))
    return {module for part in frozen for module in part.modules()}


class Embeddings:
    """The embeddings of a sharded model, wherever they rest.

    Attributes:
        are_own: the vocabulary is not that of the base's files; then reading is local.

    Memory: the copies of what is sharded, on each rank's host.
    """

    def __init__(self, model: PeftModel, engine: Engine, copies: Copies) -> None:
        """Keep `copies` of `copy_embeddings`, where the vocabulary is not that of the base's files; else none."""
        self._model = model
        self._engine = engine
        self.are_own = bool(copies)
        resident = {w.placeholder.full_name for unit in engine.units if unit.is_resident for w in unit.weights}
        self._copies = {name: tensor for name, tensor in copies.items() if name not in resident}

    def find(self) -> dict[str, tuple[Unit, int]]:
        """Return where the engine has each weight, by the names in the model: adding an adapter changes them."""
        modules = _find_modules(self._model)
        places = {
            (owner.module, owner.attribute): (unit, index)
            for unit in self._engine.units
            for index, weight in enumerate(unit.weights)
            for owner in weight.owners
            if owner.module in modules
        }
        return {
            f"{path}.{attribute}": places[module, attribute]
            for path, module in self._model.named_modules()
            for attribute in module._parameters
            if (module, attribute) in places
        }

    def read(self) -> dict[str, torch.Tensor]:
        """Return the values by name: from the copies if there are any, else gathered, which is then collective."""
        found = self.find()
        values: dict[tuple[Unit, int], torch.Tensor] = {}
        for unit, index in found.values():
            name = unit.weights[index].placeholder.full_name
            if name in self._copies:
                values[unit, index] = self._copies[name]
        rest = [place for place in dict.fromkeys(found.values()) if place not in values]  # a tied one once
        values |= zip(rest, self._engine.reader.read(rest), strict=True)
        return {name: values[place].clone() for name, place in found.items()}  # safetensors refuses shared memory

    def take(self, state: dict[str, Any], prefix: str) -> list[str]:
        """Write the embeddings in a state to where they rest, and remove them from it.

        Returns:
            The names of those that the state lacks.
        """
        found = self.find()
        there = {place for name, place in found.items() if prefix + name in state}  # a tied one under any of its names
        for name, (unit, index) in found.items():
            if prefix + name not in state:
                continue
            value, weight = state[prefix + name], unit.weights[index]
            if weight.format is not None:
                raise CheckpointError(
                    expected="embeddings that are not quantized, to read those of a resized vocabulary into them",
                    where=name,
                    fix="leave include_input_output_embeddings (has_vocabulary) off",
                )
            if value.shape == weight.placeholder.shape:
                self._write(unit, index, state.pop(prefix + name))
        return [prefix + name for name, place in found.items() if place not in there]

    def _write(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        name = unit.weights[index].placeholder.full_name
        if name in self._copies:
            self._copies[name] = value.detach().to("cpu", self._copies[name].dtype, copy=True)
        self._engine.write(unit, index, value)


def put_saved_embeddings(model: PreTrainedModel, folder: Path, device: torch.device) -> dict[str, nn.Parameter]:
    """Replace the base's embeddings by those in an adapter's file, where these are of another size.

    Args:
        model: with placeholders for the base, and no adapter yet. Its config gets the size of the vocabulary.
        folder: of the adapter.

    Returns:
        The new embeddings, by the name of the weight in the base.

    Raises:
        CheckpointError: the embedding is of another size and the head is not, or the other way round.
    """
    parts = [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    paths = {module: path for path, module in model.named_modules() if module in parts}
    new: dict[torch.Tensor, nn.Parameter] = {}
    with open_adapter(folder) as opened:
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        for module, path in paths.items():
            for attribute, old in _parameters_of(module):
                key = next((k for w in _WRAPPED if (k := f"base_model.model.{path}.{w}{attribute}") in shapes), None)
                if key is not None and shapes[key] != old.shape and shapes[key][1:] == old.shape[1:]:
                    value = opened.get_tensor(key).to(device, old.dtype)
                    new.setdefault(old, nn.Parameter(value, requires_grad=False))
    if not new:
        return {}
    sizes = {new.get(old, old).shape[0] for module in parts for _, old in _parameters_of(module)}
    if len(sizes) > 1:
        raise CheckpointError(
            "not all embeddings of the resized vocabulary are there",
            found=f"sizes {' and '.join(map(str, sorted(sizes)))}",
            where=folder / ADAPTER_NAME,
            fix="save it again with save_embedding_layers=True",
        )
    put: dict[str, nn.Parameter] = {}
    for module, path in paths.items():
        for attribute, old in _parameters_of(module):
            module._parameters[attribute] = put[f"{path}.{attribute}"] = new[old]
    _set_vocab_size(model, parts, sizes.pop())
    return put


def _parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(attribute, p) for attribute, p in module._parameters.items() if p is not None]


def _set_vocab_size(model: PreTrainedModel, parts: Iterable[nn.Module], size: int) -> None:
    """Write the size to where transformers' `resize_token_embeddings` does."""
    for part in parts:
        setattr(part, "num_embeddings" if isinstance(part, nn.Embedding) else "out_features", size)
    model.config.get_text_config().vocab_size = size
    model.vocab_size = size
