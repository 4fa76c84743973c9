"""Put the units of a model under an engine: give each a home, replace the weights by placeholders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from ..dist import ShardGroup
from ..engine import Engine, Placeholder, Unit, Visit, Weight
from ..errors import ConfigError
from .generating import prepare_generation
from .homes import MakeHome
from .identity import ADAPTER_NAME, BaseIdentity
from .states import find_base_names, keep_base_out, sign_state
from .units import EMBEDDING, HEAD, FoundWeight, Structure, size_class

ENGINE_ATTRIBUTE = "_lorashard_engine"
BASE_ATTRIBUTE = "_lorashard_base"


@dataclass(frozen=True)
class LoadedBase:
    """The files that a base was loaded from."""

    folder: Path
    identity: BaseIdentity


def shard_structure(
    model: nn.Module,
    structure: Structure,
    make_home: MakeHome,
    group: ShardGroup,
    device: torch.device,
    prefetch: int,
) -> Engine:
    """Give every unit of `structure` a home, and let an engine run `model`.

    Args:
        make_home: makes and fills the home of a unit; asked for one after another.
        group: the ranks that units are sharded over; they compare where they stand.

    Ranks: local, but every rank must do the same.
    Memory: the homes, and never more than one unit beside them.
    """
    units: dict[int, Unit] = {}
    for index, found in enumerate(structure.units):
        home = make_home(found)
        weights = [Weight(_placeholder_for(w, device), w.owners) for w in found.weights]
        units[id(found)] = Unit(found.name, index, size_class(found.kind), weights, home)
        found.weights = []  # the whole weights are free to go
    visits = [
        Visit(units[id(v.unit)], tuple(v.modules), holds=v.unit.kind == HEAD, has_backward=v.kind != EMBEDDING)
        for v in structure.visits
    ]
    engine = Engine(visits, structure.roots, group, device, prefetch)
    setattr(model, ENGINE_ATTRIBUTE, engine)
    if isinstance(model, PeftModel):
        # PEFT's default also writes an embedding that an adapter targets; a frozen one is in the base's own files.
        model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False)
    if device.type == "cpu":
        model.to = partial(_move, model.to)  # type: ignore[method-assign]
    if not all(unit.is_resident for unit in engine.units):
        refuse_merging(model)
    prepare_generation(model, engine)
    keep_base_out(model, engine)
    ignore_base_in_ddp(model, engine)
    return engine


def ignore_base_in_ddp(model: nn.Module, engine: Engine) -> None:
    """Let accelerate and Trainer wrap the model in DDP, which must neither broadcast nor look at the base."""
    model._ddp_params_and_buffers_to_ignore = list(_base_names(model, engine))  # type: ignore[assignment]


def remember_base(model: PeftModel, base: LoadedBase) -> None:
    """Let every adapter and state that `model` saves carry the hash of its base."""
    setattr(model, BASE_ATTRIBUTE, base)
    sign_state(model, base.identity)
    model.save_pretrained = partial(_save, model, model.save_pretrained, base.identity)


def _save(
    model: PeftModel,
    original: Callable[..., None],
    identity: BaseIdentity,
    save_directory: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(save_directory, *args, **kwargs)
    for name in kwargs.get("selected_adapters") or model.peft_config:
        folder = Path(save_directory, "" if name == "default" else name)
        if kwargs.get("is_main_process", True) and (folder / ADAPTER_NAME).is_file():
            identity.write(folder)


def refuse_merging(model: nn.Module) -> None:
    """Let PEFT's merging in place raise ConfigError, before it has merged the first layer."""
    for name in ("merge_adapter", "merge_and_unload"):
        if isinstance(model, PeftModel):
            setattr(model.base_model, name, partial(_refuse, name))


def _refuse(name: str, *args: object, **kwargs: object) -> None:
    raise ConfigError(
        f"{name} would change the base in place (as TRL's use_vllm does, to hand vLLM the whole weights), but it is "
        "sharded or read-only here: load with placement='replicate', or merge the saved adapter; with TRL leave "
        "use_vllm off"
    )


def _move(original: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Move a model; accelerate calls the CPU `cpu:0`, and torch would copy what is there already, mapped files too."""
    cpu = torch.device("cpu")
    plain = [cpu if _is_cpu(value) else value for value in args]
    return original(*plain, **{name: cpu if _is_cpu(value) else value for name, value in kwargs.items()})


def _is_cpu(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "cpu"


def _placeholder_for(weight: FoundWeight, device: torch.device) -> Placeholder:
    return Placeholder(weight.name, weight.parameter.shape, weight.parameter.dtype, device)


def _base_names(model: nn.Module, engine: Engine) -> Iterator[str]:
    yield from find_base_names(model, engine)
    adapter_modules = {module for module in model.modules() if any(p.requires_grad for p in module.parameters(False))}
    for path, module in model.named_modules():
        if module not in adapter_modules:
            for attribute in module._buffers:
                yield f"{path}.{attribute}" if path else attribute
