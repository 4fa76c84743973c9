"""The options of the placement, and what they resolve to. Imports no torch: the command line reads it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from .names import ALIASES
from .options import to_config_error

Placement = Literal["replicate", "shard", "host", "file"]
SEQUENCE_PARALLEL_METHODS = ("sft", "dpo", "kto")  # those with `sequence_parallel_size`
_WAIT_WARNING_S = 60.0  # as dist.WAIT_WARNING_S, whose file imports torch
_COMBINED = ("placement", "shard_group_size", "resident_layers")
_LEAST = {
    "resident_layers": 0,
    "shard_group_size": 1,
    "activation_checkpointing_layers": 0,
    "sequence_parallel_size": 1,
}
_STRATEGIES: dict[str, dict[str, str]] = {
    "FULL_SHARD": {"placement": "shard", "shard_group_size": "all"},
    "SHARD_GRAD_OP": {"placement": "shard", "resident_layers": "all"},
    "NO_SHARD": {"placement": "replicate"},
    "HYBRID_SHARD": {"placement": "shard", "shard_group_size": "node"},
}


class PlacementOptions(BaseModel):
    """Where the frozen base rests, and how it is unsharded. Speed and memory depend on it, never a result."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    placement: Literal["auto", "replicate", "shard", "host", "file"] = "auto"
    """Where the base rests: `shard` keeps 1/N of it on each of N ranks, `replicate` all of it, `host` 1/N in each
    rank's host memory, `file` nothing: it is read from the checkpoint's own files. With `auto`, `finetune` plans and
    takes the fastest that fits; so does `load` if it is given the batch. Otherwise `auto` is `shard`."""
    cpu_offload: bool = False
    """The same as `placement: host`."""
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None = None
    """FSDP's name of a placement."""
    shard_group_size: Literal["node", "all"] | int | None = None
    """Shard over this many consecutive ranks, those of a `node`, or `all`, and replicate across the groups. Default: a
    node's ranks if it has several, else all."""
    resident_layers: Literal["auto", "all"] | int = "auto"
    """Number of decoder layers, spread evenly, that stay unsharded on each rank; `all` means every unit. `auto` is
    planned by `finetune`, by `load` if it is given the batch, and when an adapter is used; otherwise it is 0."""
    prefetch: int = Field(default=1, ge=0)
    """Number of layers to gather or copy ahead; each takes a slot of memory."""
    layer_microbatch_size: int | None = Field(default=None, ge=1)
    """Sequences of a batch that pass a decoder layer at a time (per-layer micro-batching): a large batch then takes one
    gather a layer, and no more memory inside it. Default: the whole batch."""
    mlp_tile_tokens: int | None = Field(default=None, ge=1)
    """Tokens that pass a decoder layer's MLP at a time (tiled MLP), each recomputed in backward: less memory for long
    sequences, more time. Default: all tokens."""

    activation_checkpointing_layers: Literal["auto", "all"] | int = "auto"
    """Number of decoder layers, spread evenly, that activation checkpointing recomputes; the others keep their
    activations. `auto` is planned by `finetune`, and by `load` if it is given the batch: as few as memory allows, where
    that is predicted to be faster. Default: `auto` where `placement: auto` is planned, otherwise `all`."""
    sequence_parallel_size: Literal["auto"] | int = "auto"
    """Share each sequence among this many consecutive ranks, each of which holds as large a part of its tokens; for
    sequences too long for one rank. It divides the ranks and the model's attention heads, and a step of all ranks has
    as many times fewer sequences. `auto` is planned by `finetune` for sft, dpo and kto: 1 if anything fits so, else the
    smallest that fits. Default: `auto` where `placement: auto` is planned, otherwise 1."""
    unit_paths: list[str] | None = None
    """Paths of the modules to gather one at a time, such as `model.layers` or `model.block_*`, for models whose decoder
    layers are not found or are too large. Options that count layers then count these."""
    wait_warning_s: float = Field(default=_WAIT_WARNING_S, ge=0)
    """Seconds that a rank waits for the others to reach the same pass before it prints on stderr, once for each wait,
    where each of them is. 0: never."""

    @model_validator(mode="after")
    def _check(self) -> PlacementOptions:
        combined = self.combine()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ConfigError(option=name, expected=f"{least} or more", found=value)
        if combined["placement"] == "host" and combined["resident_layers"] == "all":
            raise ConfigError(
                "host with resident_layers: all would keep all of the base on each device",
                option="placement",
                fix="give placement: replicate, or fewer resident_layers",
            )
        pointless = {"replicate": ("shard_group_size", "resident_layers"), "file": ("shard_group_size",)}
        for name in pointless.get(combined["placement"], ()):
            if getattr(self, name) not in (None, "auto"):
                raise ConfigError(
                    f"has no meaning with placement: {combined['placement']}, which shards nothing", option=name
                )
        return self

    @property
    def is_placement_open(self) -> bool:
        """Whether something is left to plan."""
        left = self.num_resident, self.num_recomputed, self.num_sequence_ranks
        return self.combine()["placement"] == "auto" or "auto" in left

    @property
    def num_resident(self) -> Literal["auto", "all"] | int:
        """`resident_layers`, whose default is 0 where the placement is given."""
        combined = self.combine()
        is_given = combined["placement"] != "auto" and "resident_layers" not in self.model_fields_set
        return 0 if is_given and combined["resident_layers"] == "auto" else combined["resident_layers"]

    @property
    def num_recomputed(self) -> Literal["auto", "all"] | int:
        """`activation_checkpointing_layers`, whose default is `all` where the placement is given."""
        is_asked = "activation_checkpointing_layers" in self.model_fields_set
        return self.activation_checkpointing_layers if is_asked or self.combine()["placement"] == "auto" else "all"

    @property
    def num_sequence_ranks(self) -> Literal["auto"] | int:
        """`sequence_parallel_size`, whose default is 1 where the placement is given."""
        is_asked = "sequence_parallel_size" in self.model_fields_set
        return self.sequence_parallel_size if is_asked or self.combine()["placement"] == "auto" else 1

    def settle_unplanned(self) -> tuple[Self, str]:
        """Return these options where nothing can be planned, and a list in words of what they left open."""
        taken: dict[str, Any] = {"placement": "shard"} if self.combine()["placement"] == "auto" else {}
        taken |= {"resident_layers": 0} if self.num_resident == "auto" else {}
        taken |= {"activation_checkpointing_layers": "all"} if self.num_recomputed == "auto" else {}
        taken |= {"sequence_parallel_size": 1} if self.num_sequence_ranks == "auto" else {}
        return self.model_copy(update=taken), ", ".join(f"{name}: {value}" for name, value in taken.items())

    def check_num_recomputed(self, is_checkpointing: bool, every_n_layers: int, is_offloading: bool) -> None:
        """Refuse an `activation_checkpointing_layers` that contradicts other options of activation checkpointing.

        Raises:
            ConfigError: it is given, and something else says which layers are recomputed, or where activations are.
        """
        asked = self.activation_checkpointing_layers
        if "activation_checkpointing_layers" not in self.model_fields_set or asked == "all":
            return
        if every_n_layers != 1:
            problem = f"{asked} and every_n_layers: {every_n_layers} both choose the recomputed layers"
        elif isinstance(asked, int) and asked and not is_checkpointing:
            problem = f"{asked} layers to recompute, but activation checkpointing is off"
        elif asked == "auto" and is_offloading:
            problem = "auto plans for the device's memory, but activation_offloading keeps activations in host memory"
        else:
            return
        raise ConfigError(problem, option="activation_checkpointing_layers", fix="leave one of them out")

    def check_sequence_parallel(self, method: str, has_jobs: bool, is_precomputing: bool) -> None:
        """Refuse a `sequence_parallel_size` above 1 where sequences cannot be shared among ranks.

        Args:
            has_jobs: whether several adapters train in one run.
            is_precomputing: whether TRL gathers each row's reference values from all ranks before it trains.

        Raises:
            ConfigError: the method is none of `SEQUENCE_PARALLEL_METHODS`, or one of these holds.
        """
        asked = self.sequence_parallel_size
        if asked in ("auto", 1):
            return
        if method not in SEQUENCE_PARALLEL_METHODS:
            problem = f"{method} cannot share a sequence among ranks, which {', '.join(SEQUENCE_PARALLEL_METHODS)} can"
        elif has_jobs:
            problem = "the jobs of a sweep cannot share a sequence among ranks"
        elif is_precomputing:
            problem = "precompute_ref_log_probs gathers rows from all ranks, and would get each several times"
        else:
            return
        raise ConfigError(problem, option="sequence_parallel_size", expected="auto or 1", found=asked)

    def combine(self) -> dict[str, Any]:
        """Return placement, shard_group_size and resident_layers with `sharding_strategy` and `cpu_offload` in them."""
        combined: dict[str, Any] = {name: getattr(self, name) for name in _COMBINED}
        for name, value in _STRATEGIES.get(self.sharding_strategy or "", {}).items():
            if combined[name] not in (None, "auto", value):
                raise ConfigError(
                    f"{self.sharding_strategy} means {name}: {value}, but {name}: {combined[name]} is given too",
                    option="sharding_strategy",
                    fix="leave one of them out",
                )
            combined[name] = value
        if self.cpu_offload:
            if combined["placement"] not in ("auto", "shard", "host"):
                raise ConfigError(
                    f"true means placement: host, but the placement is {combined['placement']}",
                    option="cpu_offload",
                    fix="leave one of them out",
                )
            combined["placement"] = "host"
        return combined


