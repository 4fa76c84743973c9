"""Adapters that a user or a trainer adds to a model, or removes, after its base has been sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn

from ..engine import Engine
from ..runtime import dist
from .adapters import find_adapter_tensors
from .lora_linear import spare_lora_steps
from .patches import is_plain, release, wrap_method
from .refusals import check_config, check_frozen


def share_adapters(model: PeftModel, known: list[torch.Tensor] | None = None) -> None:
    """Give every rank the adapters of rank 0, all or those that are not among `known`.

    Ranks: collective over all ranks.
    """
    known_ids = {id(tensor) for tensor in known or []}
    tensors = [tensor.data for tensor in find_adapter_tensors(model) if id(tensor) not in known_ids]
    dist.broadcast_(tensor for tensor in tensors if not tensor.is_meta)  # PEFT fills these from a file


def follow_added_adapters(model: PeftModel, engine: Engine) -> None:
    """Let PEFT's `add_adapter`, `load_adapter` and `add_weighted_adapter` work on a sharded base as on a plain one.

    New weights equal rank 0's. Initializations that read the base (DoRA, `modules_to_save`) gather what they read; one
    that would rewrite it raises ConfigError. What `unload` returns is still gathered where it is sharded; else what it
    and `merge_and_unload` return is a plain model again.

    Ranks: the calls that add are collective over all ranks.
    """

    def add(
        original: Callable[..., None], adapter_name: str, peft_config: PeftConfig, *args: Any, **kwargs: Any
    ) -> None:
        check_config(peft_config)
        known = find_adapter_tensors(model)
        with engine.reader.readable():
            original(adapter_name, peft_config, *args, **kwargs)
        check_frozen(model)
        share_adapters(model, known)

    def inject(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with engine.reader.readable():
            original(*args, **kwargs)
        spare_lora_steps(model)

    wrap_method(model, "add_adapter", add)
    for name, wrapper in (
        ("inject_adapter", inject),
        ("unload", partial(_unload, model, engine)),
        ("merge_and_unload", partial(_unload, model, engine)),
    ):
        if hasattr(model.base_model, name):
            wrap_method(model.base_model, name, wrapper)


def _unload(
    model: PeftModel, engine: Engine, original: Callable[..., nn.Module], *args: Any, **kwargs: Any
) -> nn.Module:
    wrapped = dict(model.get_base_model().named_modules())
    base = original(*args, **kwargs)
    bare = dict(base.named_modules())
    engine.follow({module: bare[path] for path, module in wrapped.items() if bare.get(path, module) is not module})
    if is_plain(engine):
        release(base)
    return base
