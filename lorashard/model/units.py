"""Find the units of a model from its structure: the embedding, each decoder layer, the final norm with the LM head.

A model of several towers, such as one for images, has a unit for each of their blocks too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from torch import nn

from ..engine import Owner, Part, Placeholder
from ..errors import CheckpointError, ConfigError
from ..quantization.format import Quantizer
from .stacks import callable_parts, find_layers, find_stacks, get_output_embeddings, is_container, is_named

# `WHOLE` is resident, whatever the placement.
WHOLE, EMBEDDING, TOWER, LAYER, HEAD = "whole", "embedding", "tower", "layer", "head"

Item = TypeVar("Item")


@dataclass
class FoundWeight:
    """A frozen tensor of the base, by its name in the checkpoint, and every place that reads it.

    Attributes:
        quantizer: the format that it is kept in; None if it is not quantized.
    """

    name: str
    parameter: nn.Parameter
    owners: list[Owner] = field(default_factory=list)
    quantizer: Quantizer | None = None

    def parts(self) -> tuple[Part, ...]:
        """Return the tensors that keep it: itself, or those of the format that it is quantized to."""
        if self.quantizer is None:
            return (Part("", self.parameter.dtype, tuple(self.parameter.shape)),)
        return self.quantizer.parts(self.parameter.shape)


@dataclass(eq=False)
class FoundUnit:
    """A unit before its weights have a home."""

    name: str
    kind: str
    weights: list[FoundWeight] = field(default_factory=list)


@dataclass(eq=False)
class FoundVisit:
    """An entry in the order of the forward: entering any of `modules` needs `unit`."""

    unit: FoundUnit
    kind: str
    modules: list[nn.Module]


@dataclass
class Structure:
    """The units of a model, in the order of one forward.

    Attributes:
        visits: a tied embedding's unit comes twice, first as the embedding and last as the head.
        roots: modules whose call is a whole forward, outermost first.
    """

    visits: list[FoundVisit]
    roots: list[nn.Module]

    @property
    def units(self) -> list[FoundUnit]:
        return list(dict.fromkeys(visit.unit for visit in self.visits))


def join_structure(structure: Structure, other: Structure) -> None:
    """Let the units of `structure` be read by another model on the same base too, whose own structure is `other`.

    Raises:
        ConfigError: the models have other units, or other weights in them.
    """
    for visit, its_visit in zip_longest(structure.visits, other.visits):
        if visit is None or its_visit is None or visit.unit.name != its_visit.unit.name:
            raise ConfigError("the jobs' models have other units", option="adapters")
        visit.modules += its_visit.modules
    for unit, its_unit in zip(structure.units, other.units, strict=True):
        weights = {weight.name: weight for weight in unit.weights}
        its_weights = {weight.name: weight for weight in its_unit.weights}
        if differing := sorted(weights.keys() ^ its_weights.keys()):
            raise ConfigError(
                f"the jobs' adapters leave other weights of the base in {unit.name}",
                option="adapters",
                expected="the same base under each",
                found=f"{differing[0]} in only one of them",
            )
        for name, weight in its_weights.items():
            weights[name].owners += weight.owners
        its_unit.weights = []


def size_class(kind: str) -> str:
    """Return which slots a unit of a kind takes: those of layers, or those of vocabulary-sized units."""
    return LAYER if kind in (LAYER, TOWER) else "vocabulary"


def find_structure(model: nn.Module, is_base: Callable[[nn.Parameter], bool]) -> Structure:
    """Group every base parameter of `model` into units.

    Each decoder layer is one, and each block of another tower, such as one for images. What the decoder has after its
    layers is the head, and all else the embedding.

    Args:
        model: the outermost module, usually a PeftModel.
        is_base: returns whether a parameter is the base's, and not the adapter's.

    Raises:
        CheckpointError: no decoder layers are found.
    """
    search = _Search(model)
    for weight in _find_weights(model, is_base):
        search.place(weight)
    search.join_tied()
    visits = [visit for visit in search.visits if visit.unit.weights and (visit.modules or visit.kind == WHOLE)]
    return Structure(visits, search.roots)


class _Search:
    """The visits of a model, and which of them each module belongs to."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_modules())
        self._path_of = {module: path for path, module in named.items()}
        layers = find_layers(model)
        names = [self._name(layer) if is_named(model) else f"layers.{i}" for i, layer in enumerate(layers)]
        self._whole = FoundVisit(FoundUnit("whole", WHOLE), WHOLE, [])
        self._embedding = FoundVisit(FoundUnit("embedding", EMBEDDING), EMBEDDING, [])
        self._head = FoundVisit(FoundUnit("head", HEAD), HEAD, [])
        self._tied = FoundVisit(self._head.unit, EMBEDDING, [])
        self._layers = [FoundVisit(FoundUnit(n, LAYER), LAYER, [layer]) for n, layer in zip(names, layers, strict=True)]
        self._towers: list[FoundVisit] = []
        self._visit_of: dict[nn.Module, FoundVisit] = {}
        self._entry_of: dict[nn.Module, nn.Module] = {}

        above = [_paths_above(self._path_of[layer]) for layer in layers]
        spine = {module for path, module in named.items() if path in set().union(*above)}
        above_all = [module for path, module in named.items() if path in set.intersection(*above)]
        self.roots = [module for module in above_all if not is_container(module)]
        for parent in sorted(spine, key=lambda module: -len(self._path_of[module])):
            self._assign_children(parent, spine | set(layers), parent in above_all, model)
        self._assign_blocks()

    @property
    def visits(self) -> list[FoundVisit]:
        """In the order of a forward."""
        return [self._whole, self._embedding, self._tied, *self._towers, *self._layers, self._head]

    def _name(self, module: nn.Module) -> str:
        return _base_name(self._path_of[module])

    def _assign_children(self, parent: nn.Module, way: set[nn.Module], is_above_all: bool, model: nn.Module) -> None:
        """Assign the children of a module above the layers to the embedding or the head."""
        stacks = {
            child: [] if child in way or is_named(model) else list(find_stacks(child)) for child in parent.children()
        }
        # Beside towers the decoder is one module: what joins it to them may be listed after it, and runs before.
        is_beside_towers = any(stacks.values()) and not any(is_container(child) for child in stacks if child in way)
        output = get_output_embeddings(model)
        is_past_layers = False
        for child in stacks:
            if child in way:
                is_past_layers = True
                continue
            is_head = is_past_layers and is_above_all and not stacks[child]
            is_head = is_head and (child is output or not is_beside_towers)
            for part in callable_parts(child):
                for module in part.modules():
                    self._visit_of.setdefault(module, self._head if is_head else self._embedding)
                    self._entry_of.setdefault(module, part)
            for block in (block for stack in stacks[child] for block in callable_parts(stack)):
                self._towers.append(FoundVisit(FoundUnit(self._name(block), TOWER), TOWER, [block]))

    def _assign_blocks(self) -> None:
        """Assign the modules of layers and towers to them; those that several share, to the embedding."""
        blocks = [*self._layers, *self._towers]
        uses = Counter(module for visit in blocks for module in visit.modules[0].modules())
        for visit in blocks:
            for module in visit.modules[0].modules():
                self._visit_of[module] = visit if uses[module] == 1 else self._embedding
                self._entry_of[module] = module

    def place(self, weight: FoundWeight) -> None:
        """Put a weight in a unit, which is entered wherever the weight is read.

        A weight of a module that runs from before the layers to after them is in the resident unit.
        """
        visits = [self._visit_of.get(owner.module, self._whole) for owner in weight.owners]
        chosen = visits[0] if len(set(visits)) == 1 else self._embedding
        for visit in (self._head, self._whole):
            chosen = visit if visit in visits else chosen
        chosen.unit.weights.append(weight)
        if chosen.kind not in (EMBEDDING, HEAD):
            return
        for owner, visit in zip(weight.owners, visits, strict=True):
            stop = self._tied if chosen is self._head and visit is not chosen else chosen
            entry = self._entry_of[owner.module]
            if entry not in stop.modules:
                stop.modules.append(entry)

    def join_tied(self) -> None:
        """Move all of the embedding's weights to a head that is tied to it: they need one slot instead of two."""
        if self._tied.modules:
            self._head.unit.weights += self._embedding.unit.weights
            self._tied.modules += self._embedding.modules
            self._embedding.unit.weights = []


def find_units(model: nn.Module, is_base: Callable[[nn.Parameter], bool]) -> list[FoundUnit]:
    """Return the units to read weights by, in any order; where no layers are found, each weight is one."""
    try:
        return find_structure(model, is_base).units
    except CheckpointError:
        return [FoundUnit(weight.name, LAYER, [weight]) for weight in _find_weights(model, is_base)]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items, or all if there are fewer, spread evenly: the middle one of each equal part."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def _find_weights(model: nn.Module, is_base: Callable[[nn.Parameter], bool]) -> list[FoundWeight]:
    found: dict[nn.Parameter, FoundWeight] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not is_base(parameter):
                continue
            if parameter not in found:
                name = parameter.full_name if isinstance(parameter, Placeholder) else _base_name(f"{path}.{attribute}")
                found[parameter] = FoundWeight(name, parameter)
            found[parameter].owners.append(Owner(module, attribute))
    return list(found.values())


def _base_name(path: str) -> str:
    """Return a name in the base model, without what PEFT's wrappers add."""
    return path.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _paths_above(path: str) -> set[str]:
    """Return the paths of the modules that hold the one at `path`."""
    return {"", *(path[:i] for i, char in enumerate(path) if char == ".")}
