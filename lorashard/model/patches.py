"""How lorashard changes the classes and methods of somebody else's model, and takes the changes off again.

Note [Patches]
    All that is changed on a model, beside its parameters and hooks:

    | patched | by | so that |
    |---|---|---|
    | class of the decoder and of what wraps it: `__call__` | `engine/engine.py` | a pass runs inside the engine |
    | class of the outermost module: DDP's list of ignored names | `sharding.py` | the list follows added adapters |
    | class of each decoder layer: `__call__` | `backward.py` | layers below the lowest that trains have no gradients |
    | class of each decoder layer: `forward` | `compiling.py` | it is compiled, and its hooks are not |
    | norms and MLPs: `forward` | `fusing.py`, by Liger | Liger's kernels compute them |
    | class of each decoder layer: `__call__` | `micro_batching.py` | old transformers do not checkpoint around hooks |
    | each decoder layer: `forward` | `micro_batching.py` | a batch runs in pieces |
    | each decoder layer's MLP: `forward` | `tiled_mlp.py` | tokens run in tiles |
    | class of each `lora.Linear`: `forward` | `lora_linear.py` | what cannot change its bits is not computed |
    | base: `_apply`, `resize_token_embeddings` | `refusals.py` | the base is neither cast nor resized |
    | model and base: `__deepcopy__`, `__reduce_ex__` | `refusals.py` | the base is neither copied nor pickled |
    | tuner: `merge_adapter`, `merge_and_unload` | `refusals.py` | a read-only base is not merged into |
    | tuner: `inject_adapter`, `unload`; model: `add_adapter` | `added_adapters.py` | adapters may come and go |
    | base: `generate`, `init_continuous_batching` | `generating.py` | ranks stay together |
    | base: `_set_gradient_checkpointing` | `checkpointing.py` | only some layers are recomputed |
    | config of the decoder layers: the name of its attention | `sequence_attention.py` | ranks share rows |
    | accelerate's module: `prepare_data_loader` | `loader_groups.py` | ranks that share rows are given the same |
    | accelerate's class: `gather_for_metrics` | `loader_groups.py` | what they make of these counts once |
    | model: `save_pretrained` | `saving.py` | files say which base they belong to |
    | PEFT's module, while it saves: `safe_save_file` | `saving.py` | that is written with the file |

    A patched class is a subclass with the same name, so `isinstance`, `repr` and saving see no difference. torch looks
    up `__call__` on the class alone, and a subclass survives what replaces `forward` on the instance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..engine import Engine

_UNDO_ATTRIBUTE = "_lorashard_undo"


def extend_classes(modules: Iterable[nn.Module], make_members: Callable[[Any], dict[str, Any]]) -> Callable[[], None]:
    """Give each module a subclass of its class, with more members and the same name.

    Modules of one class get one subclass: torch.compile's guards distinguish classes.

    Args:
        make_members: returns the members for the subclass of a class.

    Returns:
        What takes the subclasses off again.
    """
    before = [(module, type(module)) for module in modules]
    made: dict[type, Any] = {}
    for module, original in before:
        if original not in made:
            names: dict[str, Any] = {"__module__": original.__module__, "__qualname__": original.__qualname__}
            made[original] = type(original.__name__, (original,), names | make_members(original))
        module.__class__ = made[original]

    def undo() -> None:
        for module, original in before:
            module.__class__ = original

    return undo


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Let calls of `owner.name` go to `wrapper`, whose first argument is the method as it was.

    Returns:
        What takes the wrapper off again.
    """
    original = getattr(owner, name, None)  # no module has a `__deepcopy__` of its own
    before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
    wrapped: Any = functools.partial(wrapper, original)
    setattr(owner, name, functools.update_wrapper(wrapped, original))  # type: ignore[arg-type]

    def undo() -> None:
        owner.__dict__.pop(name, None)
        owner.__dict__.update(before)

    return undo


def is_plain(engine: Engine) -> bool:
    """Return whether the modules hold all of the base as plain tensors, between passes too."""
    is_quantized = any(weight.format is not None for unit in engine.units for weight in unit.weights)
    return not is_quantized and all(unit.is_resident for unit in engine.units)


def on_release(base: nn.Module, undo: Callable[[], None]) -> None:
    """Let `release` call `undo`; what was added last is undone first."""
    base.__dict__.setdefault(_UNDO_ATTRIBUTE, []).append(undo)


def release(base: nn.Module) -> None:
    """Make `base` what it was before it was sharded, so that it may be cast, trained, copied and pickled."""
    for undo in reversed(base.__dict__.pop(_UNDO_ATTRIBUTE, [])):
        undo()
