"""What PEFT offers and cannot work on a base that is shared and read-only, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
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
from .releasing import on_release

_KINDS = {
    "SHADOW": "it wraps whole decoder layers, which are what lorashard gathers, and runs a second model beside them",
    "XLORA": "it runs the model a second time inside of its own forward, while units of the first are in use",
}
_OPTIONS = {
    "kasa_config": "KaSA cuts singular values out of the base's weights, and lorashard reads the base as it is",
    "arrow_config": "PEFT makes its router from adapters that are on the model already (create_arrow_model), and a new "
    "model has none",
}

# What Python asks a whole model for, by the hook that it calls, and what to do instead.
_HOOKS = {
    "__deepcopy__": "copy.deepcopy would copy the model with its base, which is shared and read-only here: add a "
    "second adapter to it (add_adapter), or load the model once more",
    "__reduce_ex__": "pickle (torch.save of the whole model) and copy.copy would take along the base, which rests in "
    "shards, files or buffers here: save the adapter with save_pretrained, and load it with lorashard.load_adapter; or "
    "torch.save(model.state_dict()), which leaves the base out",
}
_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}
_REFUSED = (*_HOOKS, *_CASTS, "to", "type", "resize_token_embeddings")


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
            f"peft_type: {kind} cannot work on a sharded base: {_KINDS[kind]}; choose another, such as LORA"
        )
    if is_in_memory:
        if quantization is not None and getattr(config, "layer_replication", None):
            raise ConfigError(
                "layer_replication: of a model in memory it is not known any more which shared weights are a layer's, "
                "and to be quantized: give the checkpoint to lorashard.load with quantization=..."
            )
        return
    for option, reason in _OPTIONS.items():
        if getattr(config, option, None) is not None:
            raise ConfigError(f"{option}: {reason}; leave it out, or give the finished PeftModel to lorashard.shard")
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
            f"the adapter would train weights of the base itself ({trained[0]}), which is shared read-only: leave out "
            "PEFT's bias option, or name whole modules in modules_to_save"
        )


def refuse_unfrozen_base(model: nn.Module, decoder: nn.Module, engine: Engine) -> None:
    """Let each pass with gradients through `decoder` raise ConfigError if a script has unfrozen weights of the base.

    Those of a sharded unit would get no gradient, and those of a resident one a gradient that DDP does not reduce. One
    flag of each weight is all that is looked at.
    """

    def check(*_: object) -> None:
        if not torch.is_grad_enabled():
            return
        weights = ((weight, unit.is_resident) for unit in engine.units for weight in unit.weights)
        names = [weight.placeholder.full_name for weight, is_resident in weights if _trains(weight, is_resident)]
        if names:
            raise ConfigError(
                f"expected a base that is frozen, found requires_grad=True on {len(names)} of its weights "
                f"({shorten(names, 3)}): the base is shared read-only, and these would not be trained. Name the "
                "modules in modules_to_save of the LoraConfig (layer norms, a head), or the tokens of an embedding in "
                "trainable_token_indices, and leave requires_grad of the base alone"
            )

    on_release(_base_of(model), decoder.register_forward_pre_hook(check).remove)


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
            f"expected a base of plain weights in memory, found {found}: give the checkpoint to lorashard.load with "
            "quantization=..., or the unquantized model to lorashard.shard with it"
        )


def refuse_calls(model: nn.Module, dtypes: Set[torch.dtype]) -> None:
    """Let calls that would cast, resize, copy or pickle the base raise ShardError, which names the call.

    Without that an operation of torch is refused, deep inside of the call. What changes nothing goes through, and so
    does everything on a base that has been given back (`release`).

    Args:
        dtypes: of the base's weights.
    """
    base: Any = _base_of(model)
    before = {name: base.__dict__[name] for name in _REFUSED if name in base.__dict__}
    resize = getattr(base, "resize_token_embeddings", None)
    for module in dict.fromkeys((model, base)):
        for hook, reason in _HOOKS.items():
            setattr(module, hook, partial(_refuse, reason))
        for name, dtype in _CASTS.items():
            setattr(module, name, partial(_cast, name, dtypes, getattr(module, name), lambda *_, dtype=dtype: dtype))
        for name, find_dtype in {"to": _find_target, "type": _find_type}.items():
            setattr(module, name, partial(_cast, name, dtypes, getattr(module, name), find_dtype))
        if resize is not None:
            module.resize_token_embeddings = partial(_resize, base, resize)
    on_release(base, partial(_allow_calls, base, before))


def _allow_calls(base: nn.Module, before: Mapping[str, object]) -> None:
    for name in _REFUSED:
        base.__dict__.pop(name, None)
    base.__dict__.update(before)


def _base_of(model: nn.Module) -> nn.Module:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _refuse(reason: str, *args: object, **kwargs: object) -> NoReturn:
    raise ShardError(reason)


def _cast(
    name: str,
    dtypes: Set[torch.dtype],
    original: Callable[..., nn.Module],
    find_dtype: Callable[..., torch.dtype | None],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    dtype = find_dtype(*args, **kwargs)
    if dtype is not None and dtypes - {dtype}:
        wanted = str(dtype).removeprefix("torch.")
        found = " and ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))
        raise ShardError(
            f"{name}({wanted if name in ('to', 'type') else ''}) would cast the base, which is {found} and read-only "
            f"here: give dtype=torch.{wanted} to lorashard.load, or cast the model before lorashard.shard; the "
            "adapter's own parameters may be cast one by one"
        )
    return original(*args, **kwargs)


def _find_target(*args: Any, **kwargs: Any) -> torch.dtype | None:
    return torch._C._nn._parse_to(*args, **kwargs)[1]  # as nn.Module.to does


def _find_type(dst_type: torch.dtype | str) -> torch.dtype | None:
    return dst_type if isinstance(dst_type, torch.dtype) else torch.empty(0).type(dst_type).dtype


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
            "read-only here: resize the transformers model first, then get_peft_model and lorashard.shard; or train "
            "rows that are there with trainable_token_indices"
        )
    return original(new_num_tokens, *args, **kwargs)
