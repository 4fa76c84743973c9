"""Which placement is the fastest that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

from ..config.placement import (
    PlacementOptions,
    ResolvedPlacement,
    check_group_size,
    check_num_layers,
    choose_group_size,
)
from ..config.quantization_options import describe_quantization
from ..errors import ConfigError, UserError
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..runtime.disk import show_bytes
from .costs import Row, Workload, compute_row, leaves_room
from .hardware import Cluster
from .memory import add_resident_layers, save_activations
from .size import ModelSize
from .wording import show_parameters, show_speed

# Predictions differ from the truth by more than this, so the simpler placement of two that are as close is taken.
_TIE = 0.01


class PlanError(ConfigError):
    """A model that runs, but whose costs cannot be predicted."""


@dataclass(frozen=True)
class Checkpointing:
    """How many decoder layers were chosen to be recomputed, and what that gains.

    Attributes:
        num_recomputed, num_layers: decoder layers that are, and all.
        tokens_per_s: as predicted.
        recomputed_tokens_per_s: of the best placement where all layers are; None if none of these fits.
    """

    num_recomputed: int
    num_layers: int
    tokens_per_s: float
    recomputed_tokens_per_s: float | None

    def __str__(self) -> str:
        line = f"activation checkpointing: {self.num_recomputed} of {self.num_layers} layers recompute"
        if self.num_recomputed < self.num_layers and self.recomputed_tokens_per_s is not None:
            line += f"; predicted {self.tokens_per_s:,.0f} tokens/s instead of {self.recomputed_tokens_per_s:,.0f}"
        return line


@dataclass(frozen=True)
class SweepCosts:
    """What the jobs of a sweep take on each visit of one base.

    Attributes:
        num_jobs: that are planned.
        step_s: seconds of a step of all of them, in the placement to take; None where none fits.
        in_turn_s: seconds of the same step in runs of their own, one after another; None where one of these fits
            nowhere.
        job_bytes: that one more job like the largest takes on each rank, where its layers all recompute if they may.
        most_jobs: how many jobs like the largest fit.
    """

    num_jobs: int
    step_s: float | None
    in_turn_s: float | None
    job_bytes: int
    most_jobs: int

    def __str__(self) -> str:
        line = f"sweep: {self.num_jobs} job{'s' if self.num_jobs > 1 else ''}"
        if self.step_s is not None and self.in_turn_s is not None:
            line += f" take {self.step_s:.2f} s a step together, {self.in_turn_s:.2f} s in runs one after another"
            line += f" ({self.in_turn_s / self.step_s:.1f} times as long)"
        largest = f"{self.job_bytes / 2**30:.2f} GiB"
        return f"{line}; each takes up to {largest} on a rank, and {self.most_jobs:,} like the largest fit"


@dataclass(frozen=True)
class Plan:
    """Every placement's costs, and the one to take.

    Attributes:
        model, cluster: descriptions of what was planned for.
        rows: from the simplest placement to the last resort.
        chosen: the index of a row, or None if none fits.
        reason: why, in a sentence.
        notes: what the reader should know about the figures.
        quantization: a description of the base's; None for its own dtype.
        warnings: what works, but not as one would wish.
        checkpointing: of the row to take, where the layers to recompute were chosen; else None.
        sweep: what the jobs take together and alone; None without a sweep. The rows are of all jobs together.
    """

    model: str
    cluster: str
    free_bytes: int
    rows: tuple[Row, ...]
    chosen: int | None
    reason: str
    notes: tuple[str, ...] = ()
    quantization: str | None = None
    checkpointing: Checkpointing | None = None
    warnings: tuple[str, ...] = ()
    sweep: SweepCosts | None = None

    @property
    def choice(self) -> Row:
        """The row to take.

        Raises:
            ConfigError: none fits.
        """
        if self.chosen is None:
            raise ConfigError(self.reason, option="placement")
        return self.rows[self.chosen]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for a file or another program."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Return what `to_json` gave."""
        rows = tuple(Row(**row | {"placement": ResolvedPlacement(**row["placement"])}) for row in values["rows"])
        checkpointing = values.get("checkpointing") and Checkpointing(**values["checkpointing"])
        sweep = values.get("sweep") and SweepCosts(**values["sweep"])
        lists = {name: tuple(values.get(name, ())) for name in ("notes", "warnings")}
        return cls(**values | lists | {"rows": rows, "checkpointing": checkpointing, "sweep": sweep})


