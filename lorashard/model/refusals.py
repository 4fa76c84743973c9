"""What PEFT, torch and transformers offer and cannot work on a base that is shared and read-only, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from functools import partial
from typing import Any, NoReturn

import torch
from peft import PeftConfig, PeftModel
from torch import nn

from ..config.initialization import check_initialization
from ..config.quantization_options import Quantization
from ..engine import Engine, Placeholder, Weight
from ..errors import ConfigError, ShardError
from ..weights.model_folder import shorten
from .patches import on_release, wrap_method
from .stacks import unwrap

_KINDS = {
    "SHADOW": "it wraps decoder layers, which are what lorashard gathers, and runs a second model beside them",
    "XLORA": "it runs the model a second time inside its own forward, while units of the first are in use",
}
_OPTIONS = {
    "kasa_config": "KaSA removes singular values from the base's weights, and lorashard reads the base as it is",
    "arrow_config": "PEFT makes its router from adapters that are on the model already (create_arrow_model), and a new "
    "model has none",
}

# By Python's hook for it: what happened, and what to do instead.
_HOOKS = {
    "__deepcopy__": (
        "copy.deepcopy would copy the model with its base, which is shared and read-only",
        "add a second adapter to it (add_adapter), or load the model once more",
    ),
    "__reduce_ex__": (
        "pickle (torch.save of the model itself) and copy.copy would include the base, which is in shards, files or "
        "buffers",
        "save the adapter with save_pretrained, and load it with lorashard.load_adapter; or use "
        "torch.save(model.state_dict()), which leaves the base out",
    ),
}


def check_config(config: PeftConfig, *, is_in_memory: bool = False, quantization: Quantization | None = None) -> None:
    """Refuse an adapter that cannot work, or that makes another base than the one in the files.

    Args:
        is_in_memory: the adapter is made already, and the base is what it has made of it.
        quantization: what the base is to be quantized to, of an adapter that is made then or already in memory.

    Raises:
        ConfigError: with the reason.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind in _KINDS:
        raise ConfigError(
            f"{kind} cannot work on a sharded base: {_KINDS[kind]}",
            option="peft_type",
            fix="choose another, such as LORA",
        )
    if is_in_memory:
        if quantization is not None and getattr(config, "layer_replication", None):
            raise ConfigError(
                "in memory it can no longer be seen which shared weights are a layer's, and to be quantized",
                option="layer_replication",
                fix="give the checkpoint to lorashard.load with quantization=...",
            )
        return
    for option, reason in _OPTIONS.items():
        if getattr(config, option, None) is not None:
            raise ConfigError(
                reason, option=option, fix="leave it out, or give the finished PeftModel to lorashard.shard"
            )
    quantized_to = None if quantization is None else quantization.format
    check_initialization(getattr(config, "init_lora_weights", True), quantized_to)


def check_frozen(model: PeftModel) -> None:
    """Refuse an adapter that trains weights of the base itself.

    Raises:
        ConfigError: naming the first of them.
    """
    trained = [n for n, p in model.named_parameters() if p.requires_grad and isinstance(p, Placeholder)]
    if trained:
        raise ConfigError(
            f"the adapter would train weights of the base itself ({trained[0]}), which is shared and read-only",
            fix="leave out PEFT's bias option, or name modules in modules_to_save",
        )


def refuse_unfrozen_base(model: nn.Module, decoder: nn.Module, engine: Engine) -> None:
    """Let each pass with gradients through `decoder` raise ConfigError if a script has unfrozen weights of the base.

    Those of a sharded unit would get no gradient, and those of a resident one a gradient that DDP does not reduce. The
    check reads one flag of each weight.
    """

    def check(*_: object) -> None:
        if not torch.is_grad_enabled():
            return
        weights = ((weight, unit.is_resident) for unit in engine.units for weight in unit.weights)
        names = [weight.placeholder.full_name for weight, is_resident in weights if _trains(weight, is_resident)]
        if names:
            raise ConfigError(
                "the base is shared and read-only, and these weights would not be trained",
                expected="a frozen base",
                found=f"requires_grad=True on {len(names)} of its weights ({shorten(names, 3)})",
                fix="name the modules in modules_to_save of the LoraConfig (layer norms, a head), or the tokens of an "
                "embedding in trainable_token_indices, and leave requires_grad of the base alone",
            )

    on_release(unwrap(model), decoder.register_forward_pre_hook(check).remove)


def _trains(weight: Weight, is_resident: bool) -> bool:
    if not is_resident:
        return weight.placeholder.requires_grad
    tensor = weight.owners[0].module._parameters.get(weight.owners[0].attribute)
    return tensor is not None and tensor.requires_grad


