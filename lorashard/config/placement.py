"""Where the base may rest, as a person chooses it. Imports no torch: the command line reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError

Placement = Literal["replicate", "shard", "host", "file"]
_WAIT_WARNING_S = 60.0  # as dist.WAIT_WARNING_S, which only torch could bring here
_MEANT = ("placement", "shard_group_size", "resident_layers")
_STRATEGIES: dict[str, dict[str, str]] = {
    "FULL_SHARD": {"placement": "shard", "shard_group_size": "all"},
    "SHARD_GRAD_OP": {"placement": "shard", "resident_layers": "all"},
    "NO_SHARD": {"placement": "replicate"},
    "HYBRID_SHARD": {"placement": "shard", "shard_group_size": "node"},
}


class PlacementOptions(BaseModel):
    """Where the frozen base rests, and how it comes to be whole. Speed and memory depend on it, never a result."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    placement: Literal["auto", "replicate", "shard", "host", "file"] = "auto"
    """Where the base rests: `shard` keeps 1/N of it on each of N ranks, `replicate` all of it, `host` 1/N in each
    rank's host memory, `file` nothing: it is read from the checkpoint's own files. With `auto`, `finetune` plans and
    takes the fastest that fits; so does `load` where it is told the batch. `shard` knows none, and takes `shard`."""
    cpu_offload: bool = False
    """The same as `placement: host`."""
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None = None
    """FSDP's name of a placement."""
    shard_group_size: Literal["node", "all"] | int | None = None
    """Shard over this many consecutive ranks, those of a `node`, or `all`, and replicate across; not given: over those
    of a node if it has several, else over all."""
    resident_layers: Literal["auto", "all"] | int = "auto"
    """How many decoder layers, spread evenly, stay whole on each rank; `all` means every unit; `auto` is planned by
    `finetune`, by `load` where it is told the batch, and where an adapter is used; else it is 0."""
    prefetch: int = Field(default=1, ge=0)
    """How many layers ahead to gather or copy; each takes a slot of memory."""
    layer_microbatch_size: int | None = Field(default=None, ge=1)
    """Rows that go through a decoder layer at a time, so that a large batch takes one gather a layer and no more memory
    inside it; not given: the whole batch."""

    activation_checkpointing_layers: Literal["auto", "all"] | int = "all"
    """How many decoder layers activation checkpointing recomputes, spread evenly; the others keep their activations.
    With `auto`, `finetune`, and `load` where it is told the batch, leave out as many as memory allows."""
    unit_paths: list[str] | None = None
    """Paths of the modules to gather one at a time, such as `model.layers` or `model.block_*`, where the decoder layers
    are not found from the model itself or are too large; everything that counts layers then counts these."""
    wait_warning_s: float = Field(default=_WAIT_WARNING_S, ge=0)
    """Seconds that a rank waits for the others where they compare what they are about to do, before it says on stderr,
    once for each wait, where it is and where they are; 0: never."""

    @model_validator(mode="after")
    def _check(self) -> PlacementOptions:
        meant = self.combine()
        for name, least in (("resident_layers", 0), ("shard_group_size", 1), ("activation_checkpointing_layers", 0)):
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name}: expected {least} or more, found {value}")
        if meant["placement"] == "host" and meant["resident_layers"] == "all":
            raise ValueError(
                "placement: host with resident_layers: all would keep the whole base on each device; that is "
                "placement: replicate"
            )
        pointless = {"replicate": ("shard_group_size", "resident_layers"), "file": ("shard_group_size",)}
        for name in pointless.get(meant["placement"], ()):
            if getattr(self, name) not in (None, "auto"):
                raise ValueError(f"{name} has no meaning with placement: {meant['placement']}, which shards nothing")
        return self

    @property
    def is_placement_open(self) -> bool:
        """Whether something is left to be planned."""
        is_asked = "resident_layers" in self.model_fields_set and self.resident_layers == "auto"
        is_asked |= self.activation_checkpointing_layers == "auto"
        return self.combine()["placement"] == "auto" or is_asked

    def combine(self) -> dict[str, Any]:
        """Return what is meant after FSDP's names and `cpu_offload` have had their say."""
        meant: dict[str, Any] = {name: getattr(self, name) for name in _MEANT}
        for name, value in _STRATEGIES.get(self.sharding_strategy or "", {}).items():
            if meant[name] not in (None, "auto", value):
                raise ValueError(
                    f"sharding_strategy {self.sharding_strategy} means {name}: {value}, but {name}: {meant[name]} is "
                    "given too; leave one of them out"
                )
            meant[name] = value
        if self.cpu_offload:
            if meant["placement"] not in ("auto", "shard", "host"):
                raise ValueError(
                    f"cpu_offload: true means placement: host, but the placement is {meant['placement']}; leave one of "
                    "them out"
                )
            meant["placement"] = "host"
        return meant


@dataclass(frozen=True)
class ResolvedPlacement:
    """A placement with nothing left to choose.

    Attributes:
        group_size: ranks that a unit is sharded over.
        resident_layers: decoder layers that stay whole, or `all` units.
        activation_checkpointing_layers: decoder layers that are recomputed where activation checkpointing is on.
        unit_paths: modules that are gathered one at a time, where they were named.
        wait_warning_s: how long a rank waits for others before it says where each stands; 0: for ever.
    """

    placement: Placement
    group_size: int
    resident_layers: Literal["all"] | int
    prefetch: int
    layer_microbatch_size: int | None
    activation_checkpointing_layers: Literal["all"] | int = "all"
    unit_paths: list[str] | None = None
    wait_warning_s: float = _WAIT_WARNING_S