def make_plan(
    size: ModelSize,
    workload: Workload,
    cluster: Cluster,
    options: PlacementOptions | None = None,
    notes: Sequence[str] = (),
    given: ResolvedPlacement | None = None,
) -> Plan:
    """Return the costs of every placement, and the fastest that fits.

    Args:
        options: what is given already. Other placements are shown, but not taken. `workload` is that of its
            `sequence_parallel_size`; `auto` is 1.
        given: what is taken, whatever it costs, where nothing is left to choose.
    """
    options = options or PlacementOptions()
    candidates = list(_candidates(size, workload, cluster, options))
    if given is not None and given not in candidates:
        candidates.append(given)
    rows = [compute_row(size, workload, cluster, placement) for placement in candidates]
    asked = options.combine()["placement"]
    allowed = [row for row in rows if asked in ("auto", row.placement.placement)]
    if given is None:
        chosen = _choose(allowed, cluster)
        reason = _explain(rows, allowed, chosen, cluster)
    else:
        chosen = rows[candidates.index(given)]
        reason = _explain_given(chosen, cluster)
    checkpointing = None
    if chosen is not None and given is None and _is_recomputing_open(options, workload):
        checkpointing = _compare_recomputing(allowed, chosen, cluster, len(size.layers))
    quantization = None if size.quantization is None else describe_quantization(size.quantization)
    model = f"{size.name}: {show_parameters(size.num_parameters)}, {show_bytes(size.base_bytes)}"
    return Plan(
        model=f"{model} {quantization}" if quantization else model,
        cluster=str(cluster),
        free_bytes=cluster.free_bytes,
        rows=tuple(rows),
        chosen=None if chosen is None else rows.index(chosen),
        reason=reason,
        notes=tuple(notes),
        quantization=quantization,
        checkpointing=checkpointing,
    )


def _is_recomputing_open(options: PlacementOptions, workload: Workload) -> bool:
    return options.num_recomputed == "auto" and workload.saved_activations is not None


def _compare_recomputing(allowed: Sequence[Row], chosen: Row, cluster: Cluster, num_layers: int) -> Checkpointing:
    """Return how many layers the chosen row recomputes, beside the best row where all are."""
    asked = chosen.placement.activation_checkpointing_layers
    best = _choose([row for row in allowed if row.placement.activation_checkpointing_layers == "all"], cluster)
    best_tokens_per_s = best.tokens_per_s if best else None
    return Checkpointing(num_layers if asked == "all" else asked, num_layers, chosen.tokens_per_s, best_tokens_per_s)


def _choose(allowed: Sequence[Row], cluster: Cluster) -> Row | None:
    """Return the fastest row that fits, the first of those that are about as fast; None if none fits."""
    fitting = [row for row in allowed if row.fits]
    # The network's speed is a guess, and it may be shared: no base crosses it that fits inside the nodes.
    inside = {row.placement.placement for row in fitting if row.placement.group_size <= cluster.ranks_per_node}
    chosen = None
    for row in fitting:
        if row.placement.group_size > cluster.ranks_per_node and row.placement.placement in inside:
            continue
        if chosen is None or row.tokens_per_s > chosen.tokens_per_s * (1 + _TIE):
            chosen = row
    return chosen


def agree_on_plan(free_bytes: int, plan: Callable[[int], Plan]) -> Plan:
    """Return one plan on every rank, made by rank 0 for the rank that has least memory.

    Ranks with different plans would wait for each other forever.

    Args:
        free_bytes: device memory that is free on this rank.
        plan: makes the plan for that much memory.

    Raises:
        UserError: rank 0's, on every rank.

    Ranks: collective over all ranks.
    """
    least_bytes = min(dist.gather_objects(free_bytes))

    def make() -> Plan:
        with explained_planning():
            return plan(least_bytes)

    made = dist.broadcast_object(raise_on_all_ranks(make, on_rank=0))
    assert made is not None
    return made


@contextmanager
def explained_planning() -> Iterator[None]:
    """Raise a `PlanError` in place of any error that is no UserError: a model's own code runs, and may raise anything.

    Raises:
        UserError: planning's own, or a `PlanError`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise PlanError(f"this model cannot be planned ({type(error).__name__}: {lines[0]})") from error


def name_placement(placement: ResolvedPlacement, num_ranks: int) -> str:
    """Return a placement's name as the options are spelled."""
    words: list[str] = [placement.placement]
    if placement.placement in ("shard", "host") and placement.group_size != num_ranks:
        words.append(f"shard_group_size {placement.group_size}")
    if placement.resident_layers:
        words.append(f"resident_layers {placement.resident_layers}")
    if placement.activation_checkpointing_layers != "all":
        words.append(f"activation_checkpointing_layers {placement.activation_checkpointing_layers}")
    if placement.sequence_parallel_size != 1:
        words.append(f"sequence_parallel_size {placement.sequence_parallel_size}")
    return ", ".join(words)