@dataclass(frozen=True)
class ResolvedPlacement:
    """A placement with nothing left to choose.

    Attributes:
        group_size: ranks that a unit is sharded over.
        resident_layers: decoder layers that stay unsharded, or `all` units.
        activation_checkpointing_layers: decoder layers that activation checkpointing recomputes, if it is on.
        unit_paths: modules that are gathered one at a time, if they were named.
        wait_warning_s: how long a rank waits for others before it reports where each of them is; 0: for ever.
        sequence_parallel_size: consecutive ranks that share each sequence.
        mlp_tile_tokens: tokens that pass an MLP at a time; None: all.
    """

    placement: Placement
    group_size: int
    resident_layers: Literal["all"] | int
    prefetch: int
    layer_microbatch_size: int | None
    activation_checkpointing_layers: Literal["all"] | int = "all"
    unit_paths: list[str] | None = None
    wait_warning_s: float = _WAIT_WARNING_S
    sequence_parallel_size: int = 1
    mlp_tile_tokens: int | None = None


def read_placement(**options: object) -> PlacementOptions:
    """Return the options of `load` and `shard`, which may have the other names of `ALIASES`.

    Raises:
        ConfigError: a wrong value or combination.
    """
    given: dict[str, object] = {}
    for written, value in options.items():
        name = written if ALIASES.get(written) not in PlacementOptions.model_fields else ALIASES[written]
        if name in given:
            raise ConfigError(f"given twice, by the name {written} too", option=name, fix="keep one")
        given[name] = value
    try:
        return PlacementOptions(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise to_config_error(error) from error


def check_group_size(group_size: int, world_size: int) -> None:
    """Refuse groups of ranks that are not all of one size.

    Raises:
        ConfigError: `group_size` does not divide `world_size`.
    """
    if world_size % group_size:
        raise ConfigError(option="shard_group_size", expected=f"a divisor of the {world_size} ranks", found=group_size)


def check_num_layers(name: str, asked: str | int, num_layers: int) -> None:
    """Refuse more decoder layers than a model has.

    Raises:
        ConfigError: `asked` is a larger number.
    """
    if isinstance(asked, int) and asked > num_layers:
        raise ConfigError(
            option=name, expected=f"at most this model's {num_layers} decoder layers, or all", found=asked
        )


def check_sequence_parallel_size(asked: int, num_ranks: int, num_heads: int | None = None) -> None:
    """Refuse to share each sequence among numbers of ranks that are not possible.

    Args:
        num_heads: attention heads of the model, where they are known.

    Raises:
        ConfigError: `asked` does not divide `num_ranks`, or `num_heads`.
    """
    most = num_ranks if num_heads is None else math.gcd(num_ranks, num_heads)
    if most % asked:
        heads = "" if num_heads is None else f" and of the model's {num_heads} attention heads"
        raise ConfigError(
            option="sequence_parallel_size",
            expected=f"a divisor of the {num_ranks} ranks{heads}",
            found=asked,
            fix=f"{most} is the largest that works",
        )


def choose_group_size(asked: str | int | None, world_size: int, node_size: int | None) -> int:
    """Return how many ranks a unit is sharded over.

    By default those of a node, which keeps the base off the network; all ranks, if each is alone on its node.

    Args:
        asked: `shard_group_size`.
        node_size: ranks on each node, if that is known; `node` needs it.
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
        ConfigError: the shard groups or `sequence_parallel_size` do not divide the ranks, or `node` is asked for and
            not known.
    """
    combined = options.combine()
    placement: Placement = "shard" if combined["placement"] == "auto" else combined["placement"]
    asked = combined["shard_group_size"]
    if asked == "node" and node_size is None:
        raise ConfigError(
            "node needs as many ranks on each node, numbered consecutively, and a launcher that sets LOCAL_WORLD_SIZE "
            "and LOCAL_RANK",
            option="shard_group_size",
            fix="start with torchrun, or give the number",
        )
    group_size = choose_group_size(asked, world_size, node_size)
    if placement in ("replicate", "file"):
        group_size = 1
    check_group_size(group_size, world_size)
    num_sequence_ranks = 1 if options.sequence_parallel_size == "auto" else options.sequence_parallel_size
    check_sequence_parallel_size(num_sequence_ranks, world_size)
    resident = 0 if combined["resident_layers"] == "auto" else combined["resident_layers"]
    checkpointed = options.activation_checkpointing_layers
    if checkpointed == "auto" and "activation_checkpointing_layers" not in options.model_fields_set:
        checkpointed = "all"
    if checkpointed == "auto":
        raise ConfigError(
            "auto needs to know the batch",
            option="activation_checkpointing_layers",
            fix="give the number that `lorashard plan` prints",
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
        num_sequence_ranks,
        options.mlp_tile_tokens,
    )


def explain_placement(options: PlacementOptions) -> str | None:
    """Return what FSDP's names were resolved to, or None if none was given."""
    given = [f"sharding_strategy: {options.sharding_strategy}"] if options.sharding_strategy else []
    given += ["cpu_offload: true"] if options.cpu_offload else []
    resolved = {name: value for name, value in options.combine().items() if value not in (None, "auto")}
    became = ", ".join(f"{name}: {value}" for name, value in resolved.items())
    return f"{' with '.join(given)} became {became}" if given else None


def explain_groups(options: PlacementOptions, group_size: int, world_size: int, node_size: int | None) -> str | None:
    """Return the default that was taken for several nodes, or None if a value was given or there is one node.

    Args:
        group_size: the default that was taken.
        node_size: ranks on each node, if that is known.
    """
    combined = options.combine()
    if combined["shard_group_size"] is not None or combined["placement"] in ("replicate", "file"):
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


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and the last of a range of steps, such as `3-5`, counted from 1.

    Raises:
        ConfigError: it is no such range.
    """
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(option="profile_steps", expected="a step such as 3, or a range such as 3-5", found=repr(text))
    return int(match[1]), int(match[2] or match[1])
