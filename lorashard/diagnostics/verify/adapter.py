"""A saved adapter: are its files complete, does it change its base's logits, and does a merged model have the same?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...config.quantization_options import describe_quantization
from ...config.use_options import VerifyOptions
from ...errors import CheckpointError, ConfigError, UserError
from ...inference.load import check_is_causal, load_for_use
from ...model.adapter_files import find_foreign_keys, find_lora_b, find_not_finite
from ...model.loading import load_sharded
from ...model.saved import CONFIG_NAME, choose_quantization, find_adapter, find_base, read_config, restore
from ...model.skeleton import build_skeleton
from ...planning.auto import BaseModel
from ...planning.inference import plan_inference
from ...planning.size import build_meta_model
from ...runtime import dist
from ...runtime.join import join_launch
from ...runtime.output import say
from ...weights.fingerprint import ADAPTER_NAME, BaseIdentity, read_quantization_of
from ...weights.hub import resolve_folder
from ...weights.model_config import read_model_config
from ...weights.model_folder import read_config_json, shorten
from ...weights.safetensors_files import Checkpoint
from ...weights.stored_formats import find_stored_format
from ...weights.weights import BaseWeights
from ..checks import Check, has_failed, merge_ranks
from .memory import free
from .rows import Distance, compute_logits, settle_dtype, take_rows

_Logits = list[torch.Tensor]
# Steps of the coarsest dtype: 32 layers of random weights in bfloat16 were 2 apart, whatever their adapter.
_TOLERATED_STEPS = 8
_LEAST_TOLERANCE = 1e-4


@dataclass(frozen=True)
class _Subject:
    """An adapter whose files can be read, and its base."""

    folder: Path
    config: PeftConfig
    base: str
    base_folder: Path
    vocab_size: int


def verify_adapter(options: VerifyOptions) -> tuple[dict[str, Any], list[Check]]:
    """Check the adapter's files, then its logits, then those of the merged model, up to the first fault.

    Returns:
        What was checked, for JSON, and the checks; the same on all ranks.

    Raises:
        UserError: there is no such adapter, base, merged model or dataset.

    Ranks: run by every rank.
    Memory: one model at a time, under its placement, and the logits of the rows on the host.
    """
    device = join_launch()
    checks = _agree(_check_files(str(options.adapter)))
    if not has_failed(checks):
        subject = _describe(options)
        options = settle_dtype(options, device)
        checks += _agree([_check_keys(subject, options), _check_base(subject, options)])
        if options.merged is not None:
            checks += _agree([_check_merged_files(options)])
        if not has_failed(checks):
            checks += _compare(subject, options, device)
    return {"adapter": options.adapter, "merged": options.merged}, checks


def _agree(checks: Sequence[Check]) -> list[Check]:
    """Return the same checks on all ranks: one that stopped alone would leave the others waiting in the next gather.

    Ranks: collective over all ranks.
    """
    return merge_ranks(dist.gather_objects(checks))


def _check_files(name: str) -> list[Check]:
    """Check what the adapter's own files say."""
    try:
        folder = find_adapter(name)
    except CheckpointError as error:
        folder = Path(name).expanduser()
        if not [*folder.glob("adapter_*"), *folder.glob("checkpoint-*/adapter_*")]:
            raise
        return [Check.of_error("files", error)]
    try:
        config = read_config(folder)
        tensors = load_file(folder / ADAPTER_NAME)
    except CheckpointError as error:
        return [Check.of_error("files", error)]
    except (SafetensorError, OSError) as error:
        return [Check.failed("files", f"{folder / ADAPTER_NAME} cannot be read ({error})")]
    foreign, not_finite = find_foreign_keys(tensors), find_not_finite(tensors)
    faults = []
    if not tensors:
        faults.append("no tensors at all")
    if foreign:
        faults.append(f"keys that plain PEFT does not know, expected base_model.model. first: {shorten(foreign)}")
    if not_finite:
        faults.append(f"NaN or infinity in {shorten(not_finite)}")
    kind = config.peft_type.value if config.peft_type else "unknown"
    found = f"{CONFIG_NAME} and {ADAPTER_NAME}: a {kind} adapter of {len(tensors)} finite tensors"
    judge = Check.failed if faults else Check.passed
    checks = [judge("files", "; ".join(faults) or found, num_tensors=len(tensors))]
    if lora_b := find_lora_b(tensors):
        dead = [key for key, tensor in lora_b.items() if not tensor.any()]
        found = f"lora_B is zero in {len(dead) or 'none'} of {len(lora_b)} adapted layers"
        found += f": {shorten(dead)}" if dead else ""
        judge = Check.passed if len(dead) < len(lora_b) else Check.failed
        checks.append(judge("learned", found))
    return checks