def _candidates(
    size: ModelSize, workload: Workload, cluster: Cluster, options: PlacementOptions
) -> Iterator[ResolvedPlacement]:
    """Yield the placements to choose from, the simplest first."""
    meant = options.combine()
    is_cpu = cluster.hardware.device_type == "cpu"
    asked_size, asked_layers = meant["shard_group_size"], options.num_resident

    def make(placement: Any, group_size: int) -> ResolvedPlacement:
        layers = 0 if asked_layers == "auto" or placement == "replicate" else asked_layers
        recomputed = options.num_recomputed
        return ResolvedPlacement(
            placement,
            group_size,
            layers,
            options.prefetch,
            options.layer_microbatch_size,
            "all" if recomputed == "auto" else recomputed,
            options.unit_paths,
            options.wait_warning_s,
            1 if options.sequence_parallel_size == "auto" else options.sequence_parallel_size,
            options.mlp_tile_tokens,
        )

    check_num_layers("resident_layers", asked_layers, len(size.layers))
    check_num_layers("activation_checkpointing_layers", options.activation_checkpointing_layers, len(size.layers))
    groups = [choose_group_size(asked_size, cluster.num_ranks, cluster.ranks_per_node)]
    check_group_size(groups[0], cluster.num_ranks)
    if asked_size is None and groups[0] < cluster.num_ranks:
        groups.append(cluster.num_ranks)  # through the network, if a node cannot hold the base
    streaming = [make("shard", group) for group in groups if cluster.num_ranks > 1]
    if not is_cpu or meant["placement"] == "host":  # on a CPU the host's memory is the device's
        streaming += [make("host", group) for group in groups]
    is_fitting = partial(leaves_room, size, workload, cluster)
    for placement in [make("replicate", 1), *streaming, make("file", 1)]:
        uses = []
        if _is_recomputing_open(options, workload):
            uses.append(save_activations)
        is_open = asked_layers == "auto" and placement.placement != "replicate"
        if is_open and not (is_cpu and placement.placement == "file"):
            uses.append(add_resident_layers)
        yield from _use_memory(placement, [partial(use, size, fits=is_fitting) for use in uses])


def _use_memory(
    placement: ResolvedPlacement, uses: Sequence[Callable[..., ResolvedPlacement | None]]
) -> Iterator[ResolvedPlacement]:
    """Yield `placement`, and what fills the memory that it leaves: with each use alone, then one on top of the other.

    Which of them gains more for its bytes depends on the links and the tokens, so either may come first.
    """
    found = [placement]
    for order in [*((use,) for use in uses), *permutations(uses, 2)]:
        filled: ResolvedPlacement | None = placement
        for use in order:
            filled = None if filled is None else use(placement=filled)
        if filled is not None and filled not in found:
            found.append(filled)
    yield from found


def _describe_room(row: Row, cluster: Cluster) -> str:
    return f"{row.peak_bytes / 2**30:.1f} of {cluster.free_bytes / 2**30:.1f} GiB"


def _explain_given(row: Row, cluster: Cluster) -> str:
    name = name_placement(row.placement, cluster.num_ranks)
    if row.lacks:
        return f"{name}, as asked, which is predicted to need {row.lacks}"
    return f"{name}, as asked: {show_speed(row.tokens_per_s)} in {_describe_room(row, cluster)}"


def _explain(rows: Sequence[Row], allowed: Sequence[Row], chosen: Row | None, cluster: Cluster) -> str:
    num_ranks = cluster.num_ranks
    if not allowed:
        return f"the placement that is asked for is none for {num_ranks} ranks; take auto, or more ranks"
    if chosen is None:
        least = min(allowed, key=lambda row: row.peak_bytes)
        return (
            f"nothing fits: {name_placement(least.placement, num_ranks)} needs least, {least.lacks}; take more or "
            "larger GPUs, fewer tokens a microbatch, activation checkpointing, or a smaller lora_r"
        )
    name, room = name_placement(chosen.placement, num_ranks), _describe_room(chosen, cluster)
    if chosen.placement.placement == "replicate":
        return f"{name}: the whole base fits on each rank ({room}), and nothing is faster than to move none of it"
    waiting = f"{chosen.wait_s / chosen.step_s:.0%} of a step waiting"
    sentence = f"{name}: {show_speed(chosen.tokens_per_s)} in {room}, {waiting}"
    if rows[0].lacks:
        sentence += f"; replicate would need {rows[0].lacks}"
    slower = [row.tokens_per_s for row in allowed if row.fits and row.tokens_per_s * (1 + _TIE) < chosen.tokens_per_s]
    return sentence + (f", the next best that fits reaches {show_speed(max(slower))}" if slower else "")
