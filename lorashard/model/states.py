"""Keep the base out of a model's state_dict: what is saved and loaded is the adapter, and which base it belongs to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config.quantization_options import Quantization
from ..engine import Engine
from ..errors import CheckpointError
from ..weights.fingerprint import BaseIdentity

_BASE_KEY = "base_sha256"
_SIGNATURE_ATTRIBUTE = "_lorashard_base_sha256"


def find_base_names(model: nn.Module, engine: Engine) -> list[str]:
    """Return the names of the base's parameters as they are called now: adding an adapter changes them."""
    base = {(owner.module, owner.attribute) for unit in engine.units for w in unit.weights for owner in w.owners}
    return [
        f"{path}.{attribute}" if path else attribute
        for path, module in model.named_modules(remove_duplicate=False)
        for attribute in module._parameters
        if (module, attribute) in base
    ]


def keep_base_out(model: nn.Module, engine: Engine) -> None:
    """Leave the base out of `model.state_dict()`, and do not miss it in `load_state_dict`, inside DDP too.

    So accelerate's `save_state` writes the adapter alone, and `load_state` reads it strictly, whatever the placement.
    Embeddings of a resized vocabulary are put back by `embeddings.put_into_states`, which comes after this.
    The base's own modules are as they were: `get_base_model().state_dict()` holds what rests in them.
    """
    model.register_state_dict_post_hook(partial(_leave_out, engine))
    model.register_load_state_dict_pre_hook(partial(_refuse, engine))
    model.register_load_state_dict_post_hook(partial(_do_not_miss, engine))


def sign_state(model: nn.Module, identity: BaseIdentity, quantization: Quantization | None = None) -> None:
    """Let `model.state_dict()` tell the base by a hash, 32 bytes, and `load_state_dict` refuse another base's state.

    So a key that is made from the state, such as TRL's for the reference's log-probabilities, tells bases apart too.
    A base that is quantized otherwise is another base.
    """
    digest = identity.digest()
    if quantization is not None:
        digest = hashlib.sha256(digest + json.dumps(asdict(quantization), sort_keys=True).encode()).digest()
    setattr(model, _SIGNATURE_ATTRIBUTE, torch.tensor(list(digest), dtype=torch.uint8))


def _leave_out(engine: Engine, model: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name in find_base_names(model, engine):
        state.pop(prefix + name, None)
    signature = getattr(model, _SIGNATURE_ATTRIBUTE, None)
    if signature is not None:
        state[prefix + _BASE_KEY] = signature


def _refuse(engine: Engine, model: nn.Module, state: dict[str, Any], prefix: str, *others: object) -> None:
    own, signature = getattr(model, _SIGNATURE_ATTRIBUTE, None), state.pop(prefix + _BASE_KEY, None)
    if own is not None and signature is not None and not torch.equal(signature.cpu(), own):
        raise CheckpointError(
            "expected the state of an adapter of this base, found one that was saved on another base (their weight "
            "files differ, or what they are quantized to): load the model that it was saved on"
        )
    found = [prefix + name for name in find_base_names(model, engine) if prefix + name in state]
    if found:
        raise CheckpointError(
            f"expected a state of the adapter alone, found {len(found)} weights of the base too, such as '{found[0]}': "
            "it was saved without lorashard; save the adapter there with save_pretrained, and go on from that with "
            "lorashard.load_adapter(folder, is_trainable=True)"
        )


def _do_not_miss(engine: Engine, model: nn.Module, incompatible: Any) -> None:
    base = tuple(find_base_names(model, engine))
    # A wrapper's prefix, such as DDP's `module.`, is part of the keys.
    incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if not key.endswith(base)]
