"""Every adapter gradient of a model under a placement, against those of the same model as plain PEFT trains it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers.utils import logging as transformers_logging

from ... import api
from ...config.placement import ResolvedPlacement, resolve_placement
from ...config.quantization_options import describe_quantization, read_quantization
from ...config.use_options import VerifyOptions
from ...export.quantized_base import dequantize_model
from ...model.checkpointing import checkpoint_some
from ...model.loading import load_sharded
from ...model.micro_batching import split_layers
from ...model.skeleton import choose_auto_class
from ...model.stacks import find_layers, name_units
from ...model.tiled_mlp import tile_mlps
from ...planning.auto import BaseModel
from ...planning.trace import Microbatch
from ...runtime import dist
from ...runtime.join import join_launch
from ...runtime.output import say
from ...weights.first_layers import first_layers
from ...weights.hub import resolve_folder
from ...weights.model_config import read_model_config
from ..checks import Check, merge_ranks
from .differences import Gradients, check_reference, compare
from .memory import fit_layers, free
from .rows import make_rows, settle_dtype

_SEED = 0
_LORA_R = 8
_ADAPTER_STD = 0.02
_IGNORED_LABEL = -100


def verify_gradients(options: VerifyOptions) -> tuple[dict[str, Any], list[Check]]:
    """Train one step without sharding on rank 0, then sharded on all ranks, on the same rows; compare.

    Returns:
        What was compared, for JSON, and the checks; the same on all ranks.

    Raises:
        UserError: there is no such model, or none of it fits.

    Ranks: run by every rank. Each computes on all rows, so that its gradients must be rank 0's, whatever the placement.
    Memory: first the unsharded model on rank 0, then the sharded one.
    """
    assert options.model_name_or_path is not None
    device = join_launch()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = resolve_placement(options, world_size, dist.find_node_size())
    folder = resolve_folder(options.model_name_or_path, options.model_revision)
    options = settle_dtype(options, device)
    dtype = getattr(torch, options.dtype)
    described = BaseModel(
        str(folder),
        _make_lora(),
        dtype,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
    )
    microbatch = Microbatch(
        options.num_rows,
        options.max_length,
        device.type,
        loss="model",
        is_autocast=dtype != torch.float32,
        layer_rows=options.layer_microbatch_size,
        tile_tokens=options.mlp_tile_tokens,
    )
    fit = fit_layers(described, microbatch, placement, device)
    model_text = f"{options.model_name_or_path}, {fit.describe()}"
    quantization = read_quantization(options.quantization)
    model_text += f", {describe_quantization(quantization)}" if quantization else ""
    say(rank, f"model: {model_text}")
    with _deterministic(device) as mode, ExitStack() as stack:
        is_cut = fit.num_layers < fit.num_all_layers
        if is_cut:
            folder = stack.enter_context(first_layers(folder, fit.num_layers, options.trust_remote_code))
        reference = repeated = None
        if rank == 0:
            say(rank, "reference: one step of the unsharded model")
            reference, repeated = _run_plain(folder, options, placement, device)
        say(rank, f"sharded: the same step, placement {placement.placement}")
        found, num_gathers = _run_sharded(folder, options, placement, device, is_cut)
        compared = compare(found, reference, fit.num_layers, device)
    sharded_text = f"placement {placement.placement}, {world_size} ranks, {num_gathers} gathers on each"
    checks = [
        Check.passed("model", model_text, num_layers=fit.num_layers, num_whole_layers=fit.num_all_layers),
        Check.passed("sharded", sharded_text, num_gathers=num_gathers),
        check_reference(reference, repeated, mode),
        compared,
    ]
    subject = {"model": options.model_name_or_path, "placement": placement.placement, "world_size": world_size}
    return subject, merge_ranks(dist.gather_objects(checks))


def _make_lora() -> LoraConfig:
    return LoraConfig(r=_LORA_R, lora_alpha=2 * _LORA_R, target_modules="all-linear", task_type="CAUSAL_LM")


@contextmanager
def _deterministic(device: torch.device) -> Iterator[str]:
    """Use CUDA's deterministic kernels where there are some; yield words that describe the mode."""
    if device.type != "cuda":
        yield ""
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield ", in torch's deterministic mode"
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _run_plain(
    folder: Path, options: VerifyOptions, placement: ResolvedPlacement, device: torch.device
) -> tuple[Gradients, Gradients]:
    """Return the gradients of transformers' own model with PEFT's own adapter, of two runs.

    A base that is to be quantized has the dequantized weights instead.
    """
    with _quiet_transformers():  # it would list every tensor of the layers that are left out
        config = read_model_config(folder, options.trust_remote_code)
        base = choose_auto_class(config, TaskType.CAUSAL_LM).from_pretrained(
            folder,
            dtype=getattr(torch, options.dtype),
            trust_remote_code=options.trust_remote_code,
            attn_implementation=options.attn_implementation,
            device_map={"": device} if device.type == "cuda" else None,
        )
    dequantize_model(base, read_quantization(options.quantization))
    model = get_peft_model(base, _make_lora())
    _prepare(model, placement)
    runs = _differentiate(model, options, device), _differentiate(model, options, device)
    del model, base
    free(device)
    return runs


def _run_sharded(
    folder: Path, options: VerifyOptions, placement: ResolvedPlacement, device: torch.device, is_cut: bool
) -> tuple[Gradients, int]:
    """Return the gradients of the sharded model, and how many gathers they took.

    Ranks: collective over all ranks.
    """
    (model,) = load_sharded(
        str(folder),
        _make_lora(),
        placement,
        device,
        dtype=getattr(torch, options.dtype),
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        allow_unexpected=("",) if is_cut else (),  # the files hold the other layers too
        quantization=read_quantization(options.quantization),
        may_link=is_cut,
    )
    _prepare(model, placement)
    gradients = _differentiate(model, options, device)
    num_gathers = api.stats(model).num_gathers
    del model
    free(device)
    return gradients, num_gathers


def _prepare(model: PeftModel, placement: ResolvedPlacement) -> None:
    """Fill the adapter with seeded values, and set the model up as `finetune` does: activation checkpointing is on."""
    name_units(model, placement.unit_paths)
    if placement.layer_microbatch_size is not None:
        split_layers(find_layers(model), placement.layer_microbatch_size)
    if placement.mlp_tile_tokens is not None:
        tile_mlps(find_layers(model), placement.mlp_tile_tokens)
    if placement.activation_checkpointing_layers != "all":
        checkpoint_some(model, placement.activation_checkpointing_layers)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                values = torch.normal(0.0, _ADAPTER_STD, parameter.shape, generator=generator)
                parameter.copy_(values)
    base = model.get_base_model()
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.enable_input_require_grads()  # as TRL's trainer does
    model.train()


def _differentiate(model: PeftModel, options: VerifyOptions, device: torch.device) -> Gradients:
    """Return the gradient of every adapter parameter, on the host, and clear them in the model."""
    vocab_size = model.get_base_model().config.get_text_config().vocab_size
    input_ids = torch.tensor(make_rows(options.num_rows, options.max_length, vocab_size))  # [rows, tokens]
    labels = input_ids.clone()
    labels[:, : options.max_length // 3] = _IGNORED_LABEL
    dtype = getattr(torch, options.dtype)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = model(input_ids=input_ids.to(device), labels=labels.to(device), use_cache=False).loss
    loss.backward()
    gradients: Gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradients[name] = None if parameter.grad is None else parameter.grad.cpu()
            parameter.grad = None
    return gradients


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
