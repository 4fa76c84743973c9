"""Backward ends at the lowest decoder layer that trains: the layers below it run without gradients."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..engine.autograd import first_differentiable
from ..errors import CheckpointError
from .patches import extend_classes, on_release
from .stacks import find_decoder_stack, find_stacks, get_output_embeddings, unwrap


class _Floor:
    """The index of the lowest layer that backward must reach in the pass that is running."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.index_of = WeakKeyDictionary({layer: index for index, layer in enumerate(layers)})
        self.lowest = 0


def end_backward_at_adapters(model: nn.Module) -> None:
    """Let each pass of `model` run the decoder layers below the lowest one that trains without gradients.

    Trainers that checkpoint activations make the embedding's output require a gradient (`enable_input_require_grads`);
    backward would then go through, and gather, every layer down to it. What trains is looked up in each pass: adapters
    are added and switched. All layers keep their gradients where anything else trains than the layers and the head,
    such as an adapted embedding, a vision tower, or embeddings or a cache of the caller; and where the layers are not
    the items of one list, whose order is known. What a hook of the caller trains below is not seen.

    Memory: autograd keeps nothing of the layers below.
    """
    base = unwrap(model)
    try:
        path, stack = find_decoder_stack(base)
    except CheckpointError:
        return
    spine = [base, *(base.get_submodule(path[:i]) for i, char in enumerate(path) if char == ".")]
    floor = _Floor(stack)
    put_back = extend_classes(stack, partial(_make_skippable, floor))

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        is_open = first_differentiable((args, kwargs)) is not None or kwargs.get("past_key_values") is not None
        keeps_all = is_open or not torch.is_grad_enabled()
        floor.lowest = 0 if keeps_all else _find_lowest(model, base, list(stack), {stack, *spine})

    def end(*_: object) -> None:
        floor.lowest = 0

    hooks = (
        spine[-1].register_forward_pre_hook(begin, with_kwargs=True),
        spine[-1].register_forward_hook(end, always_call=True),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        put_back()

    on_release(base, undo)


def _find_heads(base: nn.Module, way: set[nn.Module]) -> list[nn.Module]:
    """Return what the base has after its decoder: within the decoder, modules do not run in the order of the list."""
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
    """Count the names of parameters that train: a shared one may have one name below, and another above."""
    return sum(parameter.requires_grad for _, parameter in module.named_parameters(remove_duplicate=False))


def _make_skippable(floor: _Floor, original: type[nn.Module]) -> dict[str, Any]:
    """Return a `__call__` that surrounds the layer's own.

    Hooks would run inside the checkpoint where activation checkpointing surrounds the call, and none would switch the
    gradients on again after KeyboardInterrupt.
    """

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if floor.index_of.get(self, len(floor.index_of)) >= floor.lowest:  # a copy of a layer is in no index
            floor.lowest = 0  # some models run their layers again
            return original.__call__(self, *args, **kwargs)
        with torch.no_grad():
            output = original.__call__(self, *args, **kwargs)
        if first_differentiable((args, kwargs)) is not None:
            # Reentrant checkpointing, which needs this layer's input to require a gradient, needs the next's to.
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            hidden.requires_grad_()
        return output

    return {"__call__": call}