def _describe(options: VerifyOptions) -> _Subject:
    folder = find_adapter(str(options.adapter))
    config = read_config(folder)
    check_is_causal(folder, config)
    config.inference_mode = False  # which parameters are trainable names the adapter's tensors
    base, revision = find_base(folder, config, options.base, options.model_revision)
    base_folder = resolve_folder(base, revision)
    text = read_model_config(base_folder, options.trust_remote_code).get_text_config()
    return _Subject(folder, config, base, base_folder, text.vocab_size)


def _check_keys(subject: _Subject, options: VerifyOptions) -> Check:
    """Have PEFT load the adapter on its base without the base's weights."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*meta parameter.*")  # no weights are read
            model = build_meta_model(
                str(subject.base_folder),
                subject.config,
                getattr(torch, options.dtype),
                trust_remote_code=options.trust_remote_code,
                adapter=subject.folder,
            )
            restore(model, subject.folder)
    except UserError as error:
        return Check.of_error("keys", error)
    num_expected = sum(parameter.requires_grad for parameter in model.parameters())
    return Check.passed("keys", f"exactly the {num_expected} tensors that PEFT expects on {subject.base}")


def _check_base(subject: _Subject, options: VerifyOptions) -> Check:
    """Compare the base's hash with the one that the adapter carries.

    Ranks: collective over all ranks.
    """
    with Checkpoint.open(subject.base_folder) as checkpoint:
        files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    identity = BaseIdentity.of(files)
    try:
        identity.check(subject.folder, subject.base, options.allow_base_mismatch)
    except ConfigError as error:
        return Check.of_error("base", error)
    trained_on = BaseIdentity.read(subject.folder)
    if trained_on is None:
        return Check.passed("base", f"{subject.base}; the adapter carries no hash to compare with", is_known=False)
    here = choose_quantization(subject.folder, options.quantization)
    in_training = read_quantization_of(subject.folder)
    form = f", {describe_quantization(here)}" if here else ""
    if in_training != here:
        form = f"{form or ', not quantized'} here, and {describe_quantization(in_training)} when it was trained"
    is_same = sorted(trained_on.files.values()) == sorted(identity.files.values())
    text = "the one that the adapter was trained on" if is_same else "another one, which allow_base_mismatch allows"
    return Check.passed("base", f"{subject.base} is {text}{form}", is_known=True, is_same=is_same)


def _check_merged_files(options: VerifyOptions) -> Check:
    """Check that the merged folder holds every tensor of the model that its config describes."""
    assert options.merged is not None
    folder = resolve_folder(options.merged)
    if not (folder / "config.json").is_file():
        return Check.failed("merged files", f"{folder}: expected a config.json, found none", "merge again")
    try:
        dtype = getattr(torch, options.dtype)
        with Checkpoint.open(folder) as checkpoint:
            skeleton = build_skeleton(options.merged, folder, None, dtype, options.trust_remote_code, None)
            weights = BaseWeights.plan(skeleton, checkpoint, dtype)
    except (CheckpointError, ValueError) as error:
        return Check.failed("merged files", " ".join(str(error).split()))
    found = f"all tensors of a {type(skeleton).__name__} in {options.merged}, in {len(weights.files)} files"
    return Check.passed("merged files", found)


def _compare(subject: _Subject, options: VerifyOptions, device: torch.device) -> list[Check]:
    """Compute the logits of each model, one model after the other, and compare them.

    Ranks: collective over all ranks.
    """
    rank = dist.get_rank()
    rows, origin = take_rows(options, subject.folder, subject.vocab_size)
    num_tokens = sum(map(len, rows))
    checks = [Check.passed("rows", f"{len(rows)} of {num_tokens} tokens together, {origin}", num_tokens=num_tokens)]
    say(rank, f"loading {subject.folder} on {subject.base}")
    try:
        adapted, base = _compute_adapted(subject, options, rows, device)
    except CheckpointError as error:  # about the adapter's content, which all ranks read alike
        return checks + _agree([Check.of_error("logits", error)])
    checks += _agree([_check_alive(adapted, base)])
    if options.merged is not None and not has_failed(checks):
        say(rank, f"loading {options.merged}")
        merged = _compute_merged(options, rows, device)
        checks += _agree([_check_merged(merged, adapted, base, find_tolerance(options), _advise(subject, options))])
    return checks


def _advise(subject: _Subject, options: VerifyOptions) -> str | None:
    """Return what to do where the merged model differs because it was merged in another form than is compared."""
    assert options.merged is not None
    stored = find_stored_format(read_config_json(resolve_folder(options.merged)))
    if stored and not options.tolerance:
        return f"{stored.description} rounds once more: give --tolerance"
    quantization = choose_quantization(subject.folder, options.quantization)
    if quantization:
        form = describe_quantization(quantization)
        return f"the base is {form} here: if it was merged with --quantization none, give the same"
    return None


def _compute_adapted(
    subject: _Subject, options: VerifyOptions, rows: list[list[int]], device: torch.device
) -> tuple[_Logits, _Logits]:
    """Return the logits with the adapter and without it."""
    model = load_for_use(str(subject.folder), options, options.num_rows * options.max_length)
    adapted = compute_logits(model, rows, device)
    with model.disable_adapter():
        base = compute_logits(model, rows, device)
    del model
    free(device)
    return adapted, base


def _compute_merged(options: VerifyOptions, rows: list[list[int]], device: torch.device) -> _Logits:
    """Return the logits of the merged model, loaded under the base's placement: below a disabled adapter."""
    assert options.merged is not None
    lora = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
    dtype = getattr(torch, options.dtype)
    described = BaseModel(options.merged, lora, dtype, None, options.trust_remote_code, options.attn_implementation)
    (model,) = load_sharded(
        options.merged,
        lora,
        plan_inference(described, options, device, options.num_rows * options.max_length),
        device,
        dtype=dtype,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        is_identified=False,  # nothing is saved from it
    )
    model.eval()
    with model.disable_adapter():
        logits = compute_logits(model, rows, device)
    del model
    free(device)
    return logits