def read_placement(**options: object) -> PlacementOptions:
    """Return the options of `load` and `shard`.

    Raises:
        ConfigError: a wrong value or combination.
    """
    try:
        return PlacementOptions(**options)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ConfigError(explain_invalid(error)) from error


def check_group_size(group_size: int, world_size: int) -> None:
    """Refuse groups that cannot share out the ranks.

    Raises:
        ConfigError: `group_size` does not divide `world_size`.
    """
    if world_size % group_size:
        raise ConfigError(f"shard_group_size: expected a divisor of the {world_size} ranks, found {group_size}")


def check_num_layers(name: str, asked: str | int, num_layers: int) -> None:
    """Refuse more decoder layers than a model has.

    Raises:
        ConfigError: `asked` is a larger number.
    """
    if isinstance(asked, int) and asked > num_layers:
        raise ConfigError(f"{name}: this model has {num_layers} decoder layers, found {asked}; for all of them say all")


def choose_group_size(asked: str | int | None, world_size: int, node_size: int | None) -> int:
    """Return over how many ranks a unit is sharded.

    Where it is not said, those of a node: the base stays off the network. A node of one rank shards nothing, so that
    ranks each alone on a node share the base.

    Args:
        asked: `shard_group_size`.
        node_size: ranks on each node, where that is known; `node` needs it.
    """
    if isinstance(asked, int):
        return asked
    if node_size is None or asked == "all" or (asked is None and node_size == 1):
        return world_size
    return node_size


def resolve_placement(options: PlacementOptions, world_size: int, node_size: int | None) -> ResolvedPlacement:
    """Return what the options mean for a number of ranks.

    Args:
        node_size: ranks on each node, if they are as many on all and follow one another.

    Raises:
        ConfigError: the shard groups do not divide the ranks, or `node` is asked for and not known.
    """
    meant = options.combine()
    placement: Placement = "shard" if meant["placement"] == "auto" else meant["placement"]
    asked = meant["shard_group_size"]
    if asked == "node" and node_size is None:
        raise ConfigError(
            "shard_group_size: node needs a launcher that tells LOCAL_WORLD_SIZE and LOCAL_RANK, as many ranks on each "
            "node, and ranks that follow one another there; start with torchrun, or give the number"
        )
    group_size = choose_group_size(asked, world_size, node_size)
    if placement in ("replicate", "file"):
        group_size = 1
    check_group_size(group_size, world_size)
    resident = 0 if meant["resident_layers"] == "auto" else meant["resident_layers"]
    checkpointed = options.activation_checkpointing_layers
    if checkpointed == "auto":
        raise ConfigError(
            "activation_checkpointing_layers: auto needs to know the batch: give the number that `lorashard plan` says"
        )
    return ResolvedPlacement(
        placement,
        group_size,
        resident,
        options.prefetch,
        options.layer_microbatch_size,
        checkpointed,
        options.unit_paths,
        options.wait_warning_s,
    )


def explain_placement(options: PlacementOptions) -> str | None:
    """Return what FSDP's names became, or None if none was given."""
    given = [f"sharding_strategy: {options.sharding_strategy}"] if options.sharding_strategy else []
    given += ["cpu_offload: true"] if options.cpu_offload else []
    meant = {name: value for name, value in options.combine().items() if value not in (None, "auto")}
    became = ", ".join(f"{name}: {value}" for name, value in meant.items())
    return f"{' with '.join(given)} became {became}" if given else None


def explain_groups(options: PlacementOptions, group_size: int, world_size: int, node_size: int | None) -> str | None:
    """Return what was chosen for several nodes, or None where that was asked for, or where there is one.

    Args:
        group_size: what was chosen.
        node_size: ranks on each node, where that is known.
    """
    meant = options.combine()
    if meant["shard_group_size"] is not None or meant["placement"] in ("replicate", "file"):
        return None
    if node_size is None or node_size == world_size:
        return None
    if group_size == node_size:
        return (
            f"shard_group_size became node: each of {world_size // node_size} nodes holds the base, sharded over its "
            f"{node_size} ranks, and the adapter's gradients alone cross the network (sharding_strategy: FULL_SHARD "
            f"shards over all {world_size} ranks)"
        )
    return (
        f"shard_group_size became all: each node has one rank, so the base is sharded over the {world_size} nodes and "
        "crosses the network"
    )


def explain_invalid(error: ValidationError) -> str:
    """Say in a line what is wrong with an option."""
    problem = error.errors()[0]
    reason = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return reason
    name = problem["loc"][0]  # what follows is pydantic's own names of a union's members
    if problem["type"] == "missing":
        return f"no {name}: it has to be given"
    return f"{name}: {reason[:1].lower()}{reason[1:]}, found {problem['input']!r}"


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and the last of a range of steps, such as `3-5`, counted from 1.

    Raises:
        ConfigError: it is no such range.
    """
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"profile_steps: expected a step such as 3, or a range such as 3-5, found '{text}'")
    return int(match[1]), int(match[2] or match[1])
