"""A saved adapter: are its files whole, does it do something, and is a merged model what it makes of its base?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...config.placement import read_placement
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
from .memory import free
from .rows import Distance, compute_logits, settle_dtype, take_rows
from .verdicts import Verdict, agree, are_right, conclude

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
    revision: str | None
    vocab_size: int


def verify_adapter(options: VerifyOptions) -> None:
    """Check the adapter's files, then its logits, then those of the merged model; a fault ends it.

    Raises:
        VerificationError: a check failed; on all ranks.
        UserError: there is no such adapter, base, merged model or dataset.

    Ranks: run by every rank.
    Memory: one model at a time, under its placement, and the logits of the rows on the host.
    """
    device = join_launch()
    verdicts = agree(_check_files(str(options.adapter)))
    if are_right(verdicts):
        subject = _describe(options)
        options = settle_dtype(options, device)
        verdicts += agree([_check_keys(subject, options), _check_base(subject, options)])
        if options.merged is not None:
            verdicts += agree([_check_merged_files(subject, options)])
        if are_right(verdicts):
            verdicts += _compare(subject, options, device)
    conclude({"adapter": options.adapter, "merged": options.merged}, verdicts, options.as_json)


def _check_files(name: str) -> list[Verdict]:
    """Check what the adapter's own files tell."""
    try:
        folder = find_adapter(name)
    except CheckpointError as error:
        folder = Path(name).expanduser()
        if not [*folder.glob("adapter_*"), *folder.glob("checkpoint-*/adapter_*")]:
            raise
        return [Verdict("files", str(error), is_right=False)]
    try:
        config = read_config(folder)
        tensors = load_file(folder / ADAPTER_NAME)
    except CheckpointError as error:
        return [Verdict("files", str(error), is_right=False)]
    except (SafetensorError, OSError) as error:
        return [Verdict("files", f"{folder / ADAPTER_NAME} cannot be read ({error})", is_right=False)]
    foreign, not_finite = find_foreign_keys(tensors), find_not_finite(tensors)
    faults = []
    if not tensors:
        faults.append("no tensors at all")
    if foreign:
        faults.append(
            f"keys that plain PEFT does not know, expected to begin with base_model.model.: {shorten(foreign)}"
        )
    if not_finite:
        faults.append(f"NaN or infinity in {shorten(not_finite)}")
    whole = f"{config.peft_type.value if config.peft_type else 'unknown'} adapter of {len(tensors)} finite tensors"
    text = "; ".join(faults) or f"{CONFIG_NAME} and {ADAPTER_NAME}: a {whole}"
    verdicts = [Verdict("files", text, not faults, {"num_tensors": len(tensors)})]
    lora_b = find_lora_b(tensors)
    dead = [key for key, tensor in lora_b.items() if not tensor.any()]
    if lora_b:
        text = f"lora_B is zero in {len(dead) or 'none'} of {len(lora_b)} adapted layers"
        text += f": {shorten(dead)}" if dead else ""
        verdicts.append(Verdict("learned", text, is_right=len(dead) < len(lora_b)))
    return verdicts


def _describe(options: VerifyOptions) -> _Subject:
    folder = find_adapter(str(options.adapter))
    config = read_config(folder)
    check_is_causal(folder, config)
    config.inference_mode = False  # its tensors are told by what would train
    base, revision = find_base(folder, config, options.base, options.model_revision)
    base_folder = resolve_folder(base, revision)
    text = read_model_config(base_folder, options.trust_remote_code).get_text_config()
    return _Subject(folder, config, base, base_folder, revision, text.vocab_size)