def find_tolerance(options: VerifyOptions) -> float:
    """Return the given tolerance, or the one for the coarsest dtype of the merged model and the computation.

    Merging rounds base + adapter once to the dtype that the merged model is stored in; unmerged, each layer rounds
    their outputs to the dtype of the computation.
    """
    if options.tolerance is not None:
        return options.tolerance
    assert options.merged is not None
    with Checkpoint.open(resolve_folder(options.merged)) as checkpoint:
        dtypes = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype.is_floating_point}
    dtypes.add(getattr(torch, options.dtype))
    return max(_LEAST_TOLERANCE, _TOLERATED_STEPS * max(torch.finfo(dtype).eps for dtype in dtypes))


def _check_alive(adapted: _Logits, base: _Logits) -> Check:
    if not all(logits.isfinite().all() for logits in (*adapted, *base)):
        return Check.failed("logits", "NaN or infinity among the logits")
    distance = Distance.between(adapted, base)
    figures: dict[str, Any] = {"difference_from_base": distance.relative, "num_same_tokens": distance.num_same}
    if distance.is_equal:
        return Check.failed("logits", "with the adapter they are the base's, bit for bit: it has no effect", **figures)
    return Check.passed("logits", f"with the adapter they differ from the base's: {distance.describe()}", **figures)


def _check_merged(merged: _Logits, adapted: _Logits, base: _Logits, tolerance: float, fix: str | None) -> Check:
    name = "merged logits"
    sizes = [logits.shape[-1] for logits in (merged[0], adapted[0])]
    if sizes[0] != sizes[1]:
        return Check.failed(name, f"expected a vocabulary of {sizes[1]} as the base has, found {sizes[0]}")
    from_adapted, from_base = Distance.between(merged, adapted), Distance.between(merged, base)
    figures: dict[str, Any] = {
        "difference_from_adapter": from_adapted.relative,
        "difference_from_base": from_base.relative,
        "tolerance": tolerance,
        "num_same_tokens": from_adapted.num_same,
    }
    how = f"from those of the adapter on its base {from_adapted.describe()}; tolerance {tolerance:.2g}"
    if from_base.is_equal:
        return Check.failed(name, "they are the base's, bit for bit: nothing is merged", **figures)
    if not from_adapted.relative <= tolerance:
        return Check.failed(name, f"they differ too much {how}", fix, **figures)
    if not from_adapted.relative < from_base.relative:
        nearer = f"they are nearer to the base's ({from_base.relative:.2g} relative) than to the adapter's"
        return Check.failed(name, f"{nearer}: they differ {how}", fix, **figures)
    return Check.passed(name, f"the same: they differ {how}; from the base's {from_base.relative:.2g}", **figures)
