"""Merge an adapter into its base: one that is saved, or that of a live model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from peft import PeftModel

from ..config.quantization_options import Quantization
from ..model.saved import choose_quantization, find_adapter, find_base, read_config
from ..model.sharding import base_of
from ..runtime.join import join_launch, with_index
from ..weights.fingerprint import BaseIdentity, read_quantized_form
from ..weights.hub import resolve_folder
from ..weights.safetensors_files import Checkpoint
from .live import check_live_base, save_active_adapter
from .merger import MergeReport, merge_checkpoint
from .requantized import choose_requantization


def merge(
    adapter: str | Path | PeftModel,
    out: str | Path,
    base: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_base_mismatch: bool = False,
    quantization: str | Quantization | None = None,
    requantize: str | Quantization | None = None,
    device: torch.device | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Write an adapter merged into its base as a model of its own, a unit at a time.

    The weights equal those of PEFT's `merge_and_unload` on the same device, bit for bit, under the names that they have
    in the base's files. An adapter of a quantized base is merged into its dequantized weights, and those without an
    adapter are written dequantized too, so that the merged model is the trained one. Where an adapter changes one of
    two tied weights they are untied, with a warning.

    Args:
        adapter: a folder or hub id as for `load_adapter`; or a live model from this module, which stays as it is. Its
            active adapter is merged into the files of its base. Those of a model from `shard` must hold the base that
            it was given, which is checked.
        out: a folder that does not exist or is empty; it appears when it is complete.
        base: where the base is, if not where the adapter says; of a live model from `load` it is known.
        dtype: what is computed in and written; the default is the base's own, a live model's what it computes in.
        quantization: what the base is quantized to first; not given: what it was in training; "none" merges into the
            original weights.
        requantize: quantize what is merged, `nf4` or `int8`, and write it as bitsandbytes does; transformers loads it.
        max_shard_size: of each file, in bytes or such as "5GB".
        device: where the arithmetic is done; the default is the GPU of the local rank or the CPU, a live model's its
            own.
        advance: called with how many units of how many are merged.

    Raises:
        ConfigError: PEFT cannot merge the adapter, it was trained on another base, or `out` holds something.
        CheckpointError: files are missing, damaged or do not fit each other, or writing failed.

    Ranks: collective over all ranks, which share the work.
    Memory: the adapter, a module of the base, and what PEFT's merge of it takes; of a model from `shard` also a unit.
    """
    with ExitStack() as stack:
        model = adapter if isinstance(adapter, PeftModel) else None
        folder = stack.enter_context(save_active_adapter(model)) if model is not None else find_adapter(str(adapter))
        loaded = base_of(model) if model is not None else None
        if model is not None:
            live = model.get_base_model()
            dtype, device = dtype or live.dtype, device or live.device
            base = str(loaded.folder) if base is None and loaded is not None else base
        trained_on, trained_dtype = read_quantized_form(folder)
        base, revision = find_base(folder, read_config(folder), base, revision)
        device = join_launch() if device is None else with_index(device)
        base_folder = resolve_folder(base, revision)
        with Checkpoint.open(base_folder) as checkpoint:
            files = checkpoint.files
        BaseIdentity.of(files).check(folder, base, allow_base_mismatch)
        if model is not None and loaded is None:
            check_live_base(model, base_folder, folder, trained_on, trust_remote_code)
        return merge_checkpoint(
            folder,
            Path(out),
            base_folder,
            dtype=dtype,
            max_shard_size=max_shard_size,
            device=device,
            trust_remote_code=trust_remote_code,
            quantization=choose_quantization(folder, quantization),
            quantized_dtype=trained_dtype,
            requantize=choose_requantization(trained_on, requantize),
            advance=advance,
        )
