"""Backward ends at the lowest decoder layer that trains: the layers below it run without gradients."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from torch import nn

from ..engine.autograd import first_differentiable
from ..errors import CheckpointError
from .stacks import find_decoder_stack, find_stacks, get_output_embeddings

_FLOOR_ATTRIBUTE, _INDEX_ATTRIBUTE = "_lorashard_floor", "_lorashard_layer_index"


class _Floor:
    """The index of the lowest layer that backward must reach in the pass that is running."""

    lowest = 0


def end_backward_at_adapters(model: nn.Module) -> None:
    """Let each pass of `model` run the decoder layers below the lowest one that trains without gradients.

    Trainers that checkpoint activations make the embedding's output require a gradient (`enable_input_require_grads`);
    backward would then go through, and gather, every layer down to it. What trains is looked up in each pass: adapters
    are added and switched. Nothing is cut where something that trains may lie before the layers or beside them, such
    as an adapted embedding, a vision tower, or embeddings of the caller that require a gradient; nor where the layers
    are not the items of one list, whose order is known.

    Memory: autograd keeps nothing of the layers below.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    try:
        path, stack = find_decoder_stack(base)
    except CheckpointError:
        return
    spine = [base, *(base.get_submodule(path[:i]) for i, char in enumerate(path) if char == ".")]
    after = [module for owner in spine for module in _run_after(owner, {stack, *spine})]
    output = get_output_embeddings(base)
    floor = _Floor()
    for index, layer in enumerate(stack):
        setattr(layer, _FLOOR_ATTRIBUTE, floor)
        setattr(layer, _INDEX_ATTRIBUTE, index)
    classes = {cls: _make_skippable(cls) for cls in {type(layer) for layer in stack}}
    for layer in stack:
        layer.__class__ = classes[type(layer)]  # layers that were alike stay so, which torch.compile looks at
    find_lowest = _FindLowest(model, stack, [*after, output] if output is not None else after, floor)
    spine[-1].register_forward_pre_hook(find_lowest, with_kwargs=True)


def _run_after(owner: nn.Module, way: set[nn.Module]) -> list[nn.Module]:
    """Return the children of a module on the way to the layers that run after them."""
    children = list(owner.children())
    beside = [child for child in children if child not in way]
    if any(any(True for _ in find_stacks(child)) for child in beside):
        return []  # what joins another tower to the decoder may be listed after it, and runs before
    return children[max(i for i, child in enumerate(children) if child in way) + 1 :]


class _FindLowest:
    """Sets the floor when a pass reaches the decoder.

    An object rather than a closure: a deep copy of the model gets its own.
    """

    def __init__(self, model: nn.Module, stack: nn.Module, after: list[nn.Module], floor: _Floor) -> None:
        self._model = model
        self._stack = stack
        self._after = after
        self._floor = floor

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_cut = torch.is_grad_enabled() and first_differentiable((args, kwargs)) is None
        self._floor.lowest = self._find() if is_cut else 0

    def _find(self) -> int:
        layers = list(self._stack.children())
        lowest = next((i for i, layer in enumerate(layers) if _find_trained(layer)), len(layers))
        if lowest == 0:
            return 0
        reached: set[nn.Parameter] = set().union(*map(_find_trained, [*layers[lowest:], *self._after]))
        return lowest if reached and reached == _find_trained(self._model) else 0


def _find_trained(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if parameter.requires_grad}


def _make_skippable(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that surrounds the layer's whole call, and is otherwise the same class.

    Hooks would run inside of the checkpoint where activation checkpointing surrounds the call, and none would switch
    the gradients on again after KeyboardInterrupt.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        floor: _Floor = getattr(self, _FLOOR_ATTRIBUTE)
        if getattr(self, _INDEX_ATTRIBUTE) >= floor.lowest:
            floor.lowest = 0  # some models run their layers again
            return original.__call__(self, *args, **kwargs)
        with torch.no_grad():
            output = original.__call__(self, *args, **kwargs)
        if first_differentiable((args, kwargs)) is not None:
            # What asked for this layer's input to require a gradient, reentrant checkpointing, asks for the next's.
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            hidden.requires_grad_()
        return output

    namespace = {"__call__": call, "__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), namespace)
