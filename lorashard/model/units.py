"""Find the units of a model from its structure: the embedding, each decoder layer, the final norm with the LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from ..engine import Owner, Placeholder
from ..errors import CheckpointError

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"

Item = TypeVar("Item")


@dataclass
class FoundWeight:
    """A frozen tensor of the base, by the name it has where it comes from, and every place that reads it."""

    name: str
    parameter: nn.Parameter
    owners: list[Owner] = field(default_factory=list)


@dataclass
class FoundUnit:
    """What is to be gathered at once, before its weights have a home."""

    name: str
    kind: str
    weights: list[FoundWeight] = field(default_factory=list)


@dataclass
class FoundVisit:
    """A stop in the forward's order: entering any of `modules` needs `unit`."""

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
        found: list[FoundUnit] = []
        for visit in self.visits:
            if not any(unit is visit.unit for unit in found):
                found.append(visit.unit)
        return found


def find_decoder_stack(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the path and list of the decoder layers: the outermost ModuleList that weighs most.

    Raises:
        CheckpointError: no ModuleList holds parameters.
    """
    stacks: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(outer + ".") for outer in stacks)
        if isinstance(module, nn.ModuleList) and not is_inside and any(True for _ in module.parameters()):
            stacks[path] = module
    if not stacks:
        raise CheckpointError(
            f"no decoder stack found in {type(model).__name__}: expected an nn.ModuleList of layers that hold "
            "parameters, found none; lorashard cannot shard this architecture"
        )
    path = max(stacks, key=lambda path: sum(p.numel() for p in stacks[path].parameters()))
    return path, stacks[path]


def find_structure(model: nn.Module, is_base: Callable[[nn.Parameter], bool]) -> Structure:
    """Group every base parameter of `model` into units.

    Args:
        model: the outermost module, usually a PeftModel.
        is_base: tells the base's parameters from the adapter's.

    Raises:
        CheckpointError: no decoder stack is found, or a weight sits where no unit can hold it.
    """
    stack_path, stack = find_decoder_stack(model)
    spine_paths = [""] + [stack_path[:i] for i, char in enumerate(stack_path) if char == "."]
    spine = [model.get_submodule(path) for path in spine_paths]
    weights = _find_weights(model, is_base)

    embedding = FoundUnit("embedding", EMBEDDING)
    layers = [FoundUnit(f"layers.{i}", LAYER) for i in range(len(stack))]
    head = FoundUnit("head", HEAD)
    embedding_visit = FoundVisit(embedding, EMBEDDING, [])
    tied_visit = FoundVisit(head, EMBEDDING, [])
    layer_visits = [FoundVisit(unit, LAYER, [layer]) for unit, layer in zip(layers, stack, strict=True)]
    head_visit = FoundVisit(head, HEAD, [])

    visit_of: dict[nn.Module, FoundVisit] = {}
    for visit in layer_visits:
        visit_of |= dict.fromkeys(visit.modules[0].modules(), visit)
    entries: dict[nn.Module, nn.Module] = {}
    for depth in reversed(range(len(spine))):
        is_past_stack = False
        for child in spine[depth].children():
            if child is stack or child in spine:
                is_past_stack = True
                continue
            visit = head_visit if is_past_stack else embedding_visit
            for module in child.modules():
                visit_of.setdefault(module, visit)
                entries.setdefault(module, child)

    for weight in weights:
        visits = []
        for owner in weight.owners:
            if owner.module not in visit_of:
                raise CheckpointError(
                    f"base weight '{weight.name}' sits directly on {type(owner.module).__name__}, outside of the "
                    "embedding, the decoder layers and the head; lorashard cannot shard this architecture"
                )
            visits.append(visit_of[owner.module])
        chosen = head_visit if head_visit in visits else visits[0]
        chosen.unit.weights.append(weight)
        for owner, visit in zip(weight.owners, visits, strict=True):
            entry = entries.get(owner.module)
            if entry is None:
                continue
            stop = tied_visit if visit is embedding_visit and chosen is head_visit else visit
            if entry not in stop.modules:
                stop.modules.append(entry)

    ordered = [embedding_visit, tied_visit, *layer_visits, head_visit]
    return Structure([v for v in ordered if v.unit.weights and v.modules], spine)


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items, or all if there are fewer, spread evenly: the middle of each equal stretch."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def _find_weights(model: nn.Module, is_base: Callable[[nn.Parameter], bool]) -> list[FoundWeight]:
    found: dict[nn.Parameter, FoundWeight] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or not is_base(parameter):
                continue
            if parameter not in found:
                name = parameter.full_name if isinstance(parameter, Placeholder) else _base_name(path, attribute)
                found[parameter] = FoundWeight(name, parameter)
            found[parameter].owners.append(Owner(module, attribute))
    return list(found.values())


def _base_name(path: str, attribute: str) -> str:
    """Return a weight's name in the base model, without what PEFT's wrappers add."""
    return f"{path.removeprefix('base_model.model.')}.{attribute}".replace(".base_layer.", ".")
