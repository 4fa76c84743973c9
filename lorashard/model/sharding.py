"""Put the units of a model under an engine: give each a home, replace the weights by placeholders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from ..config.quantization_options import Quantization
from ..engine import Engine, Placeholder, ScheduleEntry, Unit, Weight
from ..errors import ConfigError
from ..quantization.quantized_weight import QuantizedFormat, Workspace
from ..runtime.dist import ShardGroup
from ..runtime.progress import Progress
from ..weights.derived_from import INITIAL_ADAPTER_NAME, Origin
from ..weights.fingerprint import BaseIdentity, describe_base
from .embeddings import Copies, Embeddings, copy_embeddings
from .generating import prepare_generation
from .homes import MakeHome
from .patches import extend_classes, is_plain
from .refusals import refuse_changes, refuse_merging, refuse_unfrozen_base
from .saving import follow_saving
from .states import find_base_names, keep_base_out, sign_state
from .units import EMBEDDING, HEAD, FoundWeight, Structure, join_structure, size_class

ENGINE_ATTRIBUTE = "_lorashard_engine"
BASE_ATTRIBUTE = "_lorashard_base"
_QUANTIZATION_ATTRIBUTE = "_lorashard_quantization"
_ALSO_IGNORED_ATTRIBUTE = "_lorashard_also_ignored_by_ddp"


@dataclass(frozen=True)
class LoadedBase:
    """The files that a base was loaded from.

    Attributes:
        quantization: what it was quantized to; None if it was not.
        origin: what it was derived from; None if it was not.
    """

    folder: Path
    identity: BaseIdentity
    quantization: Quantization | None = None
    origin: Origin | None = None


def shard_structure(
    model: nn.Module,
    structure: Structure,
    make_home: MakeHome,
    group: ShardGroup,
    device: torch.device,
    prefetch: int,
    has_own_embeddings: bool = False,
    progress: Progress | None = None,
    others: Mapping[nn.Module, Structure] | None = None,
) -> Engine:
    """Give every unit of `structure` a home, and let an engine run `model`.

    Args:
        others: further models on the same base, which the engine runs too, with the structure of each.
        make_home: makes and fills the home of a unit; called for one after another.
        group: the ranks that units are sharded over; they compare their passes.
        has_own_embeddings: the vocabulary is not that of the base's files: the embeddings are saved with the adapter.
        progress: called with how many "units" have a home, of how many.

    Ranks: local, but every rank must do the same.
    Memory: the homes, and never more than one unit beside them; a copy on the host of embeddings that are saved.
    """
    copies = copy_embeddings(model, structure) if has_own_embeddings and isinstance(model, PeftModel) else {}
    others = others or {}
    for other in others.values():
        join_structure(structure, other)
    units: dict[int, Unit] = {}
    workspace = Workspace()
    for index, found in enumerate(structure.units):
        home = make_home(found)
        weights = [
            Weight(
                _placeholder_for(w, device), w.owners, QuantizedFormat(w.quantizer, workspace) if w.quantizer else None
            )
            for w in found.weights
        ]
        units[id(found)] = Unit(found.name, index, size_class(found.kind), weights, home)
        found.weights = []  # the unsharded weights may be freed
        if progress is not None:
            progress(index + 1, len(structure.units), "units")
    visits = [
        ScheduleEntry(units[id(v.unit)], tuple(v.modules), holds=v.unit.kind == HEAD, has_backward=v.kind != EMBEDDING)
        for v in structure.visits
    ]
    engine = Engine(visits, structure.roots, group, device, prefetch, [other.roots for other in others.values()])
    for each, its_structure in {model: structure, **others}.items():
        _prepare(each, its_structure, engine, copies if each is model else {})
    return engine


def _prepare(model: nn.Module, structure: Structure, engine: Engine, copies: Copies) -> None:
    """Tell a model of its engine, and have what PEFT, transformers and accelerate do with it work, or be refused."""
    setattr(model, ENGINE_ATTRIBUTE, engine)
    if not is_plain(engine):
        refuse_merging(model)
    refuse_unfrozen_base(model, structure.roots[-1], engine)
    refuse_changes(model, {weight.placeholder.dtype for unit in engine.units for weight in unit.weights})
    prepare_generation(model, engine)
    embeddings = None
    if isinstance(model, PeftModel):
        embeddings = Embeddings(model, engine, copies)
        follow_saving(model, embeddings, partial(_describe_base, model))
    keep_base_out(model, engine, embeddings if copies else None)
    ignore_base_in_ddp(model, engine)


def base_of(model: torch.nn.Module) -> LoadedBase | None:
    """Return the files that a model from `load` has its base from; None for one that `shard` was given."""
    return model.__dict__.get(BASE_ATTRIBUTE)


def engine_of(model: torch.nn.Module) -> Engine:
    """Return the engine that runs `model`.

    Raises:
        ConfigError: the model did not come from `load` or `shard`.
    """
    for module in model.modules():
        engine = module.__dict__.get(ENGINE_ATTRIBUTE)
        if engine is not None:
            return engine
    raise ConfigError(
        f"this {type(model).__name__} is not sharded", expected="one from lorashard.load or lorashard.shard"
    )


def ignore_base_in_ddp(model: nn.Module, engine: Engine) -> None:
    """Let accelerate and Trainer wrap the model in DDP, which must neither broadcast nor look at the base.

    DDP takes the names from an attribute. Here they are found on each read, since adding an adapter changes them; what
    a script assigns to it, as TRL's `dpo --ignore_bias_buffers` does, is ignored as well as the base, not instead.
    """

    def find(self: nn.Module) -> list[str]:
        return [*_base_names(self, engine), *self.__dict__.get(_ALSO_IGNORED_ATTRIBUTE, ())]

    def add(self: nn.Module, names: Iterable[str]) -> None:
        self.__dict__[_ALSO_IGNORED_ATTRIBUTE] = list(names)

    names = property(find, add)
    extend_classes([model], lambda _: {"_ddp_params_and_buffers_to_ignore": names})


def remember_base(model: PeftModel, base: LoadedBase) -> None:
    """Let every adapter and state that `model` saves carry the hash of its base, and what it was quantized to."""
    setattr(model, BASE_ATTRIBUTE, base)
    sign_state(model, base.identity, base.quantization)


def remember_quantization(model: PeftModel, quantization: Quantization | None) -> None:
    """Let every adapter that `model` saves carry what its base was quantized to, where its files are not known."""
    setattr(model, _QUANTIZATION_ATTRIBUTE, quantization)


def _describe_base(model: PeftModel, first: str | None) -> tuple[Mapping[str, str], Origin | None]:
    """Return what a saved adapter says of its base; see `DescribeBase`.

    An adapter that PEFT converts, by its first form, belongs to the base that this one was derived from.
    """
    base, dtype = base_of(model), getattr(model.get_base_model(), "dtype", None)  # a plain module has none
    if base is None:
        return describe_base(None, model.__dict__.get(_QUANTIZATION_ATTRIBUTE), dtype), None
    own_first = (base.folder / INITIAL_ADAPTER_NAME).resolve()
    if base.origin is not None and first is not None and Path(first).resolve() == own_first:
        return describe_base(BaseIdentity(base.origin.files)), base.origin
    return describe_base(base.identity, base.quantization, dtype), None


def _placeholder_for(weight: FoundWeight, device: torch.device) -> Placeholder:
    return Placeholder(weight.name, weight.parameter.shape, weight.parameter.dtype, device)


def _base_names(model: nn.Module, engine: Engine) -> Iterator[str]:
    yield from find_base_names(model, engine)
    adapter_modules = {module for module in model.modules() if any(p.requires_grad for p in module.parameters(False))}
    for path, module in model.named_modules():
        if module not in adapter_modules:
            for attribute in module._buffers:
                yield f"{path}.{attribute}" if path else attribute
