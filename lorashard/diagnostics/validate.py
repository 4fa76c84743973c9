"""Check a run before it takes GPUs: options, devices, the model's files, every row of the data. No weights are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import constants, get_safetensors_metadata, model_info
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

from ..config.initialization import is_derived
from ..config.quantization_options import describe_quantization
from ..config.run_config import RunConfig
from ..data.prepare import prepare
from ..data.tokenizer import load_tokenizer
from ..errors import CheckpointError
from ..launch.launcher import check_output_dir
from ..runtime.devices import check_device, choose_ranks, find_gpus
from ..runtime.disk import show_bytes
from ..runtime.plugins import refuse_plugins
from ..weights.hub import explain_hub_errors, resolve_folder
from ..weights.safetensors_files import Checkpoint
from ..weights.stored_formats import settle_quantization


def validate(config: RunConfig) -> Iterator[str]:
    """Yield a line for each check that passes.

    Raises:
        UserError: from the first check that fails.
    """
    refuse_plugins(os.environ)
    choice = choose_ranks(config, find_gpus())
    check_device(config, choice.device_type)
    check_output_dir(config)
    yield f"ranks: {choice.num_ranks} on {choice.device_type}"
    from ..planning.run_plan import settle_dtype_here

    config, about_dtype = settle_dtype_here(config, torch.device(choice.device_type))
    yield from about_dtype
    _check_trainer_options(config, choice.device_type, choice.num_ranks)
    yield "options: accepted by TRL and transformers"
    yield f"model: {describe_model(config.model_name_or_path, config.model_revision)}"
    if (kept := _describe_format(config)) is not None:
        yield f"base: {kept}"
    if config.reward_model_name_or_path is not None:
        yield f"reward model: {describe_model(config.reward_model_name_or_path, None)}"
    yield f"adapter: {_describe_adapter(config)}"
    tokenizer = load_tokenizer(**config.tokenizer_options())
    prepared = prepare(config.data_options(), tokenizer, method=config.trl_method)
    yield f"dataset: {prepared.report.summary()}"
    if prepared.eval_report is not None:
        yield f"eval_dataset: {prepared.eval_report.summary()}"


def _check_trainer_options(config: RunConfig, device_type: str, num_ranks: int) -> None:
    from ..training.arguments import build_arguments
    from ..training.rewards import load_rewards

    build_arguments(config, device_type == "cpu", num_ranks)
    if config.trl_method.generates:
        load_rewards(config.reward_funcs or [], config.reward_model_name_or_path)


def _describe_format(config: RunConfig) -> str | None:
    """Return the format that the base is trained in, where it is stored quantized or is to be quantized."""
    from ..planning.size import find_stored

    name = config.model_name_or_path
    stored = find_stored(name, config.model_revision)
    quantization = settle_quantization(stored, config.resolve_quantization(), name)
    if stored is None:
        return describe_quantization(quantization) if quantization else None
    kept = describe_quantization(quantization) if quantization else f"dequantized to {config.dtype} while it is read"
    return f"stored as {stored.description}; {kept}"


def _describe_adapter(config: RunConfig) -> str:
    """Build the model and its adapter without weights, and find the units that the base is sharded by."""
    from ..export.derived import check_derivable
    from ..model.adapters import check_coverage
    from ..model.loftq import make_lora
    from ..model.stacks import find_layers
    from ..planning.run_plan import describe_base
    from ..weights.derived_from import find_derived_dir

    model = describe_base(config).build(config.unit_paths)
    check_coverage(model, describe_base(config).lora)  # not the one that PEFT has written into
    derived = ""
    if is_derived(config.init_lora_weights):
        check_derivable(model, make_lora(config.lora_options()))
        size = show_bytes(sum(p.nbytes for p in model.get_base_model().parameters() if not p.requires_grad))
        derived = f"; {config.init_lora_weights} keeps a derived base of {size} in {find_derived_dir()}"
    num_parameters, num_layers = model.get_nb_trainable_parameters()[0], len(find_layers(model))
    return f"{num_parameters:,} trainable parameters; {num_layers} layers to shard{derived}"


def describe_model(name: str, revision: str | None) -> str:
    """Return how large a model is, from its files' headers, and where it is.

    Raises:
        CheckpointError: its files are missing or damaged, or the hub refuses them.
    """
    try:
        folder = resolve_folder(name, revision, allow_download=False)
    except CheckpointError:
        if Path(name).exists() or constants.HF_HUB_OFFLINE:
            raise
        return _describe_hub_model(name, revision)
    with Checkpoint.open(folder) as checkpoint:
        num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
        return f"{len(checkpoint.tensors)} tensors, {show_bytes(num_bytes)} in {folder}"


def _describe_hub_model(name: str, revision: str | None) -> str:
    """Read the headers of a model that is not on this machine."""
    with explain_hub_errors(name, revision):
        # First, since get_safetensors_metadata reports a missing repo or revision as one without weights.
        commit = model_info(name, revision=revision).sha
        try:
            metadata = get_safetensors_metadata(name, revision=commit)
        except NotASafetensorsRepoError as error:
            fix = "choose another model, or convert it: load it with transformers and call save_pretrained"
            raise CheckpointError("the hub has no safetensors weights of it", where=name, fix=fix) from error
        except SafetensorsParsingError as error:
            fix = "choose another revision"
            raise CheckpointError("damaged weights on the hub", where=name, found=error, fix=fix) from error
    num_tensors = sum(len(file.tensors) for file in metadata.files_metadata.values())
    return f"{num_tensors} tensors on the hub; finetune will download them"