def check_unquantized(model: PeftModel, is_base: Callable[[nn.Parameter], bool]) -> None:
    """Refuse a model in memory whose base another library has quantized.

    Raises:
        ConfigError: with what was found.
    """
    base = model.get_base_model()
    method = getattr(base, "quantization_method", None)  # transformers sets it
    found = None if method is None else f"one that is quantized by {getattr(method, 'value', method)}"
    for name, parameter in base.named_parameters():
        if found is None and is_base(parameter) and type(parameter) is not nn.Parameter:
            found = f"a {type(parameter).__name__} in {name}"
    if found is not None:
        raise ConfigError(
            expected="a base of plain weights in memory",
            found=found,
            fix="give the checkpoint to lorashard.load with quantization=..., or the unquantized model to "
            "lorashard.shard with it",
        )


def refuse_merging(model: nn.Module) -> None:
    """Let PEFT's merging in place raise ConfigError, before it has merged the first layer."""
    if isinstance(model, PeftModel):
        for name in ("merge_adapter", "merge_and_unload"):
            if hasattr(model.base_model, name):
                wrap_method(model.base_model, name, partial(_refuse_merging, name))


def _refuse_merging(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise ConfigError(
        f"{name} would change the base in place (as TRL's use_vllm does, to give vLLM the merged weights), but it is "
        "sharded, quantized or read-only",
        fix="load with placement='replicate' and without quantization, or merge the saved adapter; with TRL leave "
        "use_vllm off",
    )


def refuse_changes(model: nn.Module, dtypes: Set[torch.dtype]) -> None:
    """Let calls that would cast, resize, copy or pickle the base raise ShardError, which names what to do instead.

    Without that an operation of torch is refused, deep inside the call. What changes nothing works, and so does
    everything on a base that has been released (`patches.release`).

    Args:
        dtypes: of the base's weights.
    """
    base = unwrap(model)
    for module in dict.fromkeys((model, base)):
        for hook, reasons in _HOOKS.items():
            on_release(base, wrap_method(module, hook, partial(_refuse, *reasons)))
    on_release(base, wrap_method(base, "_apply", partial(_apply, dtypes)))
    if hasattr(base, "resize_token_embeddings"):
        on_release(base, wrap_method(base, "resize_token_embeddings", partial(_resize, base)))


def _refuse(problem: str, fix: str, *args: object, **kwargs: object) -> NoReturn:
    raise ShardError(problem, fix=fix)


def _apply(
    dtypes: Set[torch.dtype],
    original: Callable[..., nn.Module],
    function: Callable[[torch.Tensor], torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    """Replace `_apply`, through which torch casts and moves modules: `half`, `to`, `type` and others."""
    for dtype in dtypes:
        cast = function(torch.empty(0, dtype=dtype)).dtype
        if cast != dtype:
            calls = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double"}
            asked = f"{calls[cast]}() or to(torch.{_name(cast)})" if cast in calls else f"to(torch.{_name(cast)})"
            raise ShardError(
                f"{asked} would cast the base, which is {' and '.join(sorted(map(_name, dtypes)))} and read-only",
                fix=f"give dtype=torch.{_name(cast)} to lorashard.load, or cast the model before lorashard.shard; the "
                "adapter's own parameters may be cast one by one",
            )
    return original(partial(_keep_on_cpu, function), *args, **kwargs)


def _keep_on_cpu(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is where it would be moved from the CPU to `cpu:0`, as accelerate calls it.

    torch would copy it, mapped files too.
    """
    if tensor.device.type == "cpu":
        before = torch.empty(0, dtype=tensor.dtype)
        after = function(before)
        if after is not before and (after.device.type, after.dtype) == ("cpu", tensor.dtype):
            return tensor
    return function(tensor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _resize(
    base: Any, original: Callable[..., nn.Module], new_num_tokens: int | None = None, *args: Any, **kwargs: Any
) -> nn.Module:
    num_tokens = base.get_input_embeddings().weight.shape[0]
    multiple = args[0] if args else kwargs.get("pad_to_multiple_of")
    wanted = new_num_tokens if new_num_tokens is not None else num_tokens
    wanted = wanted if multiple is None else math.ceil(wanted / multiple) * multiple
    if wanted != num_tokens:
        raise ShardError(
            f"resize_token_embeddings would change the base's {num_tokens} embeddings to {wanted}, and they are "
            "read-only",
            fix="resize the transformers model first, then call get_peft_model and lorashard.shard; or train rows that "
            "are there with trainable_token_indices",
        )
    return original(new_num_tokens, *args, **kwargs)
