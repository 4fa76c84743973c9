"""What can be checked of a saved adapter's tensors without its base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

# What wrappers leave in keys: plain PEFT does not find these, and silently leaves the tensors as initialized.
_WRAPPER_PARTS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.base_model.")


def find_foreign_keys(names: Iterable[str]) -> list[str]:
    """Return the keys that plain PEFT does not know: with a wrapper's prefix, or without PEFT's own."""
    return [
        name
        for name in names
        if not name.startswith("base_model.model.") or any(part in name for part in _WRAPPER_PARTS)
    ]


def find_not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that hold NaN or infinity."""
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]


def find_lora_b(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return every layer's lora_B, which is zero before training: a layer where it still is adds nothing."""
    return {name: tensor for name, tensor in tensors.items() if "lora_B" in name or "lora_embedding_B" in name}
