"""A model's state_dict without its base: what is saved and loaded is the adapter, and which base it belongs to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..config.quantization_options import Quantization
from ..engine import Engine
from ..errors import CheckpointError
from ..weights.fingerprint import BaseIdentity
from .embeddings import Embeddings

_BASE_KEY = "base_sha256"
_SIGNATURE_ATTRIBUTE = "_lorashard_base_sha256"


def find_base_names(model: nn.Module, engine: Engine) -> list[str]:
    """Return the names that the base's parameters have now: adding an adapter changes them."""
    base = {(owner.module, owner.attribute) for unit in engine.units for w in unit.weights for owner in w.owners}
    return [
        f"{path}.{attribute}" if path else attribute
        for path, module in model.named_modules(remove_duplicate=False)
        for attribute in module._parameters
        if (module, attribute) in base
    ]


def keep_base_out(model: nn.Module, engine: Engine, embeddings: Embeddings | None = None) -> None:
    """Leave the base out of `model.state_dict()`, and do not miss it in `load_state_dict`, inside DDP too.

    So accelerate's `save_state` writes the adapter alone, and `load_state` reads it strictly, whatever the placement.
    The base's own modules are as they were: `get_base_model().state_dict()` holds what is in them.

    Args:
        embeddings: of a vocabulary that was resized, which states hold, and a strict `load_state_dict` misses: new
            embeddings were drawn at random.

    Ranks: local, but every rank must load the same. accelerate asks for a state on each rank, others on rank 0 alone.
    Memory: a copy of `embeddings` in each state.
    """
    missed: list[str] = []

    def after_state_dict(model: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name in find_base_names(model, engine):
            state.pop(prefix + name, None)
        signature = getattr(model, _SIGNATURE_ATTRIBUTE, None)
        if signature is not None:
            state[prefix + _BASE_KEY] = signature
        if embeddings is not None:
            state.update({prefix + name: value for name, value in embeddings.read().items()})

    def before_load(model: nn.Module, state: dict[str, Any], prefix: str, *others: object) -> None:
        if embeddings is not None:
            missed[:] = embeddings.take(state, prefix)
        _refuse_other_base(model, state, prefix)
        found = [prefix + name for name in find_base_names(model, engine) if prefix + name in state]
        if found:
            raise CheckpointError(
                "it was saved without lorashard",
                expected="a state of the adapter alone",
                found=f"{len(found)} weights of the base too, such as '{found[0]}'",
                fix="save the adapter there with save_pretrained, and resume from that with "
                "lorashard.load_adapter(folder, is_trainable=True)",
            )

    def after_load(model: nn.Module, incompatible: Any) -> None:
        base = tuple(find_base_names(model, engine))
        # A wrapper's prefix, such as DDP's `module.`, is part of the keys.
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if not key.endswith(base)] + missed

    model.register_state_dict_post_hook(after_state_dict)
    model.register_load_state_dict_pre_hook(before_load)
    model.register_load_state_dict_post_hook(after_load)


def sign_state(model: nn.Module, identity: BaseIdentity, quantization: Quantization | None = None) -> None:
    """Put a hash of the base, 32 bytes, into `model.state_dict()`; `load_state_dict` refuses another base's state.

    So a key that is made from the state, such as TRL's for the reference's log-probabilities, differs between bases
    too. A base that is quantized otherwise is another base.
    """
    digest = identity.digest()
    if quantization is not None:
        digest = hashlib.sha256(digest + json.dumps(asdict(quantization), sort_keys=True).encode()).digest()
    setattr(model, _SIGNATURE_ATTRIBUTE, torch.tensor(list(digest), dtype=torch.uint8))


def _refuse_other_base(model: nn.Module, state: dict[str, Any], prefix: str) -> None:
    own, signature = getattr(model, _SIGNATURE_ATTRIBUTE, None), state.pop(prefix + _BASE_KEY, None)
    if own is not None and signature is not None and not torch.equal(signature.cpu(), own):
        raise CheckpointError(
            "their weight files differ, or what they are quantized to",
            expected="the state of an adapter of this base",
            found="one that was saved on another base",
            fix="load the model that it was saved on",
        )