def _check_keys(subject: _Subject, options: VerifyOptions) -> Verdict:
    """Let PEFT load the adapter on its base without the base's weights."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*meta parameter.*")  # nothing is to be copied
            model = build_meta_model(
                str(subject.base_folder),
                subject.config,
                getattr(torch, options.dtype),
                trust_remote_code=options.trust_remote_code,
                adapter=subject.folder,
            )
            restore(model, subject.folder)
    except UserError as error:
        return Verdict("keys", " ".join(str(error).split()), is_right=False)
    num_expected = sum(parameter.requires_grad for parameter in model.parameters())
    return Verdict(
        "keys", f"all {num_expected} tensors that PEFT expects on {subject.base} are there, and none is without a place"
    )


def _check_base(subject: _Subject, options: VerifyOptions) -> Verdict:
    """Compare the base's hash with the one that the adapter carries.

    Ranks: collective over all ranks.
    """
    with Checkpoint.open(subject.base_folder) as checkpoint:
        files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    identity = BaseIdentity.of(files)
    try:
        identity.check(subject.folder, subject.base, options.allow_base_mismatch)
    except ConfigError as error:
        return Verdict("base", str(error), is_right=False)
    trained_on = BaseIdentity.read(subject.folder)
    if trained_on is None:
        return Verdict("base", f"{subject.base}; the adapter carries no hash to know it by", facts={"is_known": False})
    quantization = choose_quantization(subject.folder, options.quantization)
    form = f", {describe_quantization(quantization)}" if quantization else ""
    is_same = sorted(trained_on.files.values()) == sorted(identity.files.values())
    text = "the one that the adapter was trained on" if is_same else "another one, as allow_base_mismatch allows"
    other = read_quantization_of(subject.folder)
    if other != quantization:
        form = f"{form or ', not quantized'} here, and {describe_quantization(other)} when it was trained"
    return Verdict("base", f"{subject.base} is {text}{form}", facts={"is_known": True, "is_same": is_same})


def _check_merged_files(subject: _Subject, options: VerifyOptions) -> Verdict:
    """Check that the merged folder holds every tensor of the model that its config describes."""
    assert options.merged is not None
    folder = resolve_folder(options.merged)
    try:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"expected a config.json in {folder}, found none; merge again")
        dtype = getattr(torch, options.dtype)
        with Checkpoint.open(folder) as checkpoint:
            skeleton = build_skeleton(options.merged, folder, None, dtype, options.trust_remote_code, None)
            weights = BaseWeights.plan(skeleton, checkpoint, dtype)
    except (CheckpointError, ValueError) as error:
        return Verdict("merged files", " ".join(str(error).split()), is_right=False)
    text = f"all tensors of a {type(skeleton).__name__} in {options.merged}, in {len(weights.files)} files"
    return Verdict("merged files", text)


def _compare(subject: _Subject, options: VerifyOptions, device: torch.device) -> list[Verdict]:
    """Compute the logits of each model, one model after the other, and compare them.

    Ranks: collective over all ranks.
    """
    rank = dist.get_rank()
    rows, origin = take_rows(options, subject.folder, subject.vocab_size)
    num_tokens = sum(map(len, rows))
    verdicts = [
        Verdict("rows", f"{len(rows)} of {num_tokens} tokens together, {origin}", facts={"num_tokens": num_tokens})
    ]
    say(rank, f"loading {subject.folder} on {subject.base}")
    try:
        adapted, base = _compute_adapted(subject, options, rows, device)
    except CheckpointError as error:  # of what the adapter holds, which all ranks read alike
        return verdicts + agree([Verdict("logits", str(error), is_right=False)])
    verdicts += agree([_check_alive(adapted, base)])
    if options.merged is not None and are_right(verdicts):
        say(rank, f"loading {options.merged}")
        merged = _compute_merged(options, rows, device)
        verdicts += agree([_check_merged(merged, adapted, base, find_tolerance(options), _advise(subject, options))])
    return verdicts


def _advise(subject: _Subject, options: VerifyOptions) -> str:
    """Return what a person may try where the merged model differs, who merged it in another form than is compared."""
    assert options.merged is not None
    stored = find_stored_format(read_config_json(resolve_folder(options.merged)))
    if stored and not options.tolerance:
        return f"; {stored.description} rounds once more: give --tolerance"
    quantization = choose_quantization(subject.folder, options.quantization)
    if quantization:
        form = describe_quantization(quantization)
        return f"; the base is {form} here: if it was merged with --quantization none, give the same"
    return ""


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
    """Return the logits of the merged model, which rests as the base did: below an adapter that is off."""
    assert options.merged is not None
    lora = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
    dtype = getattr(torch, options.dtype)
    described = BaseModel(options.merged, lora, dtype, None, options.trust_remote_code, options.attn_implementation)
    asked = read_placement(**options.placement_options())
    model = load_sharded(
        options.merged,
        lora,
        plan_inference(described, asked, device, options.num_rows * options.max_length),
        device,
        dtype=dtype,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        is_identified=False,  # nothing is saved from it
    ).eval()
    with model.disable_adapter():
        logits = compute_logits(model, rows, device)
    del model
    free(device)
    return logits


def find_tolerance(options: VerifyOptions) -> float:
    """Return the tolerance that was given, or the one for the coarsest dtype that takes part.

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


def _check_alive(adapted: _Logits, base: _Logits) -> Verdict:
    if not all(logits.isfinite().all() for logits in (*adapted, *base)):
        return Verdict("logits", "NaN or infinity among the logits", is_right=False)
    distance = Distance.of(adapted, base)
    facts = {"difference_from_base": distance.relative, "num_same_tokens": distance.num_same}
    if distance.is_equal:
        return Verdict("logits", "with the adapter they are the base's, bit for bit: it does nothing", False, facts)
    return Verdict("logits", f"with the adapter they differ from the base's: {distance.describe()}", facts=facts)


def _check_merged(merged: _Logits, adapted: _Logits, base: _Logits, tolerance: float, advice: str = "") -> Verdict:
    shapes = [logits.shape[-1] for logits in (merged[0], adapted[0])]
    if shapes[0] != shapes[1]:
        text = f"expected a vocabulary of {shapes[1]} as the base has, found {shapes[0]}"
        return Verdict("merged logits", text, is_right=False)
    from_adapted, from_base = Distance.of(merged, adapted), Distance.of(merged, base)
    facts = {
        "difference_from_adapter": from_adapted.relative,
        "difference_from_base": from_base.relative,
        "tolerance": tolerance,
        "num_same_tokens": from_adapted.num_same,
    }
    found = f"from those of the adapter on its base {from_adapted.describe()}; tolerance {tolerance:.2g}"
    if from_base.is_equal:
        return Verdict("merged logits", "they are the base's, bit for bit: nothing is merged", False, facts)
    if not from_adapted.relative <= tolerance:
        return Verdict("merged logits", f"they differ too much {found}{advice}", False, facts)
    if not from_adapted.relative < from_base.relative:
        nearer = f"they are nearer to the base's ({from_base.relative:.2g} relative) than to the adapter's"
        text = f"{nearer}: they differ {found}{advice}"
        return Verdict("merged logits", text, False, facts)
    return Verdict(
        "merged logits", f"the same: they differ {found}; from the base's {from_base.relative:.2g}", True, facts
    )
