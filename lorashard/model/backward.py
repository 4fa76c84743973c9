"""Backward ends at the lowest decoder layer that trains: the layers below it run without gradients."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from torch import nn

from ..engine.autograd import first_differentiable
from ..errors import CheckpointError
from .releasing import on_release
from .stacks import find_decoder_stack, find_stacks, get_output_embeddings

_FLOOR_ATTRIBUTE, _INDEX_ATTRIBUTE = "_lorashard_floor", "_lorashard_layer_index"


class _Floor:
    """The index of the lowest layer that backward must reach in the pass that is running."""

    lowest = 0


def end_backward_at_adapters(model: nn.Module) -> None:
    """Let each pass of `model` run the decoder layers below the lowest one that trains without gradients.

    Trainers that checkpoint activations make the embedding's output require a gradient (`enable_input_require_grads`);
    backward would then go through, and gather, every layer down to it. What trains is looked up in each pass: adapters
    are added and switched. Nothing is cut where anything that trains stands elsewhere than in the layers and what the
    base has after its decoder, the head: an adapted embedding, a vision tower, embeddings or a cache of the caller;
    nor where the layers are not the items of one list, whose order is known. What a hook of the caller trains below is
    not seen.

    Memory: autograd keeps nothing of the layers below.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    try:
        path, stack = find_decoder_stack(base)
    except CheckpointError:
        return
    spine = [base, *(base.get_submodule(path[:i]) for i, char in enumerate(path) if char == ".")]
    floor = _Floor()
    for index, layer in enumerate(stack):
        setattr(layer, _FLOOR_ATTRIBUTE, floor)
        setattr(layer, _INDEX_ATTRIBUTE, index)
    classes = {cls: _make_skippable(cls) for cls in {type(layer) for layer in stack}}
    for layer in stack:
        layer.__class__ = classes[type(layer)]  # layers that were alike stay so, which torch.compile looks at

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        is_open = first_differentiable((args, kwargs)) is not None or kwargs.get("past_key_values") is not None
        is_whole = is_open or not torch.is_grad_enabled()
        floor.lowest = 0 if is_whole else _find_lowest(model, base, list(stack), {stack, *spine})

    def end(*_: object) -> None:
        floor.lowest = 0

    hooks = (
        spine[-1].register_forward_pre_hook(begin, with_kwargs=True),
        spine[-1].register_forward_hook(end, always_call=True),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for layer in stack:
            layer.__class__ = type(layer).__bases__[0]
            delattr(layer, _FLOOR_ATTRIBUTE)
            delattr(layer, _INDEX_ATTRIBUTE)

    on_release(base, undo)


def _find_heads(base: nn.Module, way: set[nn.Module]) -> list[nn.Module]:
    """Return what the base has after its decoder: within that, modules do not run in the order that they stand in."""
    output = get_output_embeddings(base)
    children = list(base.children())
    decoder = max(i for i, child in enumerate(children) if child in way)
    heads = children[decoder + 1 :]
    is_beside_towers = any(any(True for _ in find_stacks(child)) for child in children if child not in way)
    if isinstance(children[decoder], nn.ModuleList) or is_beside_towers:
        heads = []  # what joins another tower to the decoder may be listed after it, and runs before
    if output is None or any(output in head.modules() for head in heads):
        return heads
    return [*heads, output]


def _find_lowest(model: nn.Module, base: nn.Module, layers: list[nn.Module], way: set[nn.Module]) -> int:
    lowest = next((i for i, layer in enumerate(layers) if _count_trained(layer)), len(layers))
    if lowest == 0:
        return 0
    num_reached = sum(map(_count_trained, [*layers[lowest:], *_find_heads(base, way)]))
    return lowest if 0 < num_reached == _count_trained(model) else 0


def _count_trained(module: nn.Module) -> int:
    """Count the places where a parameter that trains stands: one of them may be below, and another above."""
    return sum(parameter.requires_grad for _, parameter in module.named_parameters(remove_duplicate=False))


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
