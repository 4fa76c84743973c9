"""Find the stacks of a model: its decoder layers, and the blocks of other towers, such as one for images.

The model says which of its parts is the decoder (transformers' `get_decoder`), and the list in it with the most
parameters holds the layers. Where that does not find them, the user names them by their paths (`unit_paths`).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError, ConfigError

_PATHS_ATTRIBUTE = "_lorashard_unit_paths"


def name_units(model: nn.Module, unit_paths: Sequence[str] | None) -> None:
    """Let `find_layers` return the modules at `unit_paths`, and search for none.

    Args:
        unit_paths: paths in the base, as in its `named_modules`; `*` matches any name between two dots. A list of
            modules means its items. None changes nothing.

    Raises:
        ConfigError: a path matches no module, one without weights, or one inside another unit.
    """
    if unit_paths is not None:
        base = unwrap(model)
        _resolve(base, unit_paths)
        setattr(base, _PATHS_ATTRIBUTE, tuple(unit_paths))


def is_named(model: nn.Module) -> bool:
    """Return whether the units of `model` were named."""
    return hasattr(unwrap(model), _PATHS_ATTRIBUTE)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers in the model's order, or the modules that were named (`name_units`).

    Raises:
        CheckpointError: there are none.
    """
    if is_named(model):
        base = unwrap(model)
        return list(_resolve(base, getattr(base, _PATHS_ATTRIBUTE)).values())
    return list(callable_parts(_find_stack(model)))


def find_decoder_stack(model: nn.Module) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """Return the path and the list of the decoder layers.

    Raises:
        CheckpointError: they are not the items of one list.
    """
    layers = find_layers(model)
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and list(module) == layers:
            return path, module
    raise CheckpointError(
        f"decoder layers of {type(unwrap(model)).__name__}",
        expected="the items of one nn.ModuleList",
        found=f"{len(layers)} in several places",
    )


def find_stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield the outermost lists of modules that have parts and weights of their own: layers, not single projections."""
    if isinstance(module, nn.ModuleList):
        if any(_is_composite(part) for part in callable_parts(module)):
            yield module
        return
    for child in module.children():
        yield from find_stacks(child)


def is_container(module: nn.Module) -> bool:
    """Return whether a module only holds others: models call those, and not the module itself."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) or type(module) is nn.Sequential


def callable_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module`, or what is in it if it is a container."""
    if is_container(module):
        for child in module.children():
            yield from callable_parts(child)
    else:
        yield module


def get_output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the LM head, if the model has one."""
    base = unwrap(model)
    return base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wraps; another one as it is."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module is made of others; an adapter around a single one is not."""
    has_parts = any(True for _ in module.children()) and not isinstance(module, BaseTunerLayer)
    return has_parts and any(True for _ in module.parameters())


def _find_stack(model: nn.Module) -> nn.Module:
    base = unwrap(model)
    decoder = base.get_decoder() if isinstance(base, PreTrainedModel) else base
    for part in (decoder, base):
        stacks: list[nn.Module] = [*find_stacks(part)]
        stacks = stacks or [*_find_sequences(part)]
        if stacks:
            return max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))
    raise CheckpointError(
        f"no decoder layers in {type(base).__name__}",
        expected="an nn.ModuleList of layers that hold parameters",
        found="none",
        fix="name the modules to be gathered one at a time with unit_paths, such as 'model.block_*'",
    )


def _find_sequences(module: nn.Module) -> Iterator[nn.Sequential]:
    """Yield the outermost sequences of several modules of one class that have parts."""
    parts = list(module.children())
    if type(module) is nn.Sequential and len(parts) > 1 and len({type(part) for part in parts}) == 1:
        if _is_composite(parts[0]):
            yield module
        return
    for child in parts:
        yield from _find_sequences(child)


def _resolve(base: nn.Module, unit_paths: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules that match, by path, in the model's order."""
    if not unit_paths:
        raise ConfigError(option="unit_paths", expected="the path of a module, or several", found="none")
    named = dict(base.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in unit_paths:
        matching = [path for path in named if path and _is_match(path, pattern)]
        if not matching:
            nearest = difflib.get_close_matches(pattern, named, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"'{pattern}' is no module of {type(base).__name__}",
                option="unit_paths",
                fix=f"did you mean '{nearest}'?",
            )
        parts = {id(part): part for path in matching for part in callable_parts(named[path])}
        of_pattern = {path: module for path, module in named.items() if id(module) in parts}
        empty = [path for path, module in of_pattern.items() if not any(True for _ in module.parameters())]
        if empty or not of_pattern:
            raise ConfigError(
                option="unit_paths", expected="modules with weights", found=f"none in '{(empty or matching)[0]}'"
            )
        found |= of_pattern
    for path in found:
        outer = next((other for other in found if path.startswith(other + ".")), None)
        if outer is not None:
            raise ConfigError(
                f"'{path}' is inside '{outer}', which is a unit too", option="unit_paths", fix="leave one of them out"
            )
    return {path: module for path, module in named.items() if path in found}


def _is_match(path: str, pattern: str) -> bool:
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
