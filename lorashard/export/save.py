"""Save the trained adapter, read it back, and compare what was read with what was trained."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from ..errors import CheckpointError
from ..model.adapter_files import find_foreign_keys, find_lora_b, find_not_finite
from ..model.sharding import engine_of
from ..runs.checkpoints import find_newest
from ..runtime.disk import describe_fault, find_fault, sync

_CHECK_NAME = "read_back"
_CONFIG_NAME = "adapter_config.json"
_PARTIAL_NAME = ".adapter.partial"


def save_adapter(model: PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a plain PEFT folder of the trained adapter, with the tokenizer beside it.

    All of it is on the disk before any of it is in `folder`, where the adapter's config comes last: a folder without
    it is no adapter's. TRL's reference, a copy of the adapter as it was at first, is not saved.

    Raises:
        CheckpointError: the disk does not take it.

    Ranks: call on rank 0, or on one of each node where each has a folder of its own.
    """
    partial = folder / _PARTIAL_NAME
    try:
        shutil.rmtree(partial, ignore_errors=True)  # a killed process's
        partial.mkdir()
        model.save_pretrained(str(partial), selected_adapters=["default"])
        tokenizer.save_pretrained(str(partial))
        written = sorted(partial.iterdir(), key=lambda path: path.name == _CONFIG_NAME)
        for path in partial.rglob("*"):
            sync(path)
        for path in written:
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            os.replace(path, folder / path.name)
    except Exception as error:
        if find_fault(error) is None:
            raise
        raise CheckpointError(
            f"the trained adapter could not be written ({describe_fault(error, folder)})",
            where=folder,
            fix=f"make room and resume with --resume_from_checkpoint auto, which {_describe_newest(folder)}",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _describe_newest(folder: Path) -> str:
    newest = find_newest(folder)
    if newest is None:
        return "starts from step 0, as there is no complete checkpoint"
    return f"resumes from {newest.name}, the newest complete one"


def check_adapter(model: PeftModel, folder: Path, input_ids: torch.Tensor) -> str:
    """Compare the adapter in `folder` with the one in `model`; return a line about what is equal.

    The tensors are compared bit for bit; then PEFT's own loader puts the files on the same sharded base as a second
    adapter, and both give logits for `input_ids`.

    Args:
        input_ids: [batch, tokens], on the model's device; the same on all ranks.

    Raises:
        CheckpointError: the files differ from the model or have a wrapper's prefix, or the adapter has learned nothing.

    Ranks: collective over all ranks where the base is sharded.
    Memory: a second adapter, for a moment.
    """
    saved = load_file(folder / "adapter_model.safetensors")
    trained = get_peft_model_state_dict(model, save_embedding_layers=False)
    _check_keys(saved, folder)
    for name in saved.keys() | trained.keys():
        if name not in saved or name not in trained or not torch.equal(saved[name], trained[name].cpu()):
            raise CheckpointError(
                where=folder, expected=f"the trained value of '{name}'", found="another or none", fix="save again"
            )
    if getattr(model.active_peft_config, "bias", "none") != "none":
        return f"{len(saved)} tensors equal the trained ones (logits not compared: PEFT loads one adapter with biases)"
    difference = _compare_logits(model, folder, input_ids)
    if difference is None:
        return f"{len(saved)} tensors equal the trained ones (logits not compared: none is finite on the first example)"
    if not difference <= 1e-3:
        raise CheckpointError(
            "the adapter as PEFT loads it gives other logits than in training",
            where=folder,
            expected="a relative difference up to 0.001",
            found=f"{difference:.3g}",
            fix="report this as a bug of lorashard",
        )
    return f"{len(saved)} tensors and the logits equal the trained ones (relative difference {difference:.1g})"


def _check_keys(saved: dict[str, torch.Tensor], folder: Path) -> None:
    for name in find_not_finite(saved):
        raise CheckpointError(
            "the training has diverged",
            where=folder,
            expected="finite values",
            found=f"NaN or infinity in '{name}'",
            fix="lower the learning rate, and resume from a checkpoint before it diverged",
        )
    for name in find_foreign_keys(saved):
        raise CheckpointError(
            where=folder,
            expected="keys that begin with 'base_model.model.' and have no wrapper's prefix",
            found=f"'{name}'",
            fix="report this as a bug of lorashard",
        )
    lora_b = find_lora_b(saved)
    if lora_b and not any(tensor.any() for tensor in lora_b.values()):
        raise CheckpointError(
            f"the adapter has learned nothing: lora_B is zero in all of its {len(lora_b)} layers",
            where=folder,
            fix="check the learning rate, its warm-up, and whether any token is supervised; in grpo, whether the "
            "rewards of the answers to a prompt differ",
        )


def _compare_logits(model: PeftModel, folder: Path, input_ids: torch.Tensor) -> float | None:
    """Return the relative difference of the logits that are finite; None where none is."""
    active = model.active_adapter
    was_training = model.training
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.eval()
    try:
        with torch.no_grad():
            trained = model(input_ids=input_ids).logits.float()
            with engine_of(model).reader.readable():  # DoRA and modules_to_save are made from the base's weights
                model.load_adapter(str(folder), adapter_name=_CHECK_NAME)
            model.set_adapter(_CHECK_NAME)
            loaded = model(input_ids=input_ids).logits.float()
    finally:
        if _CHECK_NAME in model.peft_config:
            model.set_adapter(active)
            model.delete_adapter(_CHECK_NAME)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
        model.train(was_training)
    is_finite = trained.isfinite()  # the base itself may overflow on an example
    if not is_finite.any():
        return None
    if not torch.equal(is_finite, loaded.isfinite()):
        return math.inf
    trained, loaded = trained[is_finite], loaded[is_finite]
    return float((trained - loaded).abs().max() / trained.abs().max())
